"""A context that grew segment by segment against one that was sealed at once, and the certificate over many draws."""

import copy
import dataclasses
import itertools
import pickle

import pytest
import torch
from scipy.stats import binomtest
from sealing import certain_codes, sampled_codes
from torch.testing import assert_close

from verkv.context import SealedContext, SealPlan
from verkv.estimators import decode_inclusion_probs, poisson_sample
from verkv.estimators.thinning import Thinning, draw_survivors, expected_rows, thin_levels
from verkv.kvfetch import FetchConfig
from verkv.rotary import Rotary
from verkv.sketches import ExactSketch, RopePairSketch, TransformSketch
from verkv.sketches.fit import build_sketch, fit_segment
from verkv.sketches.segmented import SegmentedSketch, SegmentSketch
from verkv.stats import FetchStats
from verkv.tiers import LEVEL_MASK, RESIDENT_BIT, HostParts, HostTier, ResidentRows

CONTEXTS, HEADS, GROUP, KEY_DIM, VALUE_DIM = 2, 2, 3, 16, 12
LENGTHS = (40, 24, 17)  # of the segments
ENDS = torch.tensor(LENGTHS).cumsum(0).tolist()
N_PADDING = torch.tensor([0, 6])
SCALING, TAIL, QUERIES = 0.3, 5, 2

CONFIGS = {
    "sample_only": {},
    "exact": {"fetch": FetchConfig(0.4, shortlist=4), "sketch": ExactSketch()},
    "output": {"fetch": FetchConfig(12.0, shortlist=0, target="output"), "sketch": ExactSketch()},
    "rope_pair": {"fetch": FetchConfig(0.3, shortlist=4), "sketch": RopePairSketch(group_size=16)},
    "transform": {"fetch": FetchConfig(0.3, shortlist=0), "sketch": TransformSketch(Rotary(torch.ones(8)))},
}


class Problem:
    """Keys, values and codes of a context of three segments, and queries behind it."""

    def __init__(self, seed=0, contexts=CONTEXTS):
        generator = torch.Generator().manual_seed(seed)
        draw = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
        self.keys = draw(contexts, HEADS, ENDS[-1], KEY_DIM)
        self.values = draw(contexts, HEADS, ENDS[-1], VALUE_DIM)
        self.tail = draw(contexts, HEADS, TAIL, KEY_DIM), draw(contexts, HEADS, TAIL, VALUE_DIM)
        self.query = draw(contexts, HEADS * GROUP, QUERIES, KEY_DIM)
        shape = contexts, HEADS, ENDS[-1]
        self.codes = sampled_codes(shape, seed, level=12, n_last=0, n_padding=N_PADDING[:contexts])

    def plan(self, start, stop, **options):
        return SealPlan(self.codes[..., start:stop], N_PADDING, **options)

    def part(self, start, stop):
        return self.keys[:, :, start:stop], self.values[:, :, start:stop]

    def sealed(self, ends, is_token=None, **options):
        """Sealed in segments that end at ``ends``."""
        stats = FetchStats("test", sealed_layers=(0,), record_bounds=True)
        first = self.plan(0, ends[0], **options)
        context = SealedContext(*self.part(0, ends[0]), first, 0, stats)
        for start, stop in itertools.pairwise(ends):
            shown = None if is_token is None else is_token[:, start:stop]
            context.append(*self.part(start, stop), self.plan(start, stop, is_token=shown, **options))
        return context

    def attend(self, context, mask=None):
        return context.attend(self.query, *self.tail, mask, SCALING)


def records_of(context):
    (record,) = context.stats.passes[-1]
    return record


@pytest.mark.parametrize("config", ["sample_only", "exact"])
def test_segments_equal_one_seal_with_the_same_codes(config, by_torch):
    """Bit by bit, if the same code serves both: loops serve contexts in one piece only."""
    p, options = Problem(), CONFIGS[config]
    whole, grown = (p.sealed(ends, audit=True, **options) for ends in (ENDS[-1:], ENDS))
    assert torch.equal(p.attend(grown), p.attend(whole))
    for name in ("promoted", "fetching", "fetched", "bytes_read", "full_bytes", "error_bound", "relative_error"):
        assert_close(getattr(records_of(grown), name), getattr(records_of(whole), name), rtol=1e-5, atol=1e-6)
    for name in ("keys", "values", "codes", "offsets"):
        assert torch.equal(getattr(grown.rows, name), getattr(whole.rows, name))
    ours, theirs = grown.memory(), whole.memory()
    assert ours["device"] == theirs["device"] and ours["host"] == theirs["host"]
    assert records_of(grown).relative_error.max() > 1e-3  # it is a sample


@pytest.mark.parametrize("config", CONFIGS)
def test_every_token_certain_is_dense(config):
    p = Problem()
    p.codes = certain_codes(p.codes.shape, N_PADDING)
    context = p.sealed(ENDS, audit=True, **CONFIGS[config])
    p.attend(context)
    assert context.stats.relative_errors().max() < 1e-5 and context.stats.output_errors().max() < 1e-4


@pytest.mark.parametrize("config", CONFIGS)
def test_dropping_the_last_segment_undoes_appending_it(config):
    p, options = Problem(), CONFIGS[config]
    before, context = p.sealed(ENDS[:2], audit=True, **options), p.sealed(ENDS, audit=True, **options)
    keys, values = context.drop_last()
    assert torch.equal(keys, p.keys[:, :, ENDS[1] :]) and torch.equal(values, p.values[:, :, ENDS[1] :])
    assert torch.equal(p.attend(context), p.attend(before))
    assert context.memory() == before.memory() and context.full_bytes == before.full_bytes
    assert [s.n_tokens for s in context.segments] == list(LENGTHS[:2])
    context.append(keys, values, p.plan(ENDS[1], ENDS[2], **options))
    assert torch.equal(p.attend(context), p.attend(p.sealed(ENDS, audit=True, **options)))


def test_earlier_segments_are_not_touched():
    p = Problem()
    context = p.sealed(ENDS[:1], **CONFIGS["transform"])
    host, codes, planes = context.host, context.codes.clone(), context.sketch._planes
    branch = copy.copy(context)
    context.append(*p.part(*ENDS[:2]), p.plan(*ENDS[:2], **CONFIGS["transform"]))
    assert context.host.parts[0] is host and context.sketch.parts[0].sketch._planes is planes
    assert torch.equal(context.codes[:, : ENDS[0]], codes)
    assert branch.n_tokens == ENDS[0] and branch.host is host and torch.equal(branch.codes, codes)


@pytest.mark.parametrize("config", ["sample_only", "exact", "rope_pair", "transform"])
def test_copies_and_selected_rows_attend_as_before(config):
    p, options = Problem(), CONFIGS[config]
    context = p.sealed(ENDS, audit=True, **options)
    expected = p.attend(context)
    for twin in (copy.deepcopy(context), pickle.loads(pickle.dumps(context))):
        assert torch.equal(p.attend(twin), expected) and twin.memory() == context.memory()
    chosen = context.select(torch.tensor([1]))
    q = copy.copy(p)
    q.query, q.tail = p.query[1:], tuple(t[1:] for t in p.tail)
    assert_close(q.attend(chosen), expected[1:])
    chosen.drop_last()
    assert chosen.n_tokens == ENDS[1] and len(chosen.rows.codes) < len(context.rows.codes)


# --- hidden tokens ----------------------------------------------------------------------------------------------------


def hidden_rows():
    """Row 0 hides the end of the second segment and two tokens in the third, row 1 all of the third."""
    is_token = torch.arange(ENDS[-1]) >= N_PADDING[:, None]
    is_token[0, ENDS[1] - 4 : ENDS[1]] = False
    is_token[0, ENDS[1] + 3 : ENDS[1] + 5] = False
    is_token[1, ENDS[1] :] = False
    return is_token


@pytest.mark.parametrize("config", CONFIGS)
def test_hidden_tokens_count_for_nothing(config):
    p, is_token = Problem(), hidden_rows()
    p.codes = torch.where(is_token[:, None], p.codes, torch.zeros_like(p.codes))
    context = p.sealed(ENDS, is_token=is_token, audit=True, **CONFIGS[config])
    assert torch.equal(context.is_token(), is_token)
    mask = torch.cat([is_token, torch.ones(CONTEXTS, TAIL, dtype=torch.bool)], 1)
    expected = p.attend(context, mask)
    errors = records_of(context).relative_error
    p.keys, p.values = (torch.where(is_token[:, None, :, None], t, 7.0) for t in (p.keys, p.values))
    again = p.sealed(ENDS, is_token=is_token, audit=True, **CONFIGS[config])
    assert_close(p.attend(again, mask), expected, rtol=1e-4, atol=1e-5)
    assert_close(records_of(again).relative_error, errors, rtol=1e-3, atol=1e-5)
    assert torch.equal(again.select(torch.tensor([1, 0])).is_token(), is_token.flip(0))
    mask[0, ENDS[1] + 3] = True
    with pytest.raises(NotImplementedError, match="hides sealed context tokens"):
        p.attend(context, mask)
    context.drop_last()
    assert torch.equal(context.is_token(), is_token[:, : ENDS[1]])


def test_sketch_of_a_row_with_hidden_tokens_is_that_of_the_others():
    """A token's position is its number among those that are not hidden."""
    p, recipe = Problem(), TransformSketch(Rotary(torch.rand(8)))
    keys, is_token = p.keys[:1], torch.ones(1, ENDS[-1], dtype=torch.bool)
    is_token[0, 5:30] = False
    first, none = torch.tensor([11]), torch.zeros(1, dtype=torch.int64)
    fitted = fit_segment(recipe, keys, is_token, first, None, none, None)
    alone = build_sketch(recipe, keys[:, :, is_token[0]], none, first=first)
    assert_close(fitted.sketch.decode()[:, :, is_token[0]], alone.decode(), rtol=1e-4, atol=1e-4)
    rows = p.query[:1, :HEADS]
    assert_close(fitted.sketch.logits(rows)[..., is_token[0]], alone.logits(rows), rtol=1e-3, atol=1e-3)


# --- parts ------------------------------------------------------------------------------------------------------------


def test_reads_find_their_part_and_keep_their_order():
    keys, values = torch.randn(2, 3, 30, 4), torch.randn(2, 3, 30, 5)
    parts = [HostTier(keys[:, :, a:b], values[:, :, a:b]) for a, b in ((0, 7), (7, 8), (8, 30))]
    tier = HostParts.of(parts[0], 7).append(parts[1], 1).append(parts[2], 22)
    units, positions = torch.randint(6, (200,)), torch.randint(30, (200,))
    cpu = torch.device("cpu")
    assert torch.equal(tier.read_keys(units, positions, cpu), keys.flatten(0, 1)[units, positions])
    assert torch.equal(tier.read_values(units, positions, cpu), values.flatten(0, 1)[units, positions])
    assert tier.read_keys(units[:0], positions[:0], cpu).shape == (0, 4)
    assert torch.equal(tier.keys, keys) and torch.equal(tier.select(torch.tensor([1])).values, values[1:])


def test_rows_are_merged_in_the_order_of_their_positions():
    keys, values = torch.randn(2, 2, 30, 4), torch.randn(2, 2, 30, 3)
    codes = sampled_codes((2, 2, 30), level=8, n_first=0, n_last=0)
    codes[1, 0, :12] = 0  # a unit without rows in the first part
    cut = lambda a, b: ResidentRows.gather(keys[:, :, a:b], values[:, :, a:b], codes[..., a:b])  # noqa: E731
    whole, first, later = cut(0, 30), cut(0, 12), cut(12, 30)
    merged = first.append(later)
    for name in ("keys", "values", "codes", "offsets"):
        assert torch.equal(getattr(merged, name), getattr(whole, name))
        assert torch.equal(getattr(merged.head(later.offsets.diff()), name), getattr(first, name))


def test_norms_of_later_values_are_never_too_small():
    p = Problem()
    p.values[:, :, ENDS[0] :] *= 50.0  # far beyond the first segment's scale
    norms = p.sealed(ENDS, **CONFIGS["output"]).value_norms
    distances = (p.values.flatten(0, 1) - norms.centre[:, None]).norm(dim=-1)
    is_token = (torch.arange(ENDS[-1]) >= N_PADDING[:, None]).repeat_interleave(HEADS, 0)
    assert (norms.decode() >= distances * is_token).all()
    assert (norms.decode()[is_token] <= 1.1 * distances[is_token] + 1e-3).float().mean() > 0.9
    assert_close(norms.head(ENDS[0]).decode(), norms.decode()[:, : ENDS[0]])


def test_moments_of_the_error_are_those_of_all_tokens():
    from verkv.sketches.error import SketchError

    keys, sketched = torch.randn(2, 2, 50, 6) + 1.0, torch.randn(2, 2, 50, 6)
    keys[:, :, 30:] *= 3.0
    included = torch.ones(2, 2, 50, dtype=torch.bool)
    measure = lambda a, b: SketchError.measure(keys[:, :, a:b], sketched[:, :, a:b], included[..., a:b])  # noqa: E731
    pooled, whole = measure(0, 30).pooled(measure(30, 50), 0.4), measure(0, 50)
    assert_close(pooled.mean, whole.mean)
    assert_close(pooled.covariance, whole.covariance)
    none = torch.zeros(2, 2, dtype=torch.bool)
    assert not measure(0, 30).where(none).pooled(measure(30, 50).where(none), 0.4).covariance.any()


def test_a_segmented_sketch_counts_shared_tensors_once():
    recipe, keys = TransformSketch(Rotary(torch.rand(8))), torch.randn(1, 2, 40, 16)
    none = torch.zeros(1, dtype=torch.int64)
    parts = [build_sketch(recipe, keys[:, :, a:b], none, first=none + a) for a, b in ((0, 16), (16, 40))]
    sketch = SegmentedSketch.of(parts[0]).append(SegmentSketch(parts[1]))
    assert sketch.nbytes == sum(part.nbytes for part in parts) == sum(t.nbytes for t in sketch.tensors().values())
    shared = parts[0].uncharged_tensors()["sketch_inv_freq"].nbytes
    assert sketch.uncharged_nbytes == sum(part.uncharged_nbytes for part in parts) - shared
    assert_close(sketch.decode()[:, :, 16:], parts[1].decode())
    assert (sketch.name, sketch.is_linear, sketch.is_oracle) == ("transform", True, False)


# --- the certificate --------------------------------------------------------------------------------------------------

N_DRAWS, N_SEGMENTS, N_EACH, LEVEL = 400, 16, 20, 16
DELTA, EPSILON = 0.1, 0.25


def failures_over_draws(is_redrawn: bool) -> int:
    """Of 400 draws of a text that repeats itself 16 times, how many miss the tolerance; a context for each draw."""
    generator = torch.Generator().manual_seed(5)
    keys = torch.randn(1, 1, N_EACH, KEY_DIM, generator=generator).expand(N_DRAWS, -1, -1, -1)
    query = torch.randn(1, 1, 1, KEY_DIM, generator=generator).expand(N_DRAWS, -1, -1, -1)
    levels = torch.full((N_DRAWS, 1, N_EACH), LEVEL, dtype=torch.uint8)
    options = {"fetch": FetchConfig(EPSILON, DELTA, shortlist=0), "sketch": ExactSketch(), "audit": True}
    context, seed = None, generator.get_state()
    for _ in range(N_SEGMENTS):
        if is_redrawn:
            generator.set_state(seed)
        sampled = poisson_sample(decode_inclusion_probs(levels), generator)
        codes = levels | (sampled.to(torch.uint8) * RESIDENT_BIT)
        plan = SealPlan(codes, torch.zeros(N_DRAWS, dtype=torch.int64), **options)
        if context is None:
            context = SealedContext(keys, keys, plan, 0, FetchStats("test", sealed_layers=(0,)))
        else:
            context.append(keys, keys, plan)
    nothing = keys[:, :, :0]
    context.attend(query, nothing, nothing, None, 1.0)
    (record,) = context.stats.records()
    assert 0 < record.fetched < N_DRAWS * N_SEGMENTS * N_EACH / 2  # the plan decides something
    return int((record.relative_error > EPSILON).sum())


def test_the_certificate_holds_over_segments():
    assert binomtest(failures_over_draws(is_redrawn=False), N_DRAWS, DELTA, alternative="greater").pvalue > 1e-3


def test_a_redraw_with_the_same_random_numbers_fails_it():
    assert binomtest(failures_over_draws(is_redrawn=True), N_DRAWS, DELTA, alternative="greater").pvalue < 1e-6


# --- thinning ---------------------------------------------------------------------------------------------------------


def thinned_over_draws(has_one_coin: bool) -> int:
    """As above, but every new segment thins the earlier ones; with one coin for all rows the theorem does not hold."""
    n_each, n_segments, steps = 100, 4, 4
    generator = torch.Generator().manual_seed(6)
    keys = torch.randn(1, 1, n_each * n_segments, KEY_DIM, generator=generator).expand(N_DRAWS, -1, -1, -1)
    query = torch.randn(1, 1, 1, KEY_DIM, generator=generator).mul(0.3).expand(N_DRAWS, -1, -1, -1)
    options = {"fetch": FetchConfig(EPSILON, DELTA, shortlist=0), "sketch": ExactSketch(), "audit": True}
    context, no_surplus = None, torch.zeros(N_DRAWS, 1, n_each, dtype=torch.uint8)
    for number in range(n_segments):
        levels = torch.full((N_DRAWS, 1, n_each), steps * (number + 1), dtype=torch.uint8)
        sampled = poisson_sample(decode_inclusion_probs(levels), generator)
        codes = levels | (sampled.to(torch.uint8) * RESIDENT_BIT)
        plan = SealPlan(codes, torch.zeros(N_DRAWS, dtype=torch.int64), surplus=no_surplus, **options)
        part = keys[:, :, number * n_each : (number + 1) * n_each]
        if context is None:
            context = SealedContext(part, part, plan, 0, FetchStats("test", sealed_layers=(0,)))
            continue
        rows, of_units = context.rows, torch.full((N_DRAWS,), steps)
        of_rows = of_units.repeat_interleave(rows.offsets.diff())
        if has_one_coin:
            kept = (torch.rand(N_DRAWS, generator=generator) < 2.0 ** (-steps / 8)).repeat_interleave(
                rows.offsets.diff()
            )
        else:
            kept = draw_survivors(rows.codes & LEVEL_MASK, rows.surplus, of_rows, generator)
        context.append(part, part, dataclasses.replace(plan, thinning=Thinning(of_units, kept)))
    assert len(set(context.codes.bitwise_and(LEVEL_MASK).unique().tolist())) == 1  # all ended at the same r
    nothing = part[:, :, :0]
    context.attend(query, nothing, nothing, None, 1.0)
    (record,) = context.stats.records()
    assert 0 < record.fetched < N_DRAWS * n_segments * n_each / 2
    return int((record.relative_error > EPSILON).sum())


def test_the_certificate_holds_after_thinning():
    assert binomtest(thinned_over_draws(has_one_coin=False), N_DRAWS, DELTA, alternative="greater").pvalue > 1e-3


def test_thinning_all_rows_by_one_coin_fails_it():
    assert binomtest(thinned_over_draws(has_one_coin=True), N_DRAWS, DELTA, alternative="greater").pvalue < 1e-6


@pytest.mark.parametrize("config", ["sample_only", "exact", "transform"])
def test_a_thinned_context_is_one_with_the_thinned_codes(config):
    p, options = Problem(), CONFIGS[config]
    surplus = torch.where(p.codes == RESIDENT_BIT, 5, 0).to(torch.uint8)
    surplus[:, :, :2] = torch.where(p.codes[:, :, :2] == RESIDENT_BIT, 255, 0)
    context = SealedContext(
        *p.part(0, ENDS[1]),
        p.plan(0, ENDS[1], surplus=surplus[..., : ENDS[1]], **options),
        0,
        FetchStats("test", sealed_layers=(0,), record_bounds=True),
    )
    of_units = torch.tensor([0, 3, 8, 20])
    of_rows = of_units.repeat_interleave(context.rows.offsets.diff())
    generator = torch.Generator().manual_seed(2)
    kept = draw_survivors(context.rows.codes & LEVEL_MASK, context.rows.surplus, of_rows, generator)
    before = copy.copy(context)
    first = p.codes[..., : ENDS[1]]
    lowered, _ = thin_levels(first & LEVEL_MASK, surplus[..., : ENDS[1]], of_units.view(CONTEXTS, HEADS, 1))
    resident = (first & RESIDENT_BIT) != 0
    resident[resident.clone()] = kept
    thinned = torch.where(first == 0, 0, lowered | (resident.to(torch.uint8) * RESIDENT_BIT)).to(torch.uint8)
    assert (thinned != first).any() and len(kept) > int(kept.sum()) > 0
    last = p.plan(ENDS[1], ENDS[2], surplus=surplus[..., ENDS[1] :], thinning=Thinning(of_units, kept), **options)
    old = p.attend(before)
    context.append(*p.part(*ENDS[1:]), last)
    assert torch.equal(p.attend(before), old)  # a branch is not touched
    p.codes[..., : ENDS[1]] = thinned
    expected = p.sealed(ENDS[1:], **options)
    assert torch.equal(p.attend(context), p.attend(expected))
    chosen = context.select(torch.tensor([1]))
    for grown in (context, pickle.loads(pickle.dumps(context)), copy.deepcopy(context)):
        counts = sum(segment.counts for segment in grown.segments)
        r = decode_inclusion_probs(p.codes & LEVEL_MASK, torch.float64)
        assert_close(expected_rows(counts), torch.where(p.codes == 0, 0.0, r).sum(-1).flatten())
        assert len(grown.rows.surplus) == len(grown.rows.codes)
        grown.drop_last()
        if config != "sample_only":
            assert torch.equal(grown.codes, thinned.flatten(0, 1))
        assert int(grown.rows.offsets[-1]) == int(kept.sum())
    assert len(chosen.segments[0].counts) == HEADS
