"""The plan by compiled loops against the sorting reference in float64, and against the float64 bound in float32."""

import builtins
import functools
import sys
import warnings

import pytest
import torch
from plan_rows import DELTA, F32, F64, KINDS, assert_same_plan, exact_bound, make_rows, reference

from verkv import loops
from verkv.estimators import linear_plan
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
