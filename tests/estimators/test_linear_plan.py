"""The linear plan against the sorting reference in float64, and its promise in float32 against the float64 bound."""

import importlib

import pytest
import torch
from plan_rows import DELTA, F32, F64, KINDS, assert_same_plan, exact_bound, make_rows

from verkv.estimators import boundary as boundary_module
from verkv.estimators import linear_plan
from verkv.estimators.boundary import reduce_bins, running_sum, summation_error, tokens_above

plan_module = importlib.import_module("verkv.estimators.linear_plan")  # the package has a function of that name


class TestAgainstTheSort:
    """With `test_plans.py`, 5,440 rows of at most 4,097 tokens, and long ones."""

    @pytest.mark.parametrize("kind", KINDS)
    def test_short_rows(self, kind):
        for seed, n_tokens in enumerate([1, 2, 3, 17, 64, 511, 512, 513]):
            for epsilon in (0.02, 0.3):
                assert_same_plan(make_rows(kind, 16, n_tokens, seed), epsilon)

    @pytest.mark.parametrize("upper_share", [0.5, 0.7])
    @pytest.mark.parametrize("kind", KINDS)
    def test_sides_bounded_apart(self, kind, upper_share, monkeypatch):
        for seed, (n_rows, n_tokens, epsilon) in enumerate([(16, 3, 0.1), (16, 600, 0.05), (6, 2500, 0.02)]):
            assert_same_plan(make_rows(kind, n_rows, n_tokens, seed), epsilon, upper_share)
        monkeypatch.setattr(boundary_module, "sizes_may_vary", lambda device: False)
        monkeypatch.setattr(plan_module, "sizes_may_vary", lambda device: False)
        assert_same_plan(make_rows(kind, 6, 700), 0.05, upper_share)

    @pytest.mark.parametrize("kind", KINDS)
    def test_fixed_sizes_give_the_same_plan(self, kind, monkeypatch):
        """The path of devices on which sizes must not depend on the data, on the CPU."""
        rows = make_rows(kind, 6, 700)
        gathered = linear_plan(*rows, 0.05, DELTA)
        monkeypatch.setattr(boundary_module, "sizes_may_vary", lambda device: False)
        monkeypatch.setattr(plan_module, "sizes_may_vary", lambda device: False)
        masked = linear_plan(*rows, 0.05, DELTA)
        assert torch.equal(masked.promoted, gathered.promoted)
        assert torch.equal(masked.shrinkage, gathered.shrinkage)
        assert_same_plan(rows, 0.05)


class TestFloat32:
    """Rounding may cost a few tokens more, never the certificate."""

    @pytest.mark.parametrize("fixed_sizes", [False, True], ids=["gathered", "fixed_sizes"])
    @pytest.mark.parametrize("kind", KINDS)
    def test_float64_bound_of_what_is_left_is_below_epsilon(self, kind, fixed_sizes, monkeypatch):
        if fixed_sizes:
            monkeypatch.setattr(boundary_module, "sizes_may_vary", lambda device: False)
            monkeypatch.setattr(plan_module, "sizes_may_vary", lambda device: False)
        for seed, n_tokens in enumerate([1, 2, 64, 600, 3000]):
            for epsilon in (0.3, 0.05, 0.01):
                rows = make_rows(kind, 6, n_tokens, seed, F32)
                plan = linear_plan(*rows, epsilon, DELTA)
                assert plan.shrinkage.dtype == plan.planned_bound.dtype == F32
                assert bool((exact_bound(*rows, plan.shrinkage, plan.promoted) < epsilon).all())
                assert bool((plan.planned_bound < epsilon).all())
                assert torch.equal(plan.promoted.sum(-1), plan.n_promoted)
                assert not bool((plan.promoted & ~rows[2]).any())

    @pytest.mark.parametrize("kind", KINDS)
    def test_float64_bound_of_both_sides_is_below_epsilon(self, kind):
        for seed, n_tokens in enumerate([2, 600, 3000]):
            for epsilon in (0.3, 0.02):
                rows = make_rows(kind, 6, n_tokens, seed, F32)
                plan = linear_plan(*rows, epsilon, DELTA, upper_share=0.7)
                assert bool((exact_bound(*rows, plan.shrinkage, plan.promoted, 0.7) < epsilon).all())

    @pytest.mark.parametrize("kind", KINDS)
    def test_hardly_more_than_in_float64(self, kind):
        """Promoting for a tolerance that is smaller by the margin of rounding is always enough."""
        weights, r, residual, denominator = make_rows(kind, 8, 3000, dtype=F32)
        plan = linear_plan(weights, r, residual, denominator, 0.05, DELTA)
        wide = (weights.double(), r.double(), residual, denominator.double(), 0.05 * (1.0 - 1e-3), DELTA)
        expected = linear_plan(*wide, shrinkage=plan.shrinkage.double())
        assert bool((plan.n_promoted <= expected.n_promoted).all())

    @pytest.mark.parametrize("kind", ["flat", "constant", "equal_r", "r_at_floor", "tied"])
    def test_long_rows(self, kind):
        """Where a plain float32 sum of so many equal terms would drift."""
        rows = make_rows(kind, 2, 131_072, dtype=F32)
        plan = linear_plan(*rows, 0.02, DELTA)
        assert bool((exact_bound(*rows, plan.shrinkage, plan.promoted) < 0.02).all())

    def test_tiny_epsilon_promotes_all(self):
        rows = make_rows("peaked", 3, 100, dtype=F32)
        plan = linear_plan(*rows, 1e-30, DELTA)
        assert bool((exact_bound(*rows, plan.shrinkage, plan.promoted) < 1e-30).all())


class TestShapes:
    def test_broadcasting_and_blocks(self, monkeypatch):
        """Probabilities shared by query rows, rows in several axes, and blocks of any size make no difference."""
        weights, _, _, _ = make_rows("heavy_tailed", 12, 600)
        weights = weights.view(2, 2, 3, 600)
        _, r, residual, _ = make_rows("some_certain", 2, 600, seed=1)
        r, residual = r.view(2, 1, 1, 600), residual.view(2, 1, 1, 600)
        denominator = weights.sum(-1) * 1.5
        full = [tensor.expand(weights.shape).contiguous().view(12, 600) for tensor in (weights, r, residual)]
        expected = linear_plan(*full, denominator.view(12), 0.05, DELTA)
        for pairs in (1, 1500, 2500, 10**6):
            monkeypatch.setattr(plan_module, "_CPU_PAIRS", pairs)
            for mask in (residual, residual.expand(weights.shape)):
                plan = linear_plan(weights, r, mask, denominator, 0.05, DELTA)
                assert plan.promoted.shape == weights.shape
                assert plan.n_promoted.shape == plan.error_bound.shape == plan.planned_bound.shape == (2, 2, 3)
                assert torch.equal(plan.promoted.view(12, 600), expected.promoted)
                assert torch.equal(plan.shrinkage.view(12, 600), expected.shrinkage)
                torch.testing.assert_close(plan.planned_bound.view(12), expected.planned_bound)


class TestBadInput:
    @pytest.mark.parametrize("dtype", [F32, F64])
    @pytest.mark.parametrize("fixed_sizes", [False, True], ids=["gathered", "fixed_sizes"])
    @pytest.mark.parametrize("bad", ["nan_weight", "inf_weight", "zero_denominator", "nan_denominator", "overflow"])
    def test_no_certificate_promotes_everything(self, bad, fixed_sizes, dtype, monkeypatch):
        """A bound that is not a number or infinite is not below epsilon; the other rows are planned as ever."""
        if fixed_sizes:
            monkeypatch.setattr(boundary_module, "sizes_may_vary", lambda device: False)
            monkeypatch.setattr(plan_module, "sizes_may_vary", lambda device: False)
        weights, r, residual, denominator = make_rows("some_certain", 3, 700, dtype=dtype)
        expected = linear_plan(weights, r, residual, denominator, 0.05, DELTA)
        at = int(residual[1].nonzero()[0])
        if bad == "nan_weight":
            weights[1, at] = -torch.nan
        elif bad == "inf_weight":
            weights[1, at] = torch.inf
        elif bad == "overflow":
            weights[1, at] = torch.finfo(dtype).max
        else:
            denominator[1] = 0.0 if bad == "zero_denominator" else torch.nan
        plan = linear_plan(weights, r, residual, denominator, 0.05, DELTA)
        assert torch.equal(plan.promoted[1], residual[1])
        assert int(plan.n_promoted[1]) == int(residual[1].sum())
        assert not bool(plan.error_bound[1].isfinite())
        assert float(plan.planned_bound[1]) == 0.0
        assert torch.equal(plan.promoted[::2], expected.promoted[::2])


class SumRule:
    """Takes tokens, by falling key, while the sum of those before is smaller than a limit."""

    from_top = True
    reductions = ("sum",)

    def __init__(self, limit):
        self.limit = limit

    def boundary_bin(self, bins, largest_key, state):
        before = bins[0].flip(-1).cumsum(-1).flip(-1) - bins[0] + state[0]
        chosen = (before >= self.limit).sum(-1, keepdim=True)
        return chosen, [before.gather(-1, chosen)]

    def last(self, key, values, state):
        return values[0].cumsum(-1) - values[0] + state[0] < self.limit, state


class TestBoundary:
    @pytest.mark.parametrize("dtype", [F32, F64])
    @pytest.mark.parametrize("fixed_sizes", [False, True], ids=["gathered", "fixed_sizes"])
    @pytest.mark.parametrize("keys", ["close", "equal", "spread", "crowded"])
    def test_takes_what_the_sort_takes(self, keys, fixed_sizes, dtype, monkeypatch):
        """Integers are summed, so the sort's answer has no rounding; crowded bins are split down to the last bit."""
        if fixed_sizes:
            monkeypatch.setattr(boundary_module, "sizes_may_vary", lambda device: False)
        monkeypatch.setattr(boundary_module, "_FEW", 8)
        g = torch.Generator().manual_seed(0)
        n_tokens = 5000
        key = {
            "close": 1.0 + torch.finfo(dtype).eps * torch.randint(0, 2000, (3, n_tokens), generator=g),
            "equal": torch.full((3, n_tokens), 0.7),
            "spread": torch.randn(3, n_tokens, generator=g).mul(30.0).exp(),
            "crowded": torch.randint(1, 4, (3, n_tokens), generator=g) * 1.1,
        }[keys].to(dtype)
        value = torch.randint(1, 5, (3, n_tokens), generator=g).to(dtype)
        for limit in (1.0, 700.0, 6000.0, 1e6):
            taken, state = tokens_above(key, [value], SumRule(limit))
            order = key.argsort(dim=-1, descending=True, stable=True)
            sums = value.gather(-1, order).cumsum(-1) - value.gather(-1, order)
            assert torch.equal(taken, torch.zeros_like(taken).scatter(-1, order, sums < limit))
            assert state[0].shape == (3, 1)

    def test_rounding_stays_within_its_bound(self):
        """Equal terms make the same error again and again, in the same direction; a plain sum exceeds the bound."""
        n_tokens = 131_072
        values = torch.full((1, n_tokens), 0.1, dtype=F32)
        values[0, 0] = 4000.0
        exact = values.double().sum()
        allowed = summation_error(n_tokens, F32)
        sums = reduce_bins(torch.zeros(1, n_tokens, dtype=torch.int64), values, 3, "sum")
        assert float((sums[0, 0].double() - exact).abs() / exact) < allowed
        plain = torch.zeros(1, 3).scatter_add_(1, torch.zeros(1, n_tokens, dtype=torch.int64), values)
        assert float((plain[0, 0].double() - exact).abs() / exact) > allowed
        assert float(((running_sum(values).double() / values.double().cumsum(-1)) - 1.0).abs().max()) < allowed

    @pytest.mark.parametrize("n_values", [1, 2, 511, 512, 513, 1000, 4097])
    def test_running_sum(self, n_values):
        values = torch.randint(0, 9, (2, n_values)).float()
        assert torch.equal(running_sum(values), values.cumsum(-1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_rule_that_keeps_all_finds_an_empty_boundary_bin(dtype):
    """With more tokens than are sorted at once; a bound that holds for all of them leaves nothing to line up."""
    from verkv.estimators.linear_plan import _Bound, _FetchRule

    key = torch.rand(3, 3000, dtype=dtype, generator=torch.Generator().manual_seed(0))
    values = [torch.zeros_like(key), key, key]
    denominator, tolerance = torch.ones(3, 1, dtype=dtype), torch.full((3, 1), 1e9, dtype=dtype)
    promoted, kept = tokens_above(key, values, _FetchRule(denominator, tolerance, _Bound(0.1, None)))
    assert not promoted.any()
    torch.testing.assert_close(kept[1], key.sum(-1, keepdim=True), rtol=1e-4, atol=0.0)
    assert torch.equal(kept[2], key.amax(-1, keepdim=True))
