"""The kernels that a GPU gets, run on the CPU, agree with the estimators in float64."""

import dataclasses

import numpy as np
import pytest
import torch
from agreement import (
    DELTA,
    UPPER_SHARES,
    check_attention,
    check_plan,
    log_scalars,
    needs_compiler,
    plan_again,
    run_layer,
)
from emulator import Pass, emulator
from problems import attend, make_codes, make_layer, make_rows, pack, solve

from verkv.cuda import layout
from verkv.cuda.layout import HEAD_DIMS, MAX_TILE, Sizes
from verkv.sketches import shortlist
from verkv.tiers import LEVEL_MASK, RESIDENT_BIT

pytestmark = needs_compiler

N_UNITS = 2
DTYPES = (torch.bfloat16, torch.float16)
# Every head dim with every group size; every head dim and every group size with both dtypes.
SHAPES = [(d, g, DTYPES[(g + HEAD_DIMS.index(d)) % 2]) for d in HEAD_DIMS for g in range(1, MAX_TILE + 1)]
# Tokens, epsilon, sharpness of the queries, plan with sampled rows' exact weights.
STEPS = [
    (300, 0.05, 1.0, False),
    (1000, 0.01, 0.5, False),
    (1000, 0.3, 2.0, True),
    (4096, 0.05, 1.5, False),
    (4097, 0.02, 0.3, True),
    (9000, 0.02, 1.0, False),
]
LENGTHS = (1, 2, 31, 33, 700, 4096, 4097, 12000)
ROW_KINDS = ("flat", "peaked", "heavy_tailed", "tied", "constant", "one_huge_weight")
CODE_KINDS = ("spread", "at_the_floor", "all_alike", "certain", "nearly_certain")
EPSILONS = (0.3, 0.02)
SIDED = UPPER_SHARES[1:]
# Every length by Eq. (7); with the sides apart, long ones at both parts of delta, the others at one in turn.
SIDED_LENGTHS = [(n, SIDED) if n >= 4096 else (n, SIDED[i % 2 :][:1]) for i, n in enumerate(LENGTHS)]
PLANS = [(n, None) for n in LENGTHS] + [(n, share) for n, shares in SIDED_LENGTHS for share in shares]
sided = pytest.mark.parametrize("upper_share", UPPER_SHARES, ids=str)


def test_at_least_2000_rows_are_compared():
    """By Eq. (7), and as many with the sides apart."""
    in_layers = sum(N_UNITS * rows for _, rows, _ in SHAPES) * len(STEPS)
    of_a_plan = len(ROW_KINDS) * len(CODE_KINDS) * len(EPSILONS) * 4
    planned_only = len(LENGTHS) * of_a_plan
    assert in_layers >= 1000 and in_layers + planned_only >= 2000
    assert (len(PLANS) - len(LENGTHS)) * of_a_plan >= planned_only


@pytest.mark.parametrize(("head_dim", "n_rows", "dtype"), SHAPES, ids=lambda x: str(x).removeprefix("torch."))
def test_step_agrees_with_float64(head_dim, n_rows, dtype, record_property):
    n_ties, n_sided_ties = 0, 0
    for i, (n_tokens, epsilon, sharpness, paper) in enumerate(STEPS):
        layer = make_layer(n_tokens, n_rows, head_dim, dtype, sharpness=sharpness, seed=n_tokens + n_rows)
        step, logits = run_layer(layer, epsilon, paper=paper)
        given = torch.from_numpy(logits), layer.tail_lse, layer.unit_codes, epsilon
        n_ties += check_plan(step, *given)
        check_attention(step, layer)
        upper_share = SIDED[(i + n_rows) % 2]
        n_sided_ties += check_plan(plan_again(step, logits, upper_share), *given, upper_share=upper_share)
    record_property("rows decided by a tie", n_ties + n_sided_ties)
    assert n_ties <= 1 and n_sided_ties <= 1


@pytest.mark.parametrize(("n_tokens", "upper_share"), PLANS, ids=str)
def test_plan_of_any_logits_agrees_with_float64(n_tokens, upper_share, record_property):
    """Lengths, shapes of the weights, ties, r at its floor; with and without an error variance of the logits."""
    n_ties = 0
    sizes = Sizes(N_UNITS, n_tokens, rows_all=2, n_rows=2, head_dim=128)
    for i, row_kind in enumerate(ROW_KINDS):
        for j, code_kind in enumerate(CODE_KINDS):
            for epsilon in EPSILONS:
                generator = torch.Generator().manual_seed(1000 * i + 10 * j + int(epsilon < 0.1))
                codes = make_codes(code_kind, N_UNITS, n_tokens, generator)
                logits = make_rows(row_kind, N_UNITS, 2, n_tokens, generator)
                logits = logits.masked_fill((codes == 0)[:, None], -torch.inf)
                tail_lse = torch.randn(N_UNITS, 2, generator=generator)
                inputs = {"codes": codes.numpy(), "logits": logits.numpy(), "tail_lse": tail_lse.numpy()}
                known = sigma2 = None
                if epsilon < 0.1:
                    known = torch.rand(N_UNITS, n_tokens, generator=generator) < 0.02
                    sigma2 = 2 * torch.rand(N_UNITS, 2, generator=generator)
                    inputs |= {"known": pack(known), "sigma2": sigma2.numpy()}
                step = Pass(emulator(), sizes, inputs, epsilon=epsilon, **log_scalars(upper_share))
                step.launch("vk_peak", "vk_plan", "vk_emit", "vk_settle").check_zeroed()
                n_ties += check_plan(step, logits, tail_lse, codes, epsilon, known, sigma2, upper_share)
    record_property("rows decided by a tie", n_ties)
    assert n_ties <= 1


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("paper", [False, True])
def test_scores_are_the_sketch_and_exact_where_the_plan_may_know(head_dim, paper):
    layer = make_layer(700, 5, head_dim, n_contexts=2, n_padding=90, seed=3)
    sizes = Sizes(4, 700, 5, 5, head_dim)
    step = Pass(emulator(head_dim, 5), sizes, layer.inputs(), scaling=layer.scaling, known_resident=int(paper))
    step.launch("vk_score")
    logits = torch.from_numpy(step["logits"])

    query = layer.query.double()
    sketched = query @ layer.sketch.decode().flatten(0, 1).double().mT * layer.scaling
    exact = query @ layer.keys.flatten(0, 1).double().mT * layer.scaling
    knows = layer.resident if paper else layer.resident & ~layer.residual
    expected = torch.where(knows[:, None], exact, sketched).masked_fill((layer.unit_codes == 0)[:, None], -torch.inf)
    torch.testing.assert_close(logits.double(), expected, rtol=1e-5, atol=1e-5)
    assert knows.any() and (layer.unit_codes == 0).any()
    peak = step["peak"].view(np.uint32)
    assert np.array_equal(np.where(peak >> 31, peak & 0x7FFFFFFF, ~peak).view(np.float32), logits.amax(-1).numpy())


@pytest.mark.parametrize("size", [1, 40, 1024])
@pytest.mark.parametrize("paper", [False, True])
@pytest.mark.parametrize("n_tokens", [50, 9000])
def test_shortlist_is_the_best_tokens_scored_exactly(n_tokens, paper, size):
    layer = make_layer(n_tokens, 11, 64, torch.float16, seed=7)
    sizes = Sizes(2, n_tokens, 11, 11, 64, size)
    scalars = {"scaling": layer.scaling, "known_resident": int(paper)}
    step = Pass(emulator(64, sizes.tile, True), sizes, layer.inputs(), **scalars).launch("vk_score")
    before = torch.from_numpy(step["logits"].copy())
    step.launch("vk_shortlist")

    candidates = layer.residual & ~layer.resident if paper else layer.residual
    chosen = shortlist(before, candidates, size)
    assert torch.equal(torch.from_numpy(step.bits("known")), chosen)
    assert np.array_equal(step["n_read"], (chosen & ~layer.resident).sum(-1).numpy())
    after = torch.from_numpy(step["logits"])
    exact = layer.query.double() @ layer.keys.flatten(0, 1).double().mT * layer.scaling
    where = chosen[:, None].expand_as(after)
    torch.testing.assert_close(after[where].double(), exact[where], rtol=1e-5, atol=1e-5)
    assert torch.equal(after[~where], before[~where])
    assert not step["tickets"].any()


def test_shortlist_breaks_ties_by_the_lowest_position():
    layer = make_layer(6000, 2, 64)
    inputs = layer.inputs() | {"logits": np.zeros((2, 2, 6000), np.float32)}
    step = Pass(emulator(64, 2), Sizes(2, 6000, 2, 2, 64, 100), inputs, scaling=layer.scaling).launch("vk_shortlist")
    for unit in range(2):
        assert np.array_equal(step.bits("known")[unit].nonzero()[0], layer.residual[unit].nonzero()[:100, 0].numpy())


@pytest.mark.parametrize("upper_share", [None, 0.7], ids=str)
def test_question_pass_in_chunks_of_rows_is_the_whole_pass(upper_share):
    """27 rows a unit, planned 10 at a time: one union, and attention from rows copied to the device."""
    layer = make_layer(3000, 27, 64, sharpness=0.4, n_contexts=2, n_padding=400, seed=11)
    scalars = {"scaling": layer.scaling, "epsilon": 0.05} | log_scalars(upper_share)
    whole, logits = run_layer(layer, 0.05, shortlist=0, upper_share=upper_share)
    given = torch.from_numpy(logits), layer.tail_lse, layer.unit_codes, 0.05
    assert check_plan(whole, *given, upper_share=upper_share) == 0
    assert (whole["n_fetched"] > 0).all()

    inputs = layer.inputs()
    for first in (0, 10, 20):
        sizes = Sizes(4, 3000, 27, min(10, 27 - first), 64, n_splits=2)
        step = Pass(emulator(64, sizes.tile), sizes, inputs, **scalars)
        last = first + sizes.n_rows == 27
        step.launch(
            "vk_score", "vk_plan", "vk_emit", "vk_settle", first_row=first, accumulate=int(first > 0), compact=int(last)
        )
        results = ("mask", "shrunk", "n_promoted", "n_row_fetched", "bound", "fetch_positions", "n_fetched")
        results += ("is_exact", "unit_counts")
        inputs = inputs | {name: step[name] for name in results}
    for name in ("mask", "shrunk", "n_promoted", "n_row_fetched", "bound", "n_fetched", "is_exact"):
        assert np.array_equal(step[name], whole[name]), name

    capacity = int(step["n_fetched"].max())
    staged = {name: np.zeros((4, capacity, 64), np.int16) for name in ("staged_keys", "staged_values")}
    sizes = Sizes(4, 3000, 27, 27, 64, n_splits=2)
    step = Pass(emulator(64, sizes.tile), sizes, inputs | staged, staged_rows=capacity, **scalars)
    step.launch("vk_gather")
    del step.arrays["host_keys"], step.arrays["host_values"]  # rows must come from the copy
    step.launch("vk_attend").check_zeroed()
    check_attention(step, layer)


@pytest.mark.parametrize("kind", ["nothing_resident", "all_resident", "one_token"])
def test_attention_of_extreme_sets(kind):
    layer = make_layer(1 if kind == "one_token" else 200, 3, 64, seed=2)
    level = 0 if kind == "one_token" else 8
    codes = torch.full_like(layer.codes, level if kind == "nothing_resident" else level | RESIDENT_BIT)
    layer.codes, layer.rows = codes, layer.rows.gather(layer.keys, layer.values, codes)
    layer.row_positions = layer.resident.nonzero()[:, 1].int()
    step, logits = run_layer(layer, 1e-6, shortlist=0)
    assert check_plan(step, torch.from_numpy(logits), layer.tail_lse, layer.unit_codes, 1e-6) == 0
    check_attention(step, layer)
    step, _ = run_layer(layer, 1e6, shortlist=0)  # promotes nothing
    if kind == "nothing_resident":
        assert not step["output"].any() and (step["lse"] == -np.inf).all()
    else:
        check_attention(step, layer)


@pytest.mark.parametrize("bad", ["nan_logit", "nan_tail", "no_weight_at_all"])
@sided
def test_a_row_without_a_bound_is_fetched_whole(upper_share, bad):
    generator = torch.Generator().manual_seed(5)
    codes, logits = make_codes("spread", 2, 500, generator), make_rows("flat", 2, 2, 500, generator)
    tail_lse = torch.full((2, 2), -torch.inf)
    if bad == "nan_logit":
        logits[0, 1, 300] = torch.nan
    elif bad == "nan_tail":
        tail_lse[0, 1] = torch.nan
    else:
        logits[0, 1] = -torch.inf
    inputs = {"codes": codes.numpy(), "logits": logits.numpy(), "tail_lse": tail_lse.numpy()}
    step = Pass(emulator(), Sizes(2, 500, 2, 2, 128), inputs, epsilon=1e3, **log_scalars(upper_share))
    step.launch("vk_peak", "vk_plan", "vk_emit", "vk_settle").check_zeroed()
    residual = (codes & LEVEL_MASK) > 0
    assert np.array_equal(step.bits("mask")[0], residual[0].numpy()) and not step.bits("mask")[1].any()
    assert step["n_promoted"].tolist() == [[0, int(residual[0].sum())], [0, 0]]
    assert np.isnan(step["bound"][0, 1]) and step["is_exact"].tolist() == [1, 0]


@pytest.mark.parametrize("upper_share", [*UPPER_SHARES, 0.001, 0.999], ids=str)
def test_no_plan_is_looser_than_epsilon_in_float64(upper_share):
    """At the epsilon that the library hands over, the float64 bound of every row's own set is below the true one."""
    epsilon = 0.05
    for seed in range(12):
        layer = make_layer(1500, 6, 64, sharpness=0.4, n_kv_heads=1, seed=seed)
        for row in range(6):  # one row a unit, so that its union is its own set
            one = slice(row, row + 1)
            single = dataclasses.replace(layer, query=layer.query[:, one], tail_lse=layer.tail_lse[:, one])
            step, logits = run_layer(single, layout.safe_epsilon(epsilon), shortlist=8, upper_share=upper_share)
            given = torch.from_numpy(logits), single.tail_lse, single.unit_codes, epsilon, DELTA
            answer = solve(*given, upper_share=upper_share)
            assert (answer.bound(torch.from_numpy(step.bits("mask"))[:, None]) < epsilon).all()


@sided
def test_rows_may_have_tolerances_of_their_own(upper_share):
    layer = make_layer(1500, 4, 64, sharpness=0.4, seed=6)
    sizes, tolerances = Sizes(2, 1500, 4, 4, 64), torch.tensor([[0.5, 0.2, 0.05, 0.01]] * 2)
    inputs = layer.inputs() | {"tolerances": tolerances.numpy()}
    scalars = {"scaling": layer.scaling, "epsilon": np.nan} | log_scalars(upper_share)
    step = Pass(emulator(64, 4), sizes, inputs, **scalars)
    step.launch("vk_score", "vk_plan", "vk_emit", "vk_settle").check_zeroed()
    for row, epsilon in enumerate(tolerances[0].tolist()):
        given = torch.from_numpy(step["logits"]), layer.tail_lse, layer.unit_codes, epsilon, DELTA
        answer = solve(*given, upper_share=upper_share)
        assert torch.equal(torch.from_numpy(step["n_promoted"])[:, row].long(), answer.plan.n_promoted[:, row])


def test_mean_of_the_sketch_error_moves_its_logits_only():
    layer = make_layer(700, 3, 64, seed=8)
    shift = torch.randn(2, 3)
    sizes, scalars = Sizes(2, 700, 3, 3, 64), {"scaling": layer.scaling}
    plain = Pass(emulator(64, 3), sizes, layer.inputs(), **scalars).launch("vk_score")["logits"]
    moved = Pass(emulator(64, 3), sizes, layer.inputs() | {"shift": shift.numpy()}, **scalars).launch("vk_score")[
        "logits"
    ]
    expected = torch.where(layer.residual[:, None], shift[..., None], 0.0)
    torch.testing.assert_close(torch.from_numpy(moved - plain), expected.expand(-1, -1, 700), rtol=0, atol=1e-5)


@pytest.mark.parametrize("max_read", [0.001, 0.5, 1.0])
@sided
def test_a_plan_beyond_max_read_is_exact(upper_share, max_read):
    layer = make_layer(2000, 4, 64, n_contexts=2, n_padding=600, sharpness=0.4, seed=10)
    sizes, scalars = Sizes(4, 2000, 4, 4, 64), {"scaling": layer.scaling, "epsilon": 0.03} | log_scalars(upper_share)
    free = Pass(emulator(64, 4), sizes, layer.inputs(), **scalars)
    free.launch("vk_score", "vk_plan", "vk_emit", "vk_settle")
    step = Pass(emulator(64, 4), sizes, layer.inputs(), max_read=max_read, **scalars)
    step.launch("vk_score", "vk_plan", "vk_emit", "vk_settle", "vk_attend").check_zeroed()
    too_much = free.bits("mask").sum(-1) > max_read * (layer.unit_codes != 0).sum(-1).numpy()
    expected = np.where(too_much[:, None], layer.residual.numpy(), free.bits("mask"))
    assert np.array_equal(step.bits("mask"), expected)
    assert np.array_equal(step["is_exact"], too_much)
    assert too_much.all() or max_read > 0.001
    assert not too_much.any() or max_read < 1.0
    missing = (expected & ~layer.resident.numpy()).sum(-1)
    assert np.array_equal(step["n_fetched"], missing)
    check_attention(step, layer)


@pytest.mark.parametrize("upper_share", [None, 0.7], ids=str)
def test_order_of_blocks_and_warps_changes_nothing(upper_share):
    layer = make_layer(9000, 4, 64, sharpness=0.5, seed=4)
    runs = [run_layer(layer, 0.01, seed=seed, upper_share=upper_share)[0] for seed in (1, 2, 3)]
    for name in ("mask", "shrunk", "n_promoted", "n_row_fetched", "n_fetched", "known", "output", "lse"):
        assert all(np.array_equal(runs[0][name], other[name]) for other in runs[1:]), name


@pytest.mark.parametrize("upper_share", [None, 0.7], ids=str)
def test_plan_is_blind_to_the_draw(upper_share):
    layer = make_layer(2000, 4, 64, sharpness=0.5, seed=9)
    first, _ = run_layer(layer, 0.02, upper_share=upper_share)
    sampled = torch.rand(layer.codes.shape) < 0.5
    levels = layer.codes & LEVEL_MASK
    codes = levels | ((sampled | (levels == 0)).to(torch.uint8) * RESIDENT_BIT)
    layer.codes, layer.rows = codes, layer.rows.gather(layer.keys, layer.values, codes)
    layer.row_positions = layer.resident.nonzero()[:, 1].int()
    second, _ = run_layer(layer, 0.02, upper_share=upper_share)
    for name in ("mask", "shrunk", "n_promoted", "bound", "known"):
        assert np.array_equal(first[name], second[name]), name
    assert not np.array_equal(first["n_fetched"], second["n_fetched"])


def test_attention_uses_the_union_for_all_rows_of_a_unit():
    layer = make_layer(2000, 4, 64, sharpness=0.4, seed=12)
    step, _ = run_layer(layer, 0.02)
    union = torch.from_numpy(step.bits("mask"))
    output, _ = attend(layer, union & False, torch.from_numpy(step.bits("shrunk")))
    assert union.any() and (torch.from_numpy(step["output"]) - output).norm() > 0.01 * output.norm()
