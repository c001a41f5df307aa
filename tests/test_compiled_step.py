"""A pass by compiled loops against the same pass by tensor operations: outputs, log-sum-exps and every statistic."""

import dataclasses
import itertools

import pytest
import torch
from torch.testing import assert_close

from verkv import compiled_step
from verkv.compiled_attention import attend_in_place, reads_in_place
from verkv.context import SealedContext, SealPlan
from verkv.estimators.sampling import MIN_INCLUSION_PROB
from verkv.kvfetch import FetchConfig
from verkv.sketches import ExactSketch, PageMinMaxSketch, RopePairSketch, TransformSketch
from verkv.sketches.fit import fit_sketch
from verkv.sketches.shortlist import shortlist
from verkv.stats import FetchStats
from verkv.tiers import LEVEL_MASK, RESIDENT_BIT, HostParts, ResidentRows

numpy = pytest.importorskip("numpy")
pytest.importorskip("numba", reason="numba compiles this pass")

CONTEXTS, BEAMS, HEADS, GROUP, T, TAIL, DIM = 2, 2, 2, 3, 700, 6, 16
SCALING = 0.25
PADDING = torch.tensor([0, 90])


def make_codes(seed=0, n_padding=PADDING):
    """Random levels, higher for some tokens than for others, and a draw of them; the ends are certain."""
    generator = torch.Generator().manual_seed(seed)
    levels = torch.randint(3, 60, (CONTEXTS, HEADS, T), generator=generator)
    position = torch.arange(T)
    certain = (position < n_padding[:, None] + 4) | (position >= T - 8)
    levels = torch.where(certain[:, None], 0, levels)
    drawn = torch.rand(levels.shape, generator=generator) < torch.exp2(-levels / 8)
    codes = (levels + RESIDENT_BIT * drawn).to(torch.uint8)
    return torch.where((position >= n_padding[:, None])[:, None], codes, torch.zeros_like(codes))


@dataclasses.dataclass
class Problem:
    """Keys with a few strong directions, so that attention is neither flat nor on one token."""

    keys: torch.Tensor
    values: torch.Tensor
    query: torch.Tensor
    tail_keys: torch.Tensor
    tail_values: torch.Tensor

    @classmethod
    def make(cls, seed=0, n_queries=1, beams=BEAMS, dtype=torch.float32):
        g = torch.Generator().manual_seed(seed)
        draw = lambda *shape: torch.randn(*shape, generator=g)  # noqa: E731
        strength = torch.tensor([4.0, 3.0] + [0.7] * (DIM - 2))
        batch = CONTEXTS * beams
        found = (
            draw(CONTEXTS, HEADS, T, DIM) * strength,
            draw(CONTEXTS, HEADS, T, DIM),
            draw(batch, HEADS * GROUP, n_queries, DIM),
            draw(batch, HEADS, TAIL, DIM),
            draw(batch, HEADS, TAIL, DIM),
        )
        return cls(*(tensor.to(dtype) for tensor in found))


def seal(problem, fetch, sketch, seed=0, beams=BEAMS, moments=False, **options):
    fitted = None
    if moments:
        protected, none = torch.arange(T) < PADDING[:, None] + 4, torch.zeros(CONTEXTS, dtype=torch.int64)
        fitted = fit_sketch(sketch, problem.keys, PADDING, None, protected, none, least_variance=0.0)
    plan = SealPlan(make_codes(seed), PADDING, fetch=fetch, sketch=sketch, fitted=fitted, beams=beams, **options)
    return SealedContext(problem.keys, problem.values, plan, 0, FetchStats("test", record_bounds=True))


def run(monkeypatch, problem, context, setting, mask=None):
    """Output and record of a pass, by torch ("0") or by loops ("1")."""
    monkeypatch.setenv("VERKV_COMPILED", setting)
    assert compiled_step.serves(context) is (setting == "1")
    records = []
    monkeypatch.setattr(context.stats, "record", records.append)
    output = context.attend(problem.query, problem.tail_keys, problem.tail_values, mask, SCALING)
    return output, records[0]


def passes(monkeypatch, problem, context, mask=None):
    """The pass by torch, and the same by loops.

    Where torch's float32 sums put a bound on the other side of the tolerance, loops have to decide as torch does at a
    tolerance that differs by 1e-4 of it.
    """
    by_torch = run(monkeypatch, problem, context, "0", mask)
    fetch, tolerances = context.fetch, context.tolerances
    for factor in (1.0, 1.0 - 1e-4, 1.0 + 1e-4):
        context.fetch = dataclasses.replace(fetch, epsilon=fetch.epsilon * factor)
        context.tolerances = None if tolerances is None else tolerances * factor
        by_loops = run(monkeypatch, problem, context, "1", mask)
        if counts(by_loops[1]) == counts(by_torch[1]):
            break
    context.fetch, context.tolerances = fetch, tolerances
    return by_torch, by_loops


def counts(record):
    """What of a record is counted, by name."""
    found = {}
    for field in dataclasses.fields(record):
        value = getattr(record, field.name)
        if not isinstance(value, torch.Tensor):
            found[field.name] = value
        elif not value.is_floating_point():
            found[field.name] = value.tolist()
    return found


def assert_same(monkeypatch, problem, context, mask=None):
    """The same decisions, and outputs and bounds but for rounding."""
    (by_torch, expected), (by_loops, record) = passes(monkeypatch, problem, context, mask)
    assert counts(record) == counts(expected)
    assert_close(by_loops, by_torch, atol=2e-5, rtol=2e-5)
    for name in ("error_bound", "relative_error", "output_error", "output_bound"):
        mine, other = getattr(record, name), getattr(expected, name)
        assert (mine is None) == (other is None)
        if mine is not None:
            assert_close(mine, other, atol=2e-4, rtol=2e-4, equal_nan=True, msg=name)
    return record


SKETCHES = {
    "rope_pair": RopePairSketch(fraction=1.0, group_size=32),  # no two tokens have the same codes
    "transform": TransformSketch(None),
    "pages": PageMinMaxSketch(),
    "exact": ExactSketch(),
}
FETCHES = {
    "blind": FetchConfig(epsilon=0.2, shortlist=0),
    "sided": FetchConfig(epsilon=0.1, shortlist=0, upper_share=0.7),
    "shortlist": FetchConfig(epsilon=0.1, shortlist=20),
    "paper": FetchConfig(epsilon=0.1, shortlist=20, paper=True),
    "longest shortlist": FetchConfig(epsilon=0.1, shortlist=5 * T),
    "everything": FetchConfig(epsilon=1e-9, shortlist=7),
    "nothing": FetchConfig(epsilon=50.0, shortlist=0),
    "cut off": FetchConfig(epsilon=0.1, shortlist=3, max_read=0.05),
}


# A page's tokens have equal scores: which of them are on a shortlist is open.
PLANS = [
    (sketch, fetch)
    for sketch, fetch in itertools.product(SKETCHES, FETCHES)
    if sketch != "pages" or FETCHES[fetch].shortlist in (0, 5 * T)
]


@pytest.mark.parametrize("n_queries", [1, 3], ids=["decode", "question"])
@pytest.mark.parametrize(("sketch", "fetch"), PLANS)
def test_every_plan(monkeypatch, sketch, fetch, n_queries):
    problem = Problem.make(n_queries=n_queries)
    record = assert_same(monkeypatch, problem, seal(problem, FETCHES[fetch], SKETCHES[sketch]))
    n_away = int(((make_codes() > 0) & (make_codes() < RESIDENT_BIT)).sum())
    assert {"everything": record.fetched == n_away, "nothing": record.fetched == 0}.get(fetch, record.fetched > 0)
    if fetch == "cut off":
        assert record.exact_heads > 0


@pytest.mark.parametrize("fetch", ["blind", "sided", "shortlist", "paper"])
@pytest.mark.parametrize("sketch", ["rope_pair", "transform"])
def test_moments_of_the_sketch_error(monkeypatch, sketch, fetch):
    problem = Problem.make(seed=2)
    context = seal(problem, FETCHES[fetch], SKETCHES[sketch], moments=True)
    assert context.sketch_error is not None
    with_moments = assert_same(monkeypatch, problem, context)
    context.sketch_error = None
    assert not torch.equal(with_moments.error_bound, assert_same(monkeypatch, problem, context).error_bound)


@pytest.mark.parametrize("fetch", ["blind", "paper"])
def test_bfloat16(monkeypatch, fetch):
    """Rows are read as they are stored; the output alone is rounded to the dtype."""
    problem = Problem.make(n_queries=2, dtype=torch.bfloat16)
    context = seal(problem, FETCHES[fetch], SKETCHES["exact" if fetch == "blind" else "rope_pair"])
    (by_torch, expected), (by_loops, record) = passes(monkeypatch, problem, context)
    assert by_loops.dtype == torch.bfloat16
    assert_close(by_loops, by_torch, atol=1e-6, rtol=2.0**-7)
    assert (by_loops != by_torch).float().mean() < 0.02  # one rounding apart where they are
    assert counts(record) == counts(expected) and record.fetched > 0


def test_chunks_of_query_rows(monkeypatch):
    """A long question is planned some rows at a time; the union is that of all rows."""
    problem = Problem.make(n_queries=9)
    context = seal(problem, FETCHES["shortlist"], SKETCHES["rope_pair"])
    whole = assert_same(monkeypatch, problem, context)
    monkeypatch.setattr("verkv.kvfetch.MAX_PLANNED_PAIRS", context.n_units * BEAMS * T * 4)
    cut = assert_same(monkeypatch, problem, context)
    assert cut.fetched == whole.fetched
    assert torch.equal(cut.promoted, whole.promoted)


def test_tolerances_of_query_heads(monkeypatch):
    problem = Problem.make(n_queries=2)
    tolerances = 0.05 + torch.rand(CONTEXTS, HEADS * GROUP, generator=torch.Generator().manual_seed(0))
    context = seal(problem, FETCHES["blind"], SKETCHES["exact"], tolerances=tolerances)
    record = assert_same(monkeypatch, problem, context)
    assert len(set(record.promoted.tolist())) > 2


def test_masks_hidden_tokens_and_audit(monkeypatch):
    problem = Problem.make(n_queries=3)
    context = seal(problem, FETCHES["blind"], SKETCHES["rope_pair"], audit=True)
    mask = torch.ones(CONTEXTS * BEAMS, T + TAIL, dtype=torch.bool)
    mask[:, :T] = (torch.arange(T) >= PADDING[:, None]).repeat_interleave(BEAMS, 0)
    mask[1, T] = False  # a tail token that one beam does not see
    record = assert_same(monkeypatch, problem, context, mask)
    assert float(record.relative_error.max()) > 1e-3


def test_one_row_in_all_and_no_sample(monkeypatch):
    """Units may have no resident rows at all, or only certain ones."""
    problem = Problem.make(beams=1)
    codes = make_codes()
    codes[0, 0] &= LEVEL_MASK
    codes[0, 0, codes[0, 0] == 0] = 30
    codes[1, 1] &= LEVEL_MASK
    codes[1, 1, -8:] = RESIDENT_BIT
    plan = SealPlan(codes, PADDING, fetch=FETCHES["shortlist"], sketch=SKETCHES["rope_pair"])
    context = SealedContext(problem.keys, problem.values, plan, 0, FetchStats("test", record_bounds=True))
    assert_same(monkeypatch, problem, context)


@pytest.mark.parametrize("where", ["query", "key"])
def test_what_is_not_a_number_stays_so(monkeypatch, where):
    """A bad row is NaN by both; it hides nothing of the rows that can be computed."""
    problem = Problem.make(beams=1)
    context = seal(problem, FETCHES["blind"], SKETCHES["rope_pair"], beams=1)
    if where == "query":
        problem.query[1, 4] = torch.nan
    else:
        context.rows.keys[3] = torch.nan
    (by_torch, expected), (by_loops, record) = passes(monkeypatch, problem, context)
    assert torch.equal(by_torch.isnan(), by_loops.isnan())
    assert bool(by_loops.isnan().any()) and not bool(by_loops.isnan().all())
    assert_close(by_loops, by_torch, atol=2e-5, rtol=2e-5, equal_nan=True)
    assert record.fetched == expected.fetched


def plan_of_draw(seed, fetch):
    """Promoted tokens and the results of every row, with one level for each token whatever the draw is."""
    problem, codes = Problem.make(), make_codes()
    drawn = torch.rand(codes.shape, generator=torch.Generator().manual_seed(seed)) < 0.3
    codes = torch.where((codes & LEVEL_MASK) > 0, (codes & LEVEL_MASK) + RESIDENT_BIT * drawn, codes).to(torch.uint8)
    plan = SealPlan(codes, PADDING, fetch=fetch, sketch=SKETCHES["rope_pair"], beams=BEAMS)
    context = SealedContext(problem.keys, problem.values, plan, 0, FetchStats("test"))
    rows = context._to_units(problem.query)
    tail = torch.zeros(*rows.shape[:3], 1), torch.zeros(len(rows), BEAMS, 1, DIM)
    step = compiled_step.CompiledStep(context, rows, [slice(0, rows.shape[2])], tail, SCALING)
    unit, position = step.plan().unbind(1)
    assert bool((position >= PADDING.repeat_interleave(HEADS)[unit]).all())  # padding is never fetched
    return step.union, numpy.concatenate(step.results, 1)[..., [0, 2, 3]]


@pytest.mark.parametrize("fetch", ["blind", "sided", "shortlist"])
def test_plan_does_not_depend_on_the_draw(fetch):
    (first, first_results), (second, second_results) = (plan_of_draw(seed, FETCHES[fetch]) for seed in (1, 2))
    assert first.any() and (first == second).all()
    if FETCHES[fetch].shortlist == 0:
        assert (first_results == second_results).all()
    else:  # a shortlisted key is read from the host or among the resident rows, but by the same loop
        numpy.testing.assert_allclose(first_results, second_results, rtol=1e-6)


def test_plan_of_the_paper_depends_on_the_draw():
    (first, first_results), (second, second_results) = (plan_of_draw(seed, FETCHES["paper"]) for seed in (1, 2))
    assert (first != second).any() and (first_results != second_results).any()


def test_nothing_it_reads_is_written(monkeypatch):
    problem = Problem.make()
    context = seal(problem, FETCHES["paper"], SKETCHES["rope_pair"])
    tensors = [context.codes, context.rows.keys, context.rows.values, context.host.keys, context.host.values]
    tensors += [problem.query, problem.tail_keys, problem.tail_values, *context.sketch.tensors().values()]
    before = [tensor.clone() for tensor in tensors]
    passes(monkeypatch, problem, context)
    assert all(torch.equal(now, then) for now, then in zip(tensors, before, strict=True))


class TestWhatTorchServes:
    """Whatever loops have no answer to; that torch then gives it is what other tests see."""

    @pytest.mark.parametrize(
        "change",
        [{"target": "output"}, {"shrinkage": "optimal"}, {"key_rounds": 1}],
        ids=["target", "shrinkage", "key_rounds"],
    )
    def test_other_plans(self, change):
        problem = Problem.make()
        fetch = dataclasses.replace(FETCHES["blind"], **change)
        assert not compiled_step.serves(seal(problem, fetch, SKETCHES["rope_pair"]))

    def test_key_rounds_of_an_exact_sketch_change_nothing(self):
        fetch = dataclasses.replace(FETCHES["blind"], key_rounds=1)
        assert compiled_step.serves(seal(Problem.make(), fetch, SKETCHES["exact"]))

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
    def test_other_dtypes(self, dtype):
        context = seal(Problem.make(dtype=dtype), FETCHES["blind"], SKETCHES["rope_pair"])
        assert not compiled_step.serves(context)

    def test_no_fetching_and_contexts_that_grew(self):
        problem = Problem.make()
        assert not compiled_step.serves(seal(problem, None, None))
        context = seal(problem, FETCHES["blind"], SKETCHES["rope_pair"])
        assert reads_in_place(context.rows, context.host)
        assert not reads_in_place(context.rows, HostParts.of(context.host, T))


def test_poissoncomp_attends_by_loops(monkeypatch):
    """Without fetching, attention alone is theirs."""
    problem = Problem.make(n_queries=2)
    context, found = seal(problem, None, None), []
    monkeypatch.setattr(context.stats, "record", lambda record: None)
    for setting in "01":
        monkeypatch.setenv("VERKV_COMPILED", setting)
        arguments = problem.query, problem.tail_keys, problem.tail_values, None, SCALING
        found.append(context.attend(*arguments))
    assert_close(found[1], found[0], atol=2e-5, rtol=2e-5)


def test_rows_that_see_nothing_are_zero():
    rows = ResidentRows(*torch.zeros(2, 3, DIM), torch.zeros(3, dtype=torch.uint8), torch.tensor([0, 3]))
    query, absent = torch.randn(1, 1, 2, DIM), torch.full((1, 1, 1, 3), -torch.inf)
    tail = torch.full((1, 1, 2, 4), -torch.inf), torch.randn(1, 1, 4, DIM)
    output, lse = attend_in_place(query, rows, absent, None, None, tail, SCALING)
    assert bool((output == 0).all()) and bool((lse == -torch.inf).all())


@pytest.mark.parametrize("paper", [False, True])
@pytest.mark.parametrize("size", [1, 2, 9, 64, 500])
def test_shortlist(size, paper):
    from verkv.loops.step import choose_shortlist

    codes = make_codes().flatten(0, 1)
    scores = torch.randn(codes.shape, generator=torch.Generator().manual_seed(1))
    candidates = (codes & LEVEL_MASK) > 0
    if paper:
        candidates &= codes < RESIDENT_BIT
    chosen = torch.zeros(codes.shape, dtype=torch.bool)
    choose_shortlist(scores.numpy(), codes.numpy(), paper, size, chosen.numpy())
    assert torch.equal(chosen, shortlist(scores[:, None], candidates, size))


def test_shortlist_takes_the_first_of_equal_ones():
    from verkv.loops.step import choose_shortlist

    codes = torch.full((1, 50), 9, dtype=torch.uint8)
    chosen = torch.zeros(1, 50, dtype=torch.bool)
    choose_shortlist(torch.ones(1, 50).numpy(), codes.numpy(), False, 20, chosen.numpy())
    assert torch.equal(chosen[0], torch.arange(50) < 20)


def test_codes_are_read_as_they_are_written():
    from verkv.loops import step

    assert (int(step.RESIDENT), int(step.LEVEL)) == (RESIDENT_BIT, LEVEL_MASK)


def test_smallest_probability_is_in_the_table():
    table = compiled_step._inclusion_probs()
    assert len(table) == LEVEL_MASK + 1
    assert table[0] == 1.0 and table[-1] == numpy.float32(MIN_INCLUSION_PROB)
