"""Interleaved timing: the cases of a comparison take turns, in random order, so that a disturbance meets them all."""

import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class Ratio:
    """Time of a case over the baseline's: ratio of medians, and 10th and 90th percentile of the rounds' ratios."""

    median: float
    low: float
    high: float


@dataclass(frozen=True)
class Comparison:
    """Cases that were timed together.

    Attributes
    ----------
    title : str
    baseline : str
        The case the others are divided by.
    seconds : dict of str to list of float
        By case, one number per round, in the order of the rounds.
    clock : {"CPU", "wall", "GPU"}
        What the seconds are of.
    facts : dict
        What else a reader should know, for the report.
    """

    title: str
    baseline: str
    seconds: dict[str, list[float]]
    clock: str
    facts: dict[str, object] = field(default_factory=dict)

    def median(self, case: str) -> float:
        """Median seconds of a case."""
        return statistics.median(self.seconds[case])

    def ratio(self, case: str) -> Ratio:
        """A case relative to the baseline."""
        ratios = sorted(a / b for a, b in zip(self.seconds[case], self.seconds[self.baseline], strict=True))
        return Ratio(self.median(case) / self.median(self.baseline), percentile(ratios, 0.1), percentile(ratios, 0.9))


def compare(
    title: str,
    cases: dict[str, Callable[[], object]],
    baseline: str,
    *,
    rounds: int,
    seed: int,
    device: torch.device,
    threads: int,
    warmup: int = 1,
) -> Comparison:
    """Time cases in interleaved rounds.

    Parameters
    ----------
    title : str
    cases : dict of str to function
        What each case does once. Its result is thrown away.
    baseline : str
        One of the cases.
    rounds : int
        In each round every case runs once, in an order drawn anew.
    seed : int
        Of the order.
    device : torch.device
        Where the work happens; a GPU is waited for before and after.
    threads : int
        Threads of torch. With one thread on a CPU the process' own CPU time is taken, which other processes disturb
        less; otherwise the wall clock.
    warmup : int
        Untimed runs of every case before the first round.

    Returns
    -------
    Comparison
    """
    clock = "CPU" if device.type == "cpu" and threads == 1 else "wall"
    now = time.process_time if clock == "CPU" else time.perf_counter
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for case in cases.values():
        for _ in range(warmup):
            case()
    order = random.Random(seed)
    for _ in range(rounds):
        for name in order.sample(list(cases), len(cases)):
            wait_for(device)
            start = now()
            cases[name]()
            wait_for(device)
            seconds[name].append(max(now() - start, 1e-9))  # a coarse clock may stand still
    return Comparison(title, baseline, seconds, clock)


def wait_for(device: torch.device) -> None:
    """Let queued work finish."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def percentile(ordered: list[float], share: float) -> float:
    """Of values in rising order, between the two nearest."""
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])
