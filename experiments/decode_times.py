"""Decode steps timed side by side, by batch and tolerance, and where their time goes."""

import contextlib
import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass
from unittest.mock import patch

import torch
from scored_prompt import ScoredPrompt, verkv_press

from verkv.bench.timing import Comparison, compare, wait_for

RESIDENT, OFFLOADED = "Dense (resident)", "Dense (offload)"
PHASES = ("decide", "fetch", "attention", "GEMMs", "other")


@dataclass(frozen=True)
class Case:
    """A cache to decode on, with the question in it.

    Attributes
    ----------
    name : str
    epsilon : float or None
    cache : transformers.Cache
    tokens : iterator of Tensor, shape (B, 1)
        What is decoded, step by step.
    press : VerKVPress or None
    """

    name: str
    epsilon: float | None
    cache: object
    tokens: Iterator[torch.Tensor]
    press: object = None


def cases(prompt: ScoredPrompt, options, epsilons, delta: float, batch: int = 1) -> list[Case]:
    """Dense attention with the cache resident and, on a GPU, offloaded, and VerKV at every tolerance.

    All hold ``batch`` times the same context, and decode dense attention's own answer to its question.
    """
    answer = dense_answer(prompt, 32)
    caches = {RESIDENT: (None, _repeated(prompt.scored.fork(), batch), None)}
    if prompt.model.device.type == "cuda":
        caches[OFFLOADED] = None, _offloaded(_repeated(prompt.scored.fork(), batch)), None
    scores = {i: s.repeat_interleave(batch, 0) for i, s in prompt.scored.scores[prompt.source].items()}
    for epsilon in epsilons:
        press, cache = verkv_press(options, epsilon, delta), _repeated(prompt.scored.fork(), batch)
        press.seal(prompt.model, cache, scores, prefix_length=prompt.scored.prefix_lengths[prompt.source])
        caches[f"VerKV (ε = {epsilon:g})"] = epsilon, cache, press
    made = []
    for name, (epsilon, cache, press) in caches.items():
        with torch.inference_mode():
            prompt.model(input_ids=prompt.question_ids.expand(batch, -1), past_key_values=cache, logits_to_keep=1)
        tokens = itertools.cycle(ids.expand(batch, 1) for ids in answer)
        made.append(Case(name, epsilon, cache, tokens, press))
    return made


@torch.inference_mode()
def dense_answer(prompt: ScoredPrompt, n_tokens: int) -> list[torch.Tensor]:
    """The first tokens of dense attention's greedy answer, (1, 1) each."""
    cache, next_ids, answer = prompt.scored.fork(), prompt.question_ids, []
    for _ in range(n_tokens):
        logits = prompt.model(input_ids=next_ids, past_key_values=cache, logits_to_keep=1).logits
        next_ids = logits[:, -1:].argmax(-1)
        answer.append(next_ids)
    return answer


def _repeated(cache, batch: int):
    """The cache with every context ``batch`` times, in tensors of its own where it is more than one."""
    if batch > 1:
        cache.batch_repeat_interleave(batch)
    return cache


def _offloaded(cache):
    from transformers import DynamicCache

    made = DynamicCache([(layer.keys, layer.values) for layer in cache.layers], offloading=True)
    for layer in made.layers[1:]:
        layer.offload()
    return made


@torch.inference_mode()
def step(prompt: ScoredPrompt, case: Case) -> None:
    """One decode step."""
    prompt.model(input_ids=next(case.tokens), past_key_values=case.cache)


def timed(prompt: ScoredPrompt, options, made: list[Case], batch: int, rounds: int) -> Comparison:
    """Times of all cases in interleaved rounds, relative to dense attention with the cache resident."""
    works = {case.name: lambda case=case: step(prompt, case) for case in made}
    title = f"decode step, batch {batch}"
    device = prompt.model.device
    return compare(
        title, works, RESIDENT, rounds=rounds, seed=options.seed, device=device, threads=options.threads, warmup=2
    )


# --- phases -----------------------------------------------------------------------------------------------------------


class PhaseClock:
    """Seconds by phase, each without what is nested in it. A GPU is waited for at every change of phase."""

    def __init__(self, device: torch.device):
        self.device, self.seconds = device, dict.fromkeys(PHASES, 0.0)
        self.stack, self.since = ["other"], time.perf_counter()

    def switch(self) -> None:
        """Give the time since the last change to the phase that runs."""
        wait_for(self.device)
        now = time.perf_counter()
        self.seconds[self.stack[-1]] += now - self.since
        self.since = now

    def wrap(self, function, phase: str):
        """The function, timed as a phase."""

        def run(*arguments, **named):
            self.switch()
            self.stack.append(phase)
            try:
                return function(*arguments, **named)
            finally:
                self.switch()
                self.stack.pop()

        return run


@contextlib.contextmanager
def phase_clock(device: torch.device) -> Iterator[PhaseClock]:
    """A clock that runs while the block does.

    "decide" is sketch scores, shrinkage, certificate and plan; "fetch" what is copied from the host; "attention" the
    rest of a sealed layer's attention, or dense attention: where rows are read in place, by kernels or loops, reading
    them is part of it. "GEMMs" are all linear layers of the model.
    """
    from verkv.compiled_step import CompiledStep
    from verkv.context import SealedContext
    from verkv.device_step import DeviceStep
    from verkv.planning import Planner
    from verkv.tiers import HostTier

    clock = PhaseClock(device)
    timed_functions = [
        (Planner, "run", "decide"),
        (CompiledStep, "plan", "decide"),
        (DeviceStep, "plan", "decide"),
        (HostTier, "read_keys", "fetch"),
        (HostTier, "read_values", "fetch"),
        (SealedContext, "attend", "attention"),
        (torch.nn.functional, "scaled_dot_product_attention", "attention"),
        (torch.nn.Linear, "forward", "GEMMs"),
    ]
    with contextlib.ExitStack() as stack:
        for owner, name, phase in timed_functions:
            stack.enter_context(patch.object(owner, name, _method(clock, getattr(owner, name), phase)))
        clock.since = time.perf_counter()
        yield clock
        clock.switch()


def _method(clock: PhaseClock, function, phase: str):
    wrapped = clock.wrap(function, phase)
    return lambda *arguments, **named: wrapped(*arguments, **named)


def phases(prompt: ScoredPrompt, case: Case, n_steps: int) -> dict[str, float]:
    """Mean seconds of a decode step by phase."""
    step(prompt, case)
    with phase_clock(prompt.model.device) as clock:
        for _ in range(n_steps):
            step(prompt, case)
    return {phase: seconds / n_steps for phase, seconds in clock.seconds.items()}


def read_share(case: Case) -> float:
    """Bytes that a decode step moves from the host, over bytes of the full cache."""
    if case.press is not None:
        return case.press.stats.kv_read_per_token
    return 1.0 if case.name == OFFLOADED else 0.0


def link_bandwidth(device: torch.device, n_bytes: int = 2**28) -> float | None:
    """Bytes per second from pinned host memory to a GPU; None on another device."""
    if device.type != "cuda":
        return None
    source = torch.empty(n_bytes, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(n_bytes, dtype=torch.uint8, device=device)
    best = float("inf")
    for _ in range(5):
        wait_for(device)
        start = time.perf_counter()
        target.copy_(source, non_blocking=True)
        wait_for(device)
        best = min(best, time.perf_counter() - start)
    return n_bytes / best


def is_gpu(prompt: ScoredPrompt) -> bool:
    """Whether absolute times are worth printing."""
    return prompt.model.device.type == "cuda"
