"""Kernels prove themselves before they serve: true ones pass, broken ones are caught, and torch serves then.

The emulator takes the kernels' place. Broken kernels are true ones whose results are changed as soon as they are there.
"""

import gc
import math
import re
import warnings
import weakref

import pytest
import torch
from agreement import needs_compiler
from problems import make_layer
from test_step import GROUP, by_torch, inputs, sealed, twin

from verkv import device_step
from verkv.cuda import CudaUnavailable, dispatch, operators, selfcheck, warmup
from verkv.cuda.layout import tile_of

pytestmark = needs_compiler
CAN_LAUNCH = dispatch.can_launch
SHAPE = (64, GROUP, torch.bfloat16)
CPU = torch.device("cpu")


def forget():
    selfcheck._failures.clear()
    selfcheck._found_once.cache_clear()
    dispatch._unloaded_because.cache_clear()


@pytest.fixture
def device(emulated_device, monkeypatch):
    """The emulator, with nothing loaded or checked yet; returns the names of the kernels that ran."""
    monkeypatch.setattr(dispatch, "can_launch", CAN_LAUNCH)
    monkeypatch.setattr(dispatch, "load_kernels", lambda *shape: {})
    monkeypatch.setattr(selfcheck, "_device", lambda index: CPU)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    forget()
    yield emulated_device
    forget()


@pytest.fixture
def break_kernel(device, monkeypatch):
    """Changes what a kernel has written, or before it runs what it is told."""

    def breaks(name, change, scalar=False):
        run = operators.run_kernels

        def broken(names, sizes, arrays, scalars, dtype):
            for own in names:
                if own == name and scalar:
                    change(scalars)
                run((own,), sizes, arrays, scalars, dtype)
                if own == name and not scalar:
                    change(arrays)

        monkeypatch.setattr(operators, "run_kernels", broken)

    return breaks


def first_disagreement(head_dim=64, tile=GROUP, dtype=torch.bfloat16) -> str:
    return next(selfcheck.disagreements(CPU, head_dim, tile, dtype), "")


# --- what it finds --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("head_dim", "tile"), [(64, 3), (64, 5), (128, 3), (256, 3)])
def test_true_kernels_pass(device, head_dim, tile, dtype):
    assert list(selfcheck.disagreements(CPU, head_dim, tile, dtype)) == []
    assert set(device) >= {"vk_score", "vk_shortlist", "vk_peak", "vk_plan", "vk_emit", "vk_settle", "vk_attend"}
    assert ("vk_gather" in device) == (tile == 5)  # smaller tiles are of passes that have one


def forget_a_promoted_token(arrays):
    word = arrays["mask"][0].nonzero()[0, 0]
    arrays["mask"][0, word] &= arrays["mask"][0, word] - 1


def promote_one_more(arrays):
    arrays["mask"][0, -1] |= 1


def fetch_another_row(arrays):
    arrays["fetch_positions"][0, 0] += 1


def change(name, work):
    return lambda arrays: arrays.__setitem__(name, arrays[name].copy_(work(arrays[name])))


BROKEN = {
    "score": ("vk_score", change("logits", lambda x: x * 1.001), "certificate"),
    "shortlist": ("vk_shortlist", change("n_read", lambda x: x + 1), "the shortlist"),
    "shrinkage": ("vk_settle", change("shrunk", torch.zeros_like), "shrinkage"),
    "certificate": ("vk_settle", change("bound", lambda x: x * 0.999), "certificate"),
    "k": ("vk_settle", change("n_promoted", lambda x: x - 1), "number of promoted"),
    "row_fetched": ("vk_settle", change("n_row_fetched", lambda x: x + 9), "a row fetches"),
    "forgotten": ("vk_settle", forget_a_promoted_token, "promoted tokens"),
    "one_more": ("vk_settle", promote_one_more, "promoted tokens"),
    "dropped_row": ("vk_settle", change("n_fetched", lambda x: x - 1), "list of rows"),
    "other_row": ("vk_settle", fetch_another_row, "list of rows"),
    "exact": ("vk_settle", change("is_exact", torch.ones_like), "whether all"),
    "output": ("vk_attend", change("output", lambda x: x * 1.01), "attention, with an error of 1.0e-02"),
    "nan": ("vk_attend", change("output", lambda x: x.index_fill(1, torch.tensor([1]), math.nan)), "attention"),
    "denominator": ("vk_attend", change("lse", lambda x: x + 0.01), "denominator"),
    "counters": ("vk_attend", change("tickets", torch.ones_like), "counters"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_results_are_caught(break_kernel, name):
    kernel, change, what = BROKEN[name]
    break_kernel(kernel, change)
    found = first_disagreement()
    assert re.search(rf"^300 tokens, plan_rope_pair\(paper=False, upper_share=None\): .*{what}", found), found


TOLD = {
    "looser": ("vk_plan", {"epsilon": 0.055}, "paper=False, upper_share=None): promoted tokens, which leave a bound"),
    "not_sided": ("vk_plan", {"log_upper": 0.0}, "paper=False, upper_share=0.7): the certificate"),
    "blind": ("vk_score", {"known_resident": 0}, "paper=True, upper_share=None): the certificate"),
}


@pytest.mark.parametrize("name", TOLD)
def test_other_plans_are_caught(break_kernel, name):
    kernel, told, what = TOLD[name]
    break_kernel(kernel, lambda scalars: scalars.update(told), scalar=True)
    assert first_disagreement().startswith(f"300 tokens, plan_rope_pair({what}")


def test_a_kernel_that_writes_nothing_is_caught(device, monkeypatch):
    monkeypatch.setattr(operators, "run_kernels", lambda *given: None)
    assert first_disagreement()


def test_second_tile_is_checked(break_kernel, monkeypatch):
    """The rows that it copies to the device, and all rows of queries."""
    monkeypatch.setattr(selfcheck, "LENGTHS", (300,))
    break_kernel("vk_gather", change("staged_values", torch.zeros_like))
    assert "attention" in first_disagreement(tile=5)
    assert not first_disagreement(tile=3)


def test_problems_are_of_every_kind():
    """Certain, drawn, not drawn and absent tokens; and no choice of a shortlist hangs on rounding."""
    for head_dim in (64, 128, 256):
        for tile in (1, 4, 8):
            for problem in selfcheck._problems(head_dim, tile, torch.bfloat16):
                levels, resident = problem.levels, problem.resident
                assert problem.query.shape[1] in (tile, 15) and tile_of(problem.query.shape[1]) == tile
                for kind in (problem.codes == 0, (levels > 0) & resident, (levels > 0) & ~resident):
                    assert kind.sum() > 20
                assert ((levels == 0) & resident).any(1).all() and resident[problem.codes > 0].float().mean() < 0.5
                best = problem.sketch.logits(problem.query[None])[0].amax(1) * problem.scaling
                for paper, candidates in ((False, levels > 0), (True, (levels > 0) & ~resident)):
                    listed = problem.planning_logits(paper)[1]
                    n_listed = listed.sum(-1)
                    assert (n_listed == n_listed[0]).all() and n_listed[0] in selfcheck.SHORTLISTS
                    least = best.masked_fill(~listed, torch.inf).amin(-1)
                    assert (least - best.masked_fill(listed | ~candidates, -torch.inf).amax(-1) > 5e-3).all()


# --- what follows ---------------------------------------------------------------------------------------------------


def test_runs_once_for_each_shape(device, monkeypatch):
    monkeypatch.setattr(selfcheck, "LENGTHS", (300,))
    assert selfcheck.unfit_because(0, *SHAPE) == ""
    n_ran = len(device)
    assert n_ran and selfcheck.unfit_because(0, *SHAPE) == "" and len(device) == n_ran
    selfcheck.unfit_because(0, 64, GROUP, torch.float16)
    assert len(device) == 2 * n_ran
    selfcheck.unfit_because(1, *SHAPE)
    assert len(device) == 3 * n_ran


def test_leaves_no_trace(device, monkeypatch):
    """Random state, defaults and tensors; and it does not mind another default dtype or device, or autocast."""
    kept, make = [], selfcheck._make_problem

    def made(*given):
        problem = make(*given)
        kept.extend(weakref.ref(x) for x in (problem, problem.keys, problem.codes))
        return problem

    monkeypatch.setattr(selfcheck, "_make_problem", made)
    state = torch.get_rng_state()
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    try:
        with torch.autocast("cpu", torch.bfloat16):
            assert selfcheck.unfit_because(0, *SHAPE) == ""
        assert torch.get_default_dtype() == torch.float64 and torch.empty(0).is_meta
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)
    assert torch.equal(torch.get_rng_state(), state) and torch.is_grad_enabled()
    gc.collect()
    assert len(kept) == 9 and not any(tensor() is not None for tensor in kept)


@pytest.mark.parametrize("stop", [RuntimeError, ValueError, CudaUnavailable])
def test_an_error_is_a_reason(break_kernel, stop):
    def fail(arrays):
        raise stop("CUDA error: an illegal memory access\nCompile with TORCH_USE_CUDA_DSA")

    break_kernel("vk_emit", fail)
    reason = selfcheck.unfit_because(0, *SHAPE)
    assert f"{stop.__name__}: CUDA error: an illegal memory access)" in reason and "\n" not in reason
    assert "Please report this" in reason and "head dim 64, 3 query rows and torch.bfloat16" in reason


def test_a_device_that_failed_is_asked_no_more(device, break_kernel):
    assert selfcheck.unfit_because(0, 64, GROUP, torch.float16) == ""
    break_kernel("vk_attend", change("output", lambda x: x * 1.01))
    reason = selfcheck.unfit_because(0, *SHAPE)
    n_ran = len(device)
    assert reason and selfcheck.unfit_because(0, 128, 5, torch.float16) == reason
    assert selfcheck.unfit_because(0, 64, GROUP, torch.float16) == reason  # it had passed
    assert len(device) == n_ran


def test_contexts_are_checked_before_their_first_pass(device):
    layer = make_layer(300, GROUP, 64, sharpness=0.6, seed=3)
    context = sealed(layer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        context.attend(*inputs(layer), None, 0.125)
        n_ran = len(device)
        context.attend(*inputs(layer, seed=1), None, 0.125)
    served = ["vk_score", "vk_shortlist", "vk_plan", "vk_emit", "vk_settle", "vk_attend"]
    assert n_ran > 2 * len(served) and device[n_ran:] == served


def test_torch_serves_where_the_kernels_failed(device, break_kernel, monkeypatch):
    break_kernel("vk_attend", change("output", lambda x: x * 1.01))
    layer = make_layer(300, GROUP, 64, sharpness=0.6, seed=3)
    context = sealed(layer)
    other = twin(context)
    with pytest.warns(UserWarning, match=r"not used: .*attention, with an error .*Please report") as caught:
        output = context.attend(*inputs(layer), None, 0.125)
        n_ran = len(device)
        for n_queries in (2, 4):  # passes of other shapes, and another context
            context.attend(*inputs(layer, n_queries=n_queries), None, 0.125)
        sealed(layer, paper=True).attend(*inputs(layer), None, 0.125)
    assert len(caught) == 1 and n_ran and len(device) == n_ran
    assert "row_positions" not in context.memory()["device_uncharged"]  # nor is anything kept for the kernels
    with by_torch(monkeypatch):
        assert torch.equal(output, other.attend(*inputs(layer), None, 0.125))
    assert context.stats.passes[0][0].fetched == other.stats.passes[0][0].fetched > 0


def test_environment_skips_it(device, monkeypatch):
    monkeypatch.setattr(selfcheck, "unfit_because", None)
    layer = make_layer(300, GROUP, 64, sharpness=0.6, seed=3)
    with by_torch(monkeypatch):
        sealed(layer).attend(*inputs(layer), None, 0.125)
    assert not device


def test_cpu_contexts_are_not_checked(device, monkeypatch):
    monkeypatch.setattr(device_step, "_is_gpu", lambda device: device.type == "cuda")
    layer = make_layer(300, GROUP, 64, sharpness=0.6, seed=3)
    sealed(layer).attend(*inputs(layer), None, 0.125)
    assert not device


def test_warmup_checks(device, break_kernel, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    warmup(64, GROUP)
    assert device
    forget()
    break_kernel("vk_attend", change("output", lambda x: x * 1.01))
    monkeypatch.setenv("VERKV_CUDA", "0")
    warmup(64, GROUP)
    monkeypatch.setenv("VERKV_CUDA", "1")
    with pytest.raises(CudaUnavailable, match=r"failed their self-check .*attention, with an error"):
        warmup(64, GROUP)
