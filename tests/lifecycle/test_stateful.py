"""Random sequences of cache operations against a dense shadow, and random inputs of the plan and of the attention."""

import contextlib
import copy
import importlib.util
import math
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from press_helpers import positions, random_ids
from sealing import CACHE, sampled_codes, seal
from torch.testing import assert_close
from transformers import DynamicCache

from verkv.cache import make_cache
from verkv.context import SealedContext, SealPlan
from verkv.estimators import (
    MIN_INCLUSION_PROB,
    bernstein_certificate,
    decode_inclusion_probs,
    inclusion_probabilities,
    quantize_inclusion_probs,
)
from verkv.kvfetch import FetchConfig, decide
from verkv.sketches import ExactSketch, RopePairSketch
from verkv.stats import FetchStats
from verkv.tiers import RESIDENT_BIT

TOLERANCE = {"atol": 1e-4, "rtol": 0.0}
MAX_ROWS = 6  # of the batch
MAX_TAIL = 40  # tokens after the context, before they are taken out again

# Derandomised: the same sequences in every run, so that a failure is a change of the code.
RANDOM = settings(derandomize=True, deadline=None, database=None, max_examples=60)
SEQUENCES = settings(derandomize=True, deadline=None, database=None, max_examples=40, stateful_step_count=16)


# --- the cache against a dense shadow ---------------------------------------------------------------------------------


class CacheMachine(RuleBasedStateMachine):
    """A sealed cache at epsilon 1e-9 and transformers' own do the same, and must give the same logits."""

    def __init__(self, models):
        super().__init__()
        self.models, self.can_press = models, importlib.util.find_spec("kvpress") is not None

    @initialize(
        attn=st.sampled_from(["sdpa", "eager"]),
        sketch=st.sampled_from(["rope_pair", "exact"]),
        shortlist=st.sampled_from([0, 5]),
        plain=st.booleans(),
        by_hand=st.booleans(),
    )
    def make(self, attn, sketch, shortlist, plain, by_hand):
        self.model = self.models[attn]
        self.sketch, self.shortlist = sketch, shortlist
        self.press = self.make_press() if self.can_press and not by_hand else None
        self.cache = DynamicCache() if plain else make_cache(self.model.config)
        self.seed = 0
        self.shadow = None

    def make_press(self):
        from kvpress import KnormPress

        from verkv import VerKVPress

        options = {"n_sink": 2, "n_local": 4, "sketch": self.sketch, "shortlist": self.shortlist}
        return VerKVPress(KnormPress(), 0.4, epsilon=1e-9, seed=0, **options)

    def seal_by_hand(self):
        """What the press does, where there is no KVPress."""
        sketch = ExactSketch() if self.sketch == "exact" else RopePairSketch()
        n_padding = (1 - self.mask).sum(-1) if self.padded else None
        seal(
            self.model,
            self.cache,
            sampled_codes,
            n_padding,
            fetch=FetchConfig(epsilon=1e-9, shortlist=self.shortlist),
            sketch=sketch,
        )

    def tokens(self, batch, n_tokens):
        self.seed += 1
        return random_ids(batch, n_tokens, self.seed)

    @torch.no_grad()
    def both(self, ids):
        """One forward pass of each; the logits of tokens that are no padding are the same."""
        mask = torch.cat([self.mask, torch.ones_like(ids)], 1) if self.padded else None
        place = {}
        if self.padded:
            place = {"attention_mask": mask, "position_ids": positions(mask)[:, -ids.shape[1] :]}
        ours = self.model(ids, **{CACHE: self.cache}, **place).logits
        dense = self.model(ids, **{CACHE: self.shadow}, **place).logits
        assert_close(ours, dense, **TOLERANCE)
        self.interrupted = False
        self.mask = torch.cat([self.mask, torch.ones_like(ids)], 1)

    @property
    def batch(self):
        return len(self.mask)

    @property
    def n_tail(self):
        return self.mask.shape[1] - self.n_context

    @precondition(lambda self: self.shadow is None)
    @rule(batch=st.integers(1, 2), n_tokens=st.integers(24, 60), n_padding=st.sampled_from([0, 0, 7]))
    @torch.no_grad()
    def prefill(self, batch, n_tokens, n_padding):
        ids = self.tokens(batch, n_tokens)
        self.mask = torch.ones_like(ids)
        self.mask[-1, :n_padding] = 0
        self.padded, self.n_context, self.beams, self.interrupted = n_padding > 0, n_tokens, 1, False
        place = {"attention_mask": self.mask, "position_ids": positions(self.mask)} if self.padded else {}
        self.shadow = DynamicCache()
        with contextlib.nullcontext() if self.press is None else self.press(self.model):
            ours = self.model(ids, **{CACHE: self.cache}, **place).logits
        if self.press is None:
            self.seal_by_hand()
        dense = self.model(ids, **{CACHE: self.shadow}, **place).logits
        assert_close(ours[self.mask.bool()], dense[self.mask.bool()], **TOLERANCE)
        assert all(layer.sealed for layer in self.cache.layers)

    sealed = precondition(lambda self: self.shadow is not None)
    has_room = precondition(lambda self: self.shadow is not None and self.n_tail < MAX_TAIL)

    @has_room
    @rule(n_tokens=st.integers(1, 6))
    def ask(self, n_tokens):
        self.both(self.tokens(self.batch, n_tokens))

    @has_room
    @rule(n_steps=st.integers(1, 3))
    def decode(self, n_steps):
        for _ in range(n_steps):
            self.both(self.tokens(self.batch, 1))

    @sealed
    @rule(share=st.floats(0.0, 1.0))
    def crop(self, share):
        length = self.n_context + round(share * self.n_tail)
        self.cache.crop(length)
        if length < self.shadow.get_seq_length():
            self.shadow.crop(length - self.shadow.get_seq_length())  # newer transformers have no other way
        self.mask = self.mask[:, :length]

    @sealed
    @rule()
    def crop_into_the_context(self):
        with pytest.raises(ValueError, match="cuts into the sealed context"):
            self.cache.crop(self.n_context - 1)

    @sealed
    @rule()
    def roll_back(self):
        """As KVPress' pipeline does between two questions."""
        for layer in (*self.cache.layers, *self.shadow.layers):
            layer.keys, layer.values = layer.keys[:, :, : self.n_context], layer.values[:, :, : self.n_context]
        self.mask = self.mask[:, : self.n_context]

    @precondition(lambda self: self.shadow is not None and 2 * self.batch <= MAX_ROWS)
    @rule(repeats=st.integers(2, 3))
    def beams_start(self, repeats):
        repeats = min(repeats, MAX_ROWS // self.batch)
        for cache in (self.cache, self.shadow):
            cache.batch_repeat_interleave(repeats)
        self.mask = self.mask.repeat_interleave(repeats, 0)
        self.beams *= repeats

    @sealed
    @rule(data=st.data())
    def reorder_within_beams(self, data):
        contexts = [layer.context for layer in self.cache.layers]
        choice = data.draw(st.lists(st.integers(0, self.beams - 1), min_size=self.batch, max_size=self.batch))
        rows = torch.tensor([row // self.beams * self.beams + beam for row, beam in enumerate(choice)])
        self.index("reorder_cache", rows)
        assert [layer.context for layer in self.cache.layers] == contexts  # they were not copied

    @sealed
    @rule(data=st.data())
    def reorder_across_contexts(self, data):
        rows = torch.tensor(data.draw(st.permutations(range(self.batch))))
        stay = torch.equal(rows // self.beams, torch.arange(self.batch) // self.beams)
        self.index("reorder_cache", rows)
        self.beams = self.beams if stay else 1

    @sealed
    @rule(data=st.data())
    def select(self, data):
        rows = data.draw(st.lists(st.integers(0, self.batch - 1), min_size=1, max_size=min(3, self.batch)))
        self.index("batch_select_indices", torch.tensor(rows))
        self.beams = 1

    def index(self, operation, rows):
        for cache in (self.cache, self.shadow):
            getattr(cache, operation)(rows)
        self.mask = self.mask[rows]

    @sealed
    @rule(how=st.sampled_from(["copy", "pickle"]))
    def replace_by_a_copy(self, how):
        """The old one is used once more: it may not share what changes."""
        old = self.cache
        self.cache = copy.deepcopy(old) if how == "copy" else pickle.loads(pickle.dumps(old))
        with torch.no_grad():
            mask = torch.cat([self.mask, torch.ones(self.batch, 2, dtype=torch.int64)], 1)
            self.model(self.tokens(self.batch, 2), attention_mask=mask, **{CACHE: old})
        old.reset()

    @sealed
    @rule(n_tokens=st.integers(1, 4))
    @torch.no_grad()
    def fail(self, n_tokens):
        mask = torch.cat([self.mask, torch.ones(self.batch, n_tokens, dtype=torch.int64)], 1)
        with pytest.raises(NotImplementedError, match="output_attentions"):
            self.model(
                self.tokens(self.batch, n_tokens),
                attention_mask=mask,
                output_attentions=True,
                **{CACHE: self.cache},
            )

    @sealed
    @rule(n_tokens=st.integers(1, 4), layer=st.integers(0, 1))
    @torch.no_grad()
    def interrupt(self, n_tokens, layer):
        """Outside VerKV: layers up to one have the tokens, the others do not, until they are cropped."""

        def stop(module, args, output):
            raise KeyboardInterrupt

        mask = torch.cat([self.mask, torch.ones(self.batch, n_tokens, dtype=torch.int64)], 1)
        handle = self.model.model.layers[layer].mlp.register_forward_hook(stop)
        with pytest.raises(KeyboardInterrupt):
            self.model(self.tokens(self.batch, n_tokens), attention_mask=mask, **{CACHE: self.cache})
        handle.remove()
        self.cache.crop(self.mask.shape[1])
        self.interrupted = True

    @sealed
    @rule()
    def reset(self):
        self.cache.reset()
        assert self.cache.get_seq_length() == 0
        self.shadow = None

    @invariant()
    def same_shape(self):
        if getattr(self, "shadow", None) is None:
            return
        for ours, dense in zip(self.cache.layers, self.shadow.layers, strict=True):
            assert ours.get_seq_length() == dense.get_seq_length() == self.mask.shape[1]
            assert ours.keys.shape == dense.keys.shape and ours.values.shape == dense.values.shape
            assert ours.context.beams == self.beams
            assert ours.context.n_contexts * self.beams == self.batch
        passes = self.cache.stats.passes
        if self.interrupted:  # what it has recorded goes with the next pass
            passes = passes[:-1]
        assert all([r.layer_idx for r in records] == [0, 1] for records in passes)


def test_any_sequence_of_operations(tiny_model):
    models = {attn: tiny_model("llama", attn, num_hidden_layers=2) for attn in ("sdpa", "eager")}
    run_state_machine_as_test(lambda: CacheMachine(models), settings=SEQUENCES)


# --- inclusion probabilities and their grid ---------------------------------------------------------------------------


@st.composite
def budget_problems(draw):
    """Scores (B, L, H, T) of any dtype with ties, zeros and giants, masks, how many axes share a budget, the budget."""
    shape = draw(st.tuples(*[st.integers(1, 2)] * 3, st.integers(1, 40)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    kind = draw(st.sampled_from(["plain", "ties", "zeros", "giants", "tiny"]))
    scores = torch.rand(shape, generator=generator, dtype=torch.float64)
    if kind == "ties":
        scores = (3 * scores).floor()
    elif kind == "zeros":
        scores = scores * (torch.rand(shape, generator=generator) < 0.3)
    elif kind == "giants":
        scores = torch.where(torch.rand(shape, generator=generator) < 0.1, 1e4 * scores, 1e-4 * scores)
    elif kind == "tiny":
        scores = scores * 1e-7
    scores = scores.to(draw(st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16])))
    certain = torch.rand(shape, generator=generator) < draw(st.sampled_from([0.0, 0.2, 1.0]))
    absent = torch.rand(shape, generator=generator) < draw(st.sampled_from([0.0, 0.3]))
    shared_dims = draw(st.integers(1, 3))
    grouped = lambda mask: mask.flatten(-shared_dims).sum(-1).double()  # noqa: E731
    least = grouped(certain & ~absent) + MIN_INCLUSION_PROB * grouped(~certain & ~absent)
    most = grouped(~absent)
    budget = least + draw(st.floats(0.0, 1.0)) * (most - least)
    return scores, certain, absent, shared_dims, budget


@RANDOM
@given(budget_problems())
def test_budgets_are_met_on_the_grid(problem):
    scores, certain, absent, shared_dims, budget = problem
    masks = {"absent": absent, "shared_dims": shared_dims}
    r = inclusion_probabilities(scores, budget, certain=certain, floor=MIN_INCLUSION_PROB, **masks)
    assert r.dtype == torch.promote_types(scores.dtype, torch.float32) and r.shape == scores.shape
    total = lambda x: x.double().flatten(-shared_dims).sum(-1)  # noqa: E731
    assert_close(total(r), budget, rtol=1e-6, atol=1e-6)

    levels, rounded = quantize_inclusion_probs(r, **masks)
    assert levels.dtype == torch.uint8 and int(levels.max()) <= 127
    assert torch.equal(rounded, torch.where(absent, 0.0, decode_inclusion_probs(levels, r.dtype)))
    quantum = (r.double() * (2 ** (1 / 8) - 1)).flatten(-shared_dims).amax(-1)
    lost = total(r) - total(rounded)
    assert bool((lost <= quantum + 1e-6).all()) and bool((lost >= -1e-6 * total(r).clamp_min(1)).all())

    assert bool((rounded[certain & ~absent] == 1).all()) and bool((levels[certain] == 0).all())
    assert bool((rounded[absent] == 0).all()) and bool((rounded[~absent] > 0).all())
    free = ~(certain | absent)
    rank = lambda x: torch.where(free, x.double(), -1.0).flatten(-shared_dims)  # noqa: E731
    order = rank(scores).argsort(-1)
    assert bool((rank(r).gather(-1, order).diff(dim=-1) >= -1e-9).all())  # a larger score never has a smaller r


@RANDOM
@given(budget_problems(), st.integers(-20, 20))
def test_groups_are_solved_alone_and_a_common_factor_cancels(problem, exponent):
    scores, certain, absent, shared_dims, budget = problem
    options = {"floor": MIN_INCLUSION_PROB, "shared_dims": shared_dims}
    scores = scores.double()
    r = inclusion_probabilities(scores, budget, certain=certain, absent=absent, **options)
    scaled = inclusion_probabilities(scores * 2.0**exponent, budget, certain=certain, absent=absent, **options)
    assert_close(scaled, r, rtol=1e-9, atol=1e-12)
    for group in torch.cartesian_prod(*[torch.arange(n) for n in budget.shape]).view(-1, budget.dim()).tolist():
        one = tuple(group)
        alone = inclusion_probabilities(scores[one], budget[one], certain=certain[one], absent=absent[one], **options)
        assert_close(alone, r[one], rtol=1e-9, atol=1e-12)


# --- the plan ---------------------------------------------------------------------------------------------------------


@st.composite
def planning_problems(draw, dtypes=(torch.float32,)):
    """Planning logits (N, R, T) with any spread, r on the grid, absent tokens, a tail or none, and a tolerance."""
    shape = draw(st.tuples(st.integers(1, 2), st.integers(1, 3), st.integers(1, 60)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    spread, shift = draw(st.sampled_from([0.0, 1.0, 8.0, 300.0])), draw(st.sampled_from([0.0, -1e4, 1e4]))
    logits = (spread * torch.randn(shape, generator=generator) + shift).to(draw(st.sampled_from(dtypes))).float()
    levels = torch.randint(0, 128, (shape[0], shape[2]), generator=generator, dtype=torch.uint8)
    levels = torch.where(
        torch.rand(levels.shape, generator=generator) < draw(st.sampled_from([0.0, 0.3, 1.0])), 0, levels
    )
    absent = (torch.rand(levels.shape, generator=generator) < draw(st.sampled_from([0.0, 0.3]))) & (levels == 0)
    logits = logits.masked_fill(absent[:, None], -torch.inf)
    tail = shift + torch.randn(shape[:2], generator=generator)
    config = FetchConfig(
        draw(st.sampled_from([1e-9, 1e-3, 0.05, 0.5, 1e3])),
        draw(st.sampled_from([1e-6, 0.1, 0.9])),
        shrinkage=draw(st.sampled_from(["binary", "optimal"])),
    )
    return logits, tail, decode_inclusion_probs(levels), levels > 0, config


@RANDOM
@given(planning_problems(dtypes=(torch.float32, torch.bfloat16)))
def test_plans_hold_their_tolerance_with_the_fewest_tokens(problem):
    logits, tail, r, residual, config = problem
    decision = decide(logits, tail, r, residual, config)
    everything = residual[:, None].expand_as(logits)
    assert decision.promoted.shape == logits.shape and decision.n_promoted.shape == logits.shape[:2]
    assert not bool((decision.promoted & ~everything).any())
    assert bool((decision.promoted.sum(-1) == decision.n_promoted).all())
    assert bool((decision.planned_bound < config.epsilon).all()) and bool(torch.isfinite(decision.error_bound).all())
    assert bool(((decision.n_promoted == 0) == (decision.error_bound < config.epsilon)).all())
    shrinkage = decision.shrinkage[everything]
    probs = r[:, None].expand_as(logits)[everything]
    assert bool(((shrinkage >= probs * (1 - 1e-6)) & (shrinkage <= 1)).all())
    assert bool((decision.shrinkage[~everything] == 1).all())

    # In float64 the bound of what is left is the one that was promised.
    peak = torch.maximum(logits.amax(-1), tail).double()
    weights = (logits.double() - peak[..., None]).exp()
    denominator = weights.sum(-1) + (tail.double() - peak).exp()
    arguments = weights, r[:, None].double(), decision.shrinkage.double()
    left = bernstein_certificate(*arguments, everything & ~decision.promoted, denominator, config.delta)
    assert_close(left.error_bound, decision.planned_bound.double(), rtol=1e-4, atol=1e-7)


@RANDOM
@given(planning_problems(), st.sampled_from([0.5, 1e-2]), st.integers(0, 10**6))
def test_plans_move_with_their_arguments(problem, factor, seed):
    logits, tail, r, residual, config = problem
    decision = decide(logits, tail, r, residual, config)
    stricter = FetchConfig(config.epsilon * factor, config.delta, shrinkage=config.shrinkage)
    more = decide(logits, tail, r, residual, stricter)
    assert not bool((decision.promoted & ~more.promoted).any())  # a smaller tolerance adds tokens, takes none away

    order = torch.randperm(logits.shape[1], generator=torch.Generator().manual_seed(seed))
    permuted = decide(logits[:, order], tail[:, order], r, residual, config)
    assert torch.equal(permuted.promoted, decision.promoted[:, order])  # query rows do not know each other
    first = decide(logits[:1], tail[:1], r[:1], residual[:1], config)
    assert torch.equal(first.n_promoted, decision.n_promoted[:1])  # nor do KV heads


# --- attention over a sealed context ----------------------------------------------------------------------------------


@st.composite
def attention_problems(draw):
    """Everything :meth:`SealedContext.attend` takes, of any shape and dtype."""
    n_contexts, beams, n_heads, group = (draw(st.integers(1, 2)) for _ in range(4))
    n_tokens, n_tail, dim = draw(st.integers(1, 30)), draw(st.integers(1, 5)), draw(st.sampled_from([4, 16]))
    n_queries = draw(st.integers(1, n_tail))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    scale = draw(st.sampled_from([0.1, 1.0, 4.0]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    normal = lambda *shape: (scale * torch.randn(shape, generator=generator)).to(dtype)  # noqa: E731
    n_padding = torch.randint(0, n_tokens, (n_contexts,), generator=generator) * draw(st.integers(0, 1))
    levels = torch.randint(0, 60, (n_contexts, n_heads, n_tokens), generator=generator)
    levels = torch.where(torch.rand(levels.shape, generator=generator) < draw(st.sampled_from([0.1, 0.9])), 0, levels)
    drawn = torch.rand(levels.shape, generator=generator) < torch.exp2(-levels.double() / 8)
    codes = (levels + RESIDENT_BIT * drawn).to(torch.uint8)
    codes[(torch.arange(n_tokens) < n_padding[:, None])[:, None].expand_as(codes)] = 0
    batch = n_contexts * beams
    tensors = {
        "keys": normal(n_contexts, n_heads, n_tokens, dim),
        "values": normal(n_contexts, n_heads, n_tokens, dim),
        "tail_keys": normal(batch, n_heads, n_tail, dim),
        "tail_values": normal(batch, n_heads, n_tail, dim),
        "query": normal(batch, n_heads * group, n_queries, dim),
    }
    return tensors, codes, n_padding, beams


def naive_attention(p, codes, beams, n_padding, exact):
    """Row by row in float64: all tokens with weight 1, or the resident ones with 1 / r."""
    batch, n_query_heads, n_queries, dim = p["query"].shape
    n_heads, n_tail = p["tail_keys"].shape[1:3]
    output = torch.zeros(batch, n_query_heads, n_queries, dim, dtype=torch.float64)
    for b in range(batch):
        for h in range(n_query_heads):
            context, head = b // beams, h // (n_query_heads // n_heads)
            for t in range(n_queries):
                chosen, log_weights = [], []
                for i, code in enumerate(codes[context, head].tolist()):
                    if i >= n_padding[context] and (exact or code >= 128):
                        chosen.append(i)
                        log_weights.append(0.0 if exact else (code % 128) / 8 * math.log(2))
                n_visible = n_tail - n_queries + t + 1
                keys = torch.cat([p["keys"][context, head, chosen], p["tail_keys"][b, head, :n_visible]]).double()
                values = torch.cat([p["values"][context, head, chosen], p["tail_values"][b, head, :n_visible]]).double()
                logits = keys @ p["query"][b, h, t].double() / math.sqrt(dim)
                logits[: len(chosen)] += torch.tensor(log_weights, dtype=torch.float64)
                output[b, h, t] = logits.softmax(0) @ values
    return output


@RANDOM
@given(
    attention_problems(),
    st.sampled_from([None, RopePairSketch(), ExactSketch()]),
    st.integers(0, 4),
    st.sampled_from([None, "padding", "bool", "additive"]),
)
def test_attention_equals_the_naive_one(problem, sketch, shortlist, form):
    p, codes, n_padding, beams = problem
    fetch = None if sketch is None else FetchConfig(1e-30, shortlist=shortlist)
    stats = FetchStats("test", sealed_layers=(0,))
    plan = SealPlan(codes, n_padding, fetch=fetch, sketch=sketch, beams=beams)
    context = SealedContext(p["keys"], p["values"], plan, 0, stats)
    mask = make_mask(form, p, n_padding, beams)
    dim = p["query"].shape[-1]
    actual = context.attend(p["query"], p["tail_keys"], p["tail_values"], mask, dim**-0.5)
    expected = naive_attention(p, codes, beams, n_padding, exact=sketch is not None)
    assert actual.dtype == p["query"].dtype
    error = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 6e-2}[actual.dtype]
    assert_close(actual.double(), expected, atol=error, rtol=error)


def make_mask(form, p, n_padding, beams):
    """What transformers may pass for left padding and causality; None where there is no padding to hide."""
    n_tokens, n_tail, n_queries = p["keys"].shape[2], p["tail_keys"].shape[2], p["query"].shape[2]
    visible = torch.arange(n_tokens + n_tail) >= n_padding.repeat_interleave(beams)[:, None]
    if form == "padding" or (form is None and bool(n_padding.any())):
        return visible.long()
    if form is None:
        return None
    causal = torch.ones(n_queries, n_tokens + n_tail, dtype=torch.bool).tril(n_tokens + n_tail - n_queries)
    allowed = visible[:, None, None] & causal
    if form == "bool":
        return allowed
    return torch.where(allowed, 0.0, torch.finfo(p["query"].dtype).min).to(p["query"].dtype)
