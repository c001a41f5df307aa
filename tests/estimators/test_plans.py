"""What holds of both fast plans, in torch and by compiled loops, against the sorting reference in float64."""

import pytest
import torch
from plan_rows import DELTA, F32, F64, KINDS, assert_same_plan, exact_bound, make_rows, reference

from verkv.estimators import binary_shrinkage, certificate_drop, fetch_plan, linear_plan, optimal_shrinkage
from verkv.estimators.compiled_plan import compiled_plan


@pytest.fixture(params=[linear_plan, compiled_plan], ids=["torch", "compiled"])
def make_plan(request):
    if request.param is compiled_plan:
        pytest.importorskip("numba", reason="numba compiles these plans")
    return request.param


class TestAgainstTheSort:
    @pytest.mark.parametrize("kind", KINDS)
    def test_medium_rows(self, make_plan, kind):
        for seed, (n_rows, n_tokens, epsilon) in enumerate([(32, 1000, 0.1), (24, 2049, 0.01), (8, 4097, 0.05)]):
            assert_same_plan(make_rows(kind, n_rows, n_tokens, seed), epsilon, make_plan=make_plan)

    @pytest.mark.parametrize("kind", ["peaked", "tied", "constant", "r_at_floor", "inflated"])
    @pytest.mark.parametrize("n_tokens", [32_768, 131_072])
    def test_long_rows(self, make_plan, kind, n_tokens):
        assert_same_plan(make_rows(kind, 2, n_tokens), 0.05, make_plan=make_plan)

    def test_given_shrinkage(self, make_plan):
        """Coefficients anywhere in [r, 1] may be planned with, as Definition 2 gives them."""
        for kind in ("peaked", "some_certain", "r_at_floor"):
            weights, r, residual, denominator = make_rows(kind, 20, 800)
            shrinkage = optimal_shrinkage(weights, r, residual)
            expected = fetch_plan(weights, r, shrinkage, residual, denominator, 0.05, DELTA)
            plan = make_plan(weights, r, residual, denominator, 0.05, DELTA, shrinkage)
            assert torch.equal(plan.shrinkage, shrinkage)
            assert torch.equal(plan.n_promoted, expected.n_promoted)
            assert torch.equal(plan.promoted, expected.promoted)

    def test_tolerance_of_each_row(self, make_plan):
        weights, r, residual, denominator = make_rows("heavy_tailed", 6, 600)
        epsilon = torch.tensor([0.5, 0.02, 1e3, 0.1, 1e-6, 0.05], dtype=F64)
        plan = make_plan(weights, r, residual, denominator, epsilon, DELTA)
        for row, value in enumerate(epsilon.tolist()):
            alone = make_plan(weights[row], r[row], residual[row], denominator[row], value, DELTA)
            assert torch.equal(plan.promoted[row], alone.promoted)

    def test_every_k_is_reached(self, make_plan):
        """With the tolerance between two neighbouring bounds, exactly the tokens above it are promoted."""
        rows = [tensor[:1] for tensor in make_rows("peaked", 1, 40)]
        weights, r, residual, denominator = rows
        shrinkage = binary_shrinkage(weights, r, residual)
        drop = certificate_drop(weights, r, shrinkage, residual, denominator, DELTA)
        rank = drop.argsort(dim=-1, descending=True, stable=True).argsort(-1)
        bounds = [float(exact_bound(*rows, shrinkage, rank < k)) for k in range(41)]
        for k in range(1, 41):
            plan = make_plan(*rows, (bounds[k - 1] + bounds[k]) / 2, DELTA)
            assert torch.equal(plan.promoted, rank < k), k


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_planned_as_float32(make_plan, dtype):
    weights, r, residual, denominator = make_rows("equal_r", 2, 50, dtype=dtype)
    plan = make_plan(weights, r, residual, denominator, 0.05, DELTA)
    expected = make_plan(weights.float(), r.float(), residual, denominator.float(), 0.05, DELTA)
    assert torch.equal(plan.promoted, expected.promoted)
    assert plan.shrinkage.dtype == F32


def test_one_row_without_leading_axes(make_plan):
    weights, r, residual, denominator = (tensor[0] for tensor in make_rows("peaked", 1, 90))
    plan = make_plan(weights, r, residual, denominator, 0.05, DELTA)
    expected, _ = reference(weights, r, residual, denominator, 0.05)
    assert plan.n_promoted.shape == ()
    assert torch.equal(plan.promoted, expected.promoted)


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 5)])
def test_no_tokens_or_no_rows(make_plan, shape):
    ones = torch.ones(shape)
    plan = make_plan(ones, ones, ones.bool(), torch.ones(shape[:-1]), 0.1, 0.1)
    assert plan.promoted.shape == shape
    assert plan.n_promoted.shape == shape[:-1]
    assert not bool(plan.n_promoted.any())


def test_inputs_are_left_alone(make_plan):
    rows = make_rows("peaked", 4, 300)
    shrinkage = optimal_shrinkage(*rows[:3])
    before = [tensor.clone() for tensor in (*rows, shrinkage)]
    make_plan(*rows, 0.05, DELTA)
    make_plan(*rows, 0.05, DELTA, shrinkage)
    assert all(torch.equal(now, then) for now, then in zip((*rows, shrinkage), before, strict=True))


class TestBadInput:
    @pytest.mark.parametrize("epsilon", [0.0, -1.0, float("nan"), float("inf"), torch.tensor([0.1, 0.0])], ids=str)
    def test_epsilon(self, make_plan, epsilon):
        with pytest.raises(ValueError, match="epsilon must be"):
            make_plan(*make_rows("peaked", 2, 20), epsilon, DELTA)

    @pytest.mark.parametrize(
        ("delta", "upper_share", "name"),
        [(0.0, None, "delta"), (1.0, None, "delta"), (0.1, 0.0, "upper_share"), (0.1, 1.0, "upper_share")],
    )
    def test_delta_and_its_parts(self, make_plan, delta, upper_share, name):
        with pytest.raises(ValueError, match=f"{name} must be"):
            make_plan(*make_rows("peaked", 2, 20), 0.1, delta, upper_share=upper_share)
