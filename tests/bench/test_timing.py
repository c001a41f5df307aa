"""Interleaved timing and its ratios, on a clock that the test turns."""

import pytest
import torch

from verkv.bench import timing
from verkv.bench.report import as_record, as_table
from verkv.bench.timing import Comparison, compare, percentile

CPU = torch.device("cpu")


class Clock:
    """Time passes only in the cases."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        self.calls = []
        monkeypatch.setattr(timing.time, "process_time", lambda: self.now)
        monkeypatch.setattr(timing.time, "perf_counter", lambda: self.now + 1e6)

    def case(self, name, *durations):
        durations = list(durations)

        def run():
            self.calls.append(name)
            self.now += durations.pop(0) if len(durations) > 1 else durations[0]

        return run


def test_cases_take_turns_and_warm_up_is_not_counted(monkeypatch):
    clock = Clock(monkeypatch)
    cases = {"a": clock.case("a", 100.0, 1.0), "b": clock.case("b", 100.0, 3.0), "c": clock.case("c", 100.0, 2.0)}
    result = compare("title", cases, "a", rounds=8, seed=1, device=CPU, threads=1)
    assert result.seconds == {"a": [1.0] * 8, "b": [3.0] * 8, "c": [2.0] * 8}
    rounds = [tuple(clock.calls[start : start + 3]) for start in range(3, 27, 3)]
    assert all(sorted(order) == ["a", "b", "c"] for order in rounds)
    assert len(set(rounds)) > 1  # not always the same order
    assert result.ratio("b").median == 3.0


def test_same_seed_same_order(monkeypatch):
    clock = Clock(monkeypatch)
    orders = []
    for seed in (5, 5, 6):
        clock.calls.clear()
        cases = {name: clock.case(name, 1.0) for name in "abcd"}
        compare("title", cases, "a", rounds=6, seed=seed, device=CPU, threads=1)
        orders.append(list(clock.calls))
    assert orders[0] == orders[1] != orders[2]


def test_clock_is_named(monkeypatch):
    clock = Clock(monkeypatch)
    for threads, name in ((1, "CPU"), (2, "wall")):
        result = compare("title", {"a": clock.case("a", 1.0)}, "a", rounds=1, seed=0, device=CPU, threads=threads)
        assert result.clock == name


def test_ratio_of_medians_and_spread_of_rounds():
    """The ratio is of medians; the spread pairs the times of one round, in which disturbances are shared."""
    result = Comparison("title", "base", {"base": [1.0, 2.0, 10.0], "case": [2.0, 6.0, 10.0]}, "CPU")
    ratio = result.ratio("case")
    assert ratio.median == 3.0
    assert ratio.low == pytest.approx(1.2)  # of 1, 2, 3
    assert ratio.high == pytest.approx(2.8)
    assert (result.ratio("base").low, result.ratio("base").high) == (1.0, 1.0)


@pytest.mark.parametrize(("share", "expected"), [(0.0, 1.0), (0.5, 2.0), (0.75, 3.0), (1.0, 4.0)])
def test_percentile(share, expected):
    assert percentile([1.0, 2.0, 4.0], share) == expected


def test_table_and_record():
    facts = {"head dim": 64, "bytes read": 123456.7, "notes": ["needs CUDA"], "VerKV": {"resident share": 0.0625}}
    result = Comparison("attention", "dense", {"dense": [0.002, 0.004], "VerKV": [0.5, 2.0]}, "wall", facts)
    table = as_table(result)
    for text in ("attention (wall time, 2", "3.00 ms", "1.25 s", "416.67", "123,457", "(needs CUDA)", "0.0625"):
        assert text in table
    record = as_record("attention", result)
    assert record["cases"]["VerKV"]["seconds"] == [0.5, 2.0]
    assert record["cases"]["dense"]["ratio"] == 1.0
    assert record["facts"] == facts
