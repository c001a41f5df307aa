"""Decode steps played all at once against the same steps, one by one, through a sealed context."""

import dataclasses

import pytest
import torch
from sealing import sampled_codes
from torch.testing import assert_close

from verkv.context import SealedContext, SealPlan
from verkv.kvfetch import FetchConfig
from verkv.replay import DecodeReplay
from verkv.sketches import ExactSketch, RopePairSketch
from verkv.sketches.fit import fit_sketch
from verkv.stats import FetchStats

CONTEXTS, HEADS, GROUP, T, TAIL, KEY_DIM, VALUE_DIM = 2, 2, 3, 60, 6, 16, 12
SCALING = 0.3
N_PADDING = torch.tensor([0, 6])
CONFIGS = {
    "sketch": FetchConfig(0.4, shortlist=0),
    "shortlist": FetchConfig(0.4, shortlist=4),
    "keys_first": FetchConfig(0.4, shortlist=2, key_rounds=1),
    "optimal": FetchConfig(0.4, 0.05, shortlist=0, shrinkage="optimal"),
    "paper": FetchConfig(0.4, shortlist=4, paper=True),
    "max_read": FetchConfig(0.8, shortlist=0, max_read=0.5),
    "output": FetchConfig(12.0, shortlist=2, target="output"),
}


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@dataclasses.dataclass
class Problem:
    keys: torch.Tensor
    values: torch.Tensor
    tail: tuple[torch.Tensor, torch.Tensor]
    queries: torch.Tensor


def make_problem(n_queries=TAIL):
    return Problem(
        draw(CONTEXTS, HEADS, T, KEY_DIM, seed=1),
        draw(CONTEXTS, HEADS, T, VALUE_DIM, seed=2),
        (draw(CONTEXTS, HEADS, TAIL, KEY_DIM, seed=3), draw(CONTEXTS, HEADS, TAIL, VALUE_DIM, seed=4)),
        draw(CONTEXTS, HEADS * GROUP, n_queries, KEY_DIM, seed=5),
    )


def make_codes():
    return sampled_codes((CONTEXTS, HEADS, T), 0, level=12, n_padding=N_PADDING)


def sealed(p, fetch, sketch, moments=False, codes=None):
    protected = torch.arange(T) < N_PADDING[:, None] + 2
    none = torch.zeros(CONTEXTS, dtype=torch.int64)
    fitted = fit_sketch(sketch, p.keys, N_PADDING, None, protected, none, 0.0) if moments else None
    plan = SealPlan(
        make_codes() if codes is None else codes, N_PADDING, fetch=fetch, sketch=sketch, fitted=fitted, audit=True
    )
    return SealedContext(p.keys, p.values, plan, 0, FetchStats("test", sealed_layers=(0,)))


def one_by_one(context, p, positions):
    """Errors (C, M, Hq) and bytes of decode steps through the context itself."""
    records = []
    for m, position in enumerate(positions.tolist()):
        n_tail = position - T + 1
        tail = (t[:, :, :n_tail] for t in p.tail)
        context.attend(p.queries[:, :, m : m + 1], *tail, None, SCALING)
        records.append(context.stats.passes[-1][0])
    stack = lambda name: torch.stack([getattr(r, name)[..., 0] for r in records], 1)  # noqa: E731
    read = torch.tensor([r.bytes_read / r.full_bytes for r in records])
    bound = stack("output_bound") if records[0].output_bound is not None else None
    return stack("relative_error"), stack("output_error"), read, bound


@pytest.mark.parametrize("moments", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_steps_after_the_context_equal_those_through_it(name, moments):
    if name == "output" and moments:
        pytest.skip("with moments so small a context is read whole")
    p, positions = make_problem(), T + torch.arange(TAIL)
    context = sealed(p, CONFIGS[name], RopePairSketch(group_size=16), moments)
    relative, output, read, bound = one_by_one(context, p, positions)
    found = DecodeReplay(context, p.queries * SCALING, positions, 0, p.tail).errors(context.fetch.epsilon)
    assert_close(found.denominator, relative, atol=1e-5, rtol=1e-3)
    assert_close(found.output, output, atol=1e-5, rtol=1e-3)
    assert_close(found.kv_read.mean(0), read, atol=1e-6, rtol=1e-5)
    assert found.denominator.max() > 1e-3 and 0 < found.kv_read.mean() < 1
    assert (found.output_bound is None) == (bound is None)
    if bound is not None:
        assert_close(found.output_bound, bound, atol=1e-5, rtol=1e-3)


def test_the_exact_sketch():
    p, positions = make_problem(), T + torch.arange(TAIL)
    context = sealed(p, FetchConfig(0.4), ExactSketch())
    relative, output, read, _ = one_by_one(context, p, positions)
    found = DecodeReplay(context, p.queries * SCALING, positions, 0, p.tail).errors(0.4)
    assert_close(found.denominator, relative, atol=1e-5, rtol=1e-3)
    assert_close(found.output, output, atol=1e-5, rtol=1e-3)
    assert_close(found.kv_read.mean(0), read, atol=1e-6, rtol=1e-5)


def test_a_tolerance_for_each_head():
    p, positions = make_problem(), T + torch.arange(TAIL)
    context = sealed(p, FetchConfig(0.4, shortlist=0), RopePairSketch(group_size=16))
    context.tolerances = torch.linspace(0.1, 3.0, CONTEXTS * HEADS * GROUP).view(CONTEXTS, -1)
    relative, output, read, _ = one_by_one(context, p, positions)
    replay = DecodeReplay(context, p.queries * SCALING, positions, 0, p.tail)
    found = replay.errors(context.tolerances)
    assert_close(found.denominator, relative, atol=1e-5, rtol=1e-3)
    assert_close(found.output, output, atol=1e-5, rtol=1e-3)
    assert_close(found.kv_read.mean(0), read, atol=1e-6, rtol=1e-5)
    assert not torch.allclose(found.denominator, replay.errors(0.4).denominator)


def test_the_outputs_tolerance_decides_what_is_read():
    p, positions = make_problem(), T + torch.arange(TAIL)
    context = sealed(p, CONFIGS["output"], RopePairSketch(group_size=16))
    replay = DecodeReplay(context, p.queries * SCALING, positions, 0, p.tail)
    read = [float(replay.errors(tolerance).kv_read.mean()) for tolerance in (1e-6, 6.0, 1e6)]
    assert read[0] > read[1] > read[2]
    by_head = replay.errors(torch.full((CONTEXTS, HEADS * GROUP), 6.0))
    assert float(by_head.kv_read.mean()) == read[1] and replay.errors(1e-6).exact_rate == 1.0


class Cut(RopePairSketch):
    """A sketch that was built on more tokens than it scores."""

    def logits(self, query):
        return super().logits(query)[..., : self.n_tokens]


@pytest.mark.parametrize("name", ["sketch", "shortlist", "keys_first"])
@pytest.mark.parametrize("position", [40, 59])
def test_a_query_of_the_prompt_sees_the_context_as_if_it_had_ended_before_its_window(name, position):
    """The same step on a context cut off ``n_local`` tokens before the query, with those tokens as its tail."""
    n_local, p = 8, make_problem(n_queries=1)
    context = sealed(p, CONFIGS[name], RopePairSketch(group_size=16))
    replay = DecodeReplay(context, p.queries * SCALING, torch.tensor([position]), n_local)
    found = replay.errors(context.fetch.epsilon)

    end = position + 1 - n_local
    tail = tuple(t[:, :, end : position + 1] for t in (p.keys, p.values))
    earlier = Problem(p.keys[:, :, :end], p.values[:, :, :end], tail, p.queries)
    plan = SealPlan(
        make_codes()[..., :end], N_PADDING, fetch=context.fetch, sketch=RopePairSketch(group_size=16), audit=True
    )
    cut = SealedContext(earlier.keys, earlier.values, plan, 0, FetchStats("test", sealed_layers=(0,)))
    cut.sketch = Cut(group_size=16).build(
        torch.where(N_PADDING[:, None, None, None] > torch.arange(T)[:, None], p.keys[:, :, 6:7], p.keys)
    )
    cut.sketch.n_tokens = end
    cut.attend(p.queries, *tail, None, SCALING)
    (record,) = cut.stats.records()
    assert_close(found.denominator[:, 0], record.relative_error[..., 0], atol=1e-5, rtol=1e-3)
    assert_close(found.output[:, 0], record.output_error[..., 0], atol=1e-5, rtol=1e-3)
    assert found.denominator.max() > 1e-3
