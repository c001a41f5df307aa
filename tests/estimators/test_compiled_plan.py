"""The plan by compiled loops against the sorting reference in float64, and against the float64 bound in float32."""

import builtins
import functools
import sys
import warnings

import pytest
import torch
from plan_rows import DELTA, F32, F64, KINDS, assert_same_plan, exact_bound, make_rows, reference

from verkv import loops
from verkv.estimators import binary_shrinkage, certificate_drop, fetch_plan, linear_plan, optimal_shrinkage
from verkv.estimators.compiled_plan import compiled_plan, compiles

pytest.importorskip("numba", reason="numba compiles these plans")

same_plan = functools.partial(assert_same_plan, make_plan=compiled_plan)


class TestAgainstTheSort:
    @pytest.mark.parametrize("upper_share", [None, 0.5, 0.7])
    @pytest.mark.parametrize("kind", KINDS)
    def test_short_rows(self, kind, upper_share):
        for seed, n_tokens in enumerate([1, 2, 3, 17, 24, 25, 64, 511, 512, 513]):
            for epsilon in (0.02, 0.3):
                same_plan(make_rows(kind, 16, n_tokens, seed), epsilon, upper_share)

    @pytest.mark.parametrize("kind", KINDS)
    def test_medium_rows(self, kind):
        for seed, (n_rows, n_tokens, epsilon) in enumerate([(32, 1000, 0.1), (24, 2049, 0.01), (8, 4097, 0.05)]):
            same_plan(make_rows(kind, n_rows, n_tokens, seed), epsilon)

    @pytest.mark.parametrize("kind", ["peaked", "tied", "constant", "r_at_floor", "inflated"])
    @pytest.mark.parametrize("n_tokens", [32_768, 131_072])
    def test_long_rows(self, kind, n_tokens):
        same_plan(make_rows(kind, 2, n_tokens), 0.05)

    def test_keys_that_differ_in_their_last_bits_only(self):
        """The order is settled digit by digit, down to the last."""
        n_tokens = 300
        weights = 1.0 + torch.arange(n_tokens, dtype=F64)[torch.randperm(n_tokens)][None] * 2.0**-50
        r = torch.full((1, n_tokens), 0.3, dtype=F64)
        rows = (weights, r, r < 1, weights.sum(-1))
        plan, (expected, _) = compiled_plan(*rows, 0.1, DELTA), reference(*rows, 0.1)
        assert 0 < int(plan.n_promoted) < n_tokens
        assert torch.equal(plan.promoted, expected.promoted)

    def test_equal_keys_are_promoted_from_the_first_token_on(self):
        weights, r = torch.ones(1, 200, dtype=F64), torch.full((1, 200), 0.3, dtype=F64)
        plan = compiled_plan(weights, r, r < 1, weights.sum(-1), 0.2, DELTA, torch.ones_like(weights))
        k = int(plan.n_promoted)
        assert 24 < k < 176
        assert torch.equal(plan.promoted[0], torch.arange(200) < k)

    def test_given_shrinkage(self):
        for kind in ("peaked", "some_certain", "r_at_floor"):
            weights, r, residual, denominator = make_rows(kind, 20, 800)
            shrinkage = optimal_shrinkage(weights, r, residual)
            expected = fetch_plan(weights, r, shrinkage, residual, denominator, 0.05, DELTA)
            plan = compiled_plan(weights, r, residual, denominator, 0.05, DELTA, shrinkage)
            assert torch.equal(plan.shrinkage, shrinkage)
            assert torch.equal(plan.n_promoted, expected.n_promoted)
            assert torch.equal(plan.promoted, expected.promoted)

    def test_tolerance_of_each_row(self):
        weights, r, residual, denominator = make_rows("heavy_tailed", 6, 600)
        epsilon = torch.tensor([0.5, 0.02, 1e3, 0.1, 1e-6, 0.05], dtype=F64)
        plan = compiled_plan(weights, r, residual, denominator, epsilon, DELTA)
        for row, value in enumerate(epsilon.tolist()):
            alone = compiled_plan(weights[row], r[row], residual[row], denominator[row], value, DELTA)
            assert torch.equal(plan.promoted[row], alone.promoted)

    def test_every_k_is_reached(self):
        """With the tolerance between two neighbouring bounds, exactly the tokens above it are promoted."""
        rows = [tensor[:1] for tensor in make_rows("peaked", 1, 40)]
        weights, r, residual, denominator = rows
        shrinkage = binary_shrinkage(weights, r, residual)
        drop = certificate_drop(weights, r, shrinkage, residual, denominator, DELTA)
        rank = drop.argsort(dim=-1, descending=True, stable=True).argsort(-1)
        bounds = [float(exact_bound(*rows, shrinkage, rank < k)) for k in range(41)]
        for k in range(1, 41):
            plan = compiled_plan(*rows, (bounds[k - 1] + bounds[k]) / 2, DELTA)
            assert torch.equal(plan.promoted, rank < k), k


class TestFloat32:
    """The numbers are float32, the sums are not: it is the float64 plan of these numbers."""

    @pytest.mark.parametrize("upper_share", [None, 0.7])
    @pytest.mark.parametrize("kind", KINDS)
    def test_it_is_the_plan_in_float64(self, kind, upper_share):
        for seed, n_tokens in enumerate([1, 2, 64, 600, 3000]):
            for epsilon in (0.3, 0.05, 0.01):
                rows = make_rows(kind, 6, n_tokens, seed, F32)
                plan = compiled_plan(*rows, epsilon, DELTA, upper_share=upper_share)
                assert plan.shrinkage.dtype == plan.planned_bound.dtype == F32
                assert bool((exact_bound(*rows, plan.shrinkage, plan.promoted, upper_share) < epsilon).all())
                assert bool((plan.planned_bound < epsilon).all())
                assert torch.equal(plan.promoted.sum(-1), plan.n_promoted)
                wide = [tensor if tensor.dtype == torch.bool else tensor.double() for tensor in rows]
                expected, shrinkage = reference(*wide, epsilon * (1.0 - 2.0**-22), upper_share)
                assert torch.equal(plan.shrinkage.double(), shrinkage)
                assert torch.equal(plan.n_promoted, expected.n_promoted)

    @pytest.mark.parametrize("kind", KINDS)
    def test_never_more_than_torch_has_to_promote(self, kind):
        rows = make_rows(kind, 8, 3000, dtype=F32)
        compiled, by_torch = compiled_plan(*rows, 0.05, DELTA), linear_plan(*rows, 0.05, DELTA)
        same = (compiled.shrinkage == by_torch.shrinkage).all(-1)
        assert bool((compiled.n_promoted <= by_torch.n_promoted)[same].all())
        assert int(same.sum()) > 4

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_half_precision(self, dtype):
        weights, r, residual, denominator = make_rows("equal_r", 2, 50, dtype=dtype)
        plan = compiled_plan(weights, r, residual, denominator, 0.05, DELTA)
        expected = compiled_plan(weights.float(), r.float(), residual, denominator.float(), 0.05, DELTA)
        assert torch.equal(plan.promoted, expected.promoted)
        assert plan.shrinkage.dtype == F32


class TestShapes:
    def test_broadcasting(self):
        """Probabilities shared by query rows, and rows in several axes, make no difference."""
        weights, _, _, _ = make_rows("heavy_tailed", 12, 600)
        weights = weights.view(2, 2, 3, 600)
        _, r, residual, _ = make_rows("some_certain", 2, 600, seed=1)
        r, residual = r.view(2, 1, 1, 600), residual.view(2, 1, 1, 600)
        denominator = weights.sum(-1) * 1.5
        full = [tensor.expand(weights.shape).contiguous().view(12, 600) for tensor in (weights, r, residual)]
        expected = compiled_plan(*full, denominator.view(12), 0.05, DELTA)
        for mask in (residual, residual.expand(weights.shape)):
            plan = compiled_plan(weights, r, mask, denominator, 0.05, DELTA)
            assert plan.promoted.shape == plan.shrinkage.shape == weights.shape
            assert plan.n_promoted.shape == plan.error_bound.shape == plan.planned_bound.shape == (2, 2, 3)
            assert torch.equal(plan.promoted.view(12, 600), expected.promoted)
            assert torch.equal(plan.shrinkage.view(12, 600), expected.shrinkage)
            assert torch.equal(plan.planned_bound.view(12), expected.planned_bound)

    def test_strided_weights_and_one_probability_for_all(self):
        weights, _, _, denominator = make_rows("peaked", 5, 300)
        r = torch.tensor(0.25, dtype=F64)
        expected = compiled_plan(weights, r.expand(5, 300).contiguous(), weights > -1, denominator, 0.05, DELTA)
        plan = compiled_plan(weights.mT.contiguous().mT, r, torch.tensor(True), denominator, 0.05, DELTA)
        assert torch.equal(plan.promoted, expected.promoted)

    @pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 5)])
    def test_no_tokens_or_no_rows(self, shape):
        ones = torch.ones(shape)
        plan = compiled_plan(ones, ones, ones.bool(), torch.ones(shape[:-1]), 0.1, 0.1)
        assert plan.promoted.shape == shape
        assert plan.n_promoted.shape == shape[:-1]
        assert not bool(plan.n_promoted.any())

    def test_inputs_are_left_alone(self):
        rows = make_rows("peaked", 4, 300)
        shrinkage = optimal_shrinkage(*rows[:3])
        before = [tensor.clone() for tensor in (*rows, shrinkage)]
        compiled_plan(*rows, 0.05, DELTA)
        compiled_plan(*rows, 0.05, DELTA, shrinkage)
        assert all(torch.equal(now, then) for now, then in zip((*rows, shrinkage), before, strict=True))


class TestBadInput:
    @pytest.mark.parametrize("dtype", [F32, F64])
    @pytest.mark.parametrize("bad", ["nan_weight", "inf_weight", "zero_denominator", "nan_denominator"])
    def test_no_certificate_promotes_everything(self, bad, dtype):
        weights, r, residual, denominator = make_rows("some_certain", 3, 700, dtype=dtype)
        expected = compiled_plan(weights, r, residual, denominator, 0.05, DELTA)
        at = int(residual[1].nonzero()[0])
        if bad == "nan_weight":
            weights[1, at] = -torch.nan
        elif bad == "inf_weight":
            weights[1, at] = torch.inf
        else:
            denominator[1] = 0.0 if bad == "zero_denominator" else torch.nan
        plan = compiled_plan(weights, r, residual, denominator, 0.05, DELTA)
        assert torch.equal(plan.promoted[1], residual[1])
        assert int(plan.n_promoted[1]) == int(residual[1].sum())
        assert not bool(plan.error_bound[1].isfinite())
        assert float(plan.planned_bound[1]) == 0.0
        assert torch.equal(plan.promoted[::2], expected.promoted[::2])

    def test_a_weight_whose_square_float32_cannot_hold(self):
        rows = make_rows("peaked", 2, 200, dtype=F32)
        rows[0][1, 20] = torch.finfo(F32).max
        plan = compiled_plan(*rows, 0.05, DELTA)
        assert bool(plan.promoted[1, 20])
        assert bool((exact_bound(*rows, plan.shrinkage, plan.promoted) < 0.05).all())

    @pytest.mark.parametrize("epsilon", [0.0, -1.0, float("nan"), float("inf"), torch.tensor([0.1, 0.0])])
    def test_epsilon(self, epsilon):
        with pytest.raises(ValueError, match="epsilon must be"):
            compiled_plan(*make_rows("peaked", 2, 20), epsilon, DELTA)

    @pytest.mark.parametrize(("delta", "upper_share"), [(0.0, None), (1.0, None), (0.1, 0.0), (0.1, 1.0)])
    def test_delta_and_its_parts(self, delta, upper_share):
        with pytest.raises(ValueError, match=r"(delta|upper_share) must be in \(0, 1\)"):
            compiled_plan(*make_rows("peaked", 2, 20), 0.1, delta, upper_share=upper_share)


class TestChoice:
    @pytest.fixture(autouse=True)
    def _look_again(self, monkeypatch):
        for name in loops.MODULES:
            monkeypatch.delattr(loops, name, raising=False)
            monkeypatch.delitem(sys.modules, f"verkv.loops.{name}", raising=False)
        loops.load.cache_clear()
        yield
        loops.load.cache_clear()

    @pytest.mark.parametrize(("setting", "expected"), [("", True), ("1", True), ("0", False)])
    def test_environment(self, monkeypatch, setting, expected):
        monkeypatch.setenv("VERKV_COMPILED", setting)
        assert compiles() is expected

    def test_odd_environment_is_refused(self, monkeypatch):
        monkeypatch.setenv("VERKV_COMPILED", "yes")
        with pytest.raises(ValueError, match="VERKV_COMPILED must be 0"):
            compiles()

    def test_without_numba(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "numba", None)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert not compiles()
        with pytest.raises(ModuleNotFoundError, match=r"pip install 'verkv\[compiled\]'"):
            compiled_plan(*make_rows("peaked", 2, 20), 0.1, DELTA)

    def test_numba_that_does_not_compile(self, monkeypatch):
        import numba

        monkeypatch.setattr(numba.config, "DISABLE_JIT", 1)
        assert not compiles()

    @pytest.mark.parametrize(
        "error",
        [
            ImportError("Numba needs NumPy 2.3 or less"),
            ModuleNotFoundError("no llvmlite", name="llvmlite"),
        ],
        ids=["numpy", "llvmlite"],
    )
    def test_numba_that_cannot_be_imported_is_named_once(self, monkeypatch, error):
        known = builtins.__import__

        def importing(name, *args):
            if name == "numba":
                raise error
            return known(name, *args)

        monkeypatch.setattr(builtins, "__import__", importing)
        with pytest.warns(UserWarning, match=rf"cannot be used \({error}\)"):
            assert not compiles()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert not compiles()

    def test_a_system_without_a_folder_for_the_cache(self, monkeypatch):
        import numba

        njit = numba.njit

        def without_folder(cache=False, **options):
            if cache:
                raise RuntimeError("cannot cache function: no locator available")
            return njit(**options)

        monkeypatch.setattr(numba, "njit", without_folder)
        assert loops.compiled(lambda x: x + 1)(2) == 3

    def test_what_is_on_disk_may_be_damaged(self, monkeypatch):
        """All loops are then compiled for this process, once, and the plan is made."""
        monkeypatch.setattr(loops, "_keeps_compiled", True)
        rows = make_rows("peaked", 2, 100)
        expected = compiled_plan(*rows, 0.05, DELTA)

        def damaged(*arguments):
            raise EOFError("Ran out of input")

        sys.modules["verkv.loops.plan"].plan_rows = damaged
        with pytest.warns(UserWarning, match=r"could not be read or kept \(EOFError: Ran out of input\)"):
            plan = compiled_plan(*rows, 0.05, DELTA)
        assert torch.equal(plan.promoted, expected.promoted)
        sys.modules["verkv.loops.plan"].plan_rows = damaged
        with pytest.raises(EOFError):
            compiled_plan(*rows, 0.05, DELTA)
