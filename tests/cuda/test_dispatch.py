"""Which implementation serves a layer, and that a machine without CUDA is told nothing and changes nothing."""

import subprocess
import sys
import warnings

import pytest
import torch

import verkv.cuda
from verkv.cuda import build, dispatch, selfcheck
from verkv.cuda.build import CudaUnavailable

GPU = torch.device("cuda", 0)
SHAPE = {"key_dim": 128, "value_dim": 128, "dtype": torch.bfloat16, "n_tokens": 1000}


@pytest.fixture
def usable_gpu(monkeypatch):
    """As if there were a device that the kernels can run on."""
    monkeypatch.setattr(dispatch, "unavailable_because", lambda index: "")
    monkeypatch.delenv("VERKV_CUDA", raising=False)
    dispatch._warn_once.cache_clear()


def test_import_loads_nothing():
    """Neither torch, nor the bindings, nor a kernel; and it needs no transformers."""
    unwanted = "('torch', 'cuda', 'transformers')"
    code = f"import sys, verkv.cuda, verkv.cuda.layout; print([name for name in {unwanted} if name in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_public_names_resolve():
    for name in verkv.cuda.__all__:
        assert getattr(verkv.cuda, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        verkv.cuda.nothing  # noqa: B018


@pytest.mark.parametrize("setting", [None, "0", "1"])
def test_cpu_layers_are_served_by_torch_silently(monkeypatch, setting):
    if setting is not None:
        monkeypatch.setenv("VERKV_CUDA", setting)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert dispatch.select_backend(torch.device("cpu"), **SHAPE) == "torch"


def test_kernels_serve_what_they_can(usable_gpu, monkeypatch):
    assert dispatch.select_backend(GPU, **SHAPE) == "cuda"
    monkeypatch.setenv("VERKV_CUDA", "1")
    assert dispatch.select_backend(GPU, **SHAPE) == "cuda"


def test_environment_forces_torch(usable_gpu, monkeypatch):
    monkeypatch.setenv("VERKV_CUDA", "0")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert dispatch.select_backend(GPU, **SHAPE) == "torch"


def test_odd_environment_is_refused(monkeypatch):
    monkeypatch.setenv("VERKV_CUDA", "off")
    with pytest.raises(ValueError, match="VERKV_CUDA must be 0"):
        dispatch.select_backend(GPU, **SHAPE)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"key_dim": 96, "value_dim": 96}, "got 96 for keys"),
        ({"value_dim": 64}, "64 for values"),
        ({"dtype": torch.float32}, "torch.float32"),
        ({"n_tokens": 2**31}, "is longer than"),
        ({"n_units": 70000}, "more than 65535"),
        ({"shrinkage": "optimal"}, "'optimal'"),
        ({"target": "output"}, "not the output"),
        ({"key_rounds": 2}, "key_rounds=2"),
        ({"n_segments": 2}, "several segments"),
        ({"is_coded": True}, "coded"),
        ({"is_whole": False}, "beginning of a longer"),
        ({"is_pinned": False}, "pinned"),
    ],
)
def test_what_kernels_cannot_serve_falls_back_with_one_warning(usable_gpu, change, message):
    with pytest.warns(UserWarning, match=message) as caught:
        for _ in range(3):
            assert dispatch.select_backend(GPU, **SHAPE | change) == "torch"
    assert len(caught) == 1


def test_the_device_is_asked_first(usable_gpu, monkeypatch):
    """Where no kernel could run at all, nobody is told to change an option."""
    monkeypatch.setattr(dispatch, "unavailable_because", lambda index: "the device is too old (of this test)")
    with pytest.warns(UserWarning, match="too old") as caught:
        assert dispatch.select_backend(GPU, **SHAPE, target="output", is_pinned=False) == "torch"
    assert len(caught) == 1


def test_kernels_of_a_pass_are_loaded_once(usable_gpu, monkeypatch):
    loaded = []
    monkeypatch.setattr(dispatch, "load_kernels", lambda *shape: loaded.append(shape))
    monkeypatch.setattr(selfcheck, "unfit_because", lambda *shape: "")
    dispatch._unloaded_because.cache_clear()
    for n_rows in (4, 4, 9):
        assert dispatch.can_launch(GPU, 128, n_rows, torch.float16)
    dispatch._unloaded_because.cache_clear()
    assert loaded == [(0, 128, 4, True), (0, 128, 5, True)]


def test_kernels_that_do_not_compile_are_tried_once(usable_gpu, monkeypatch):
    tried = []

    def refuse(*shape):
        tried.append(shape)
        raise CudaUnavailable("NVRTC cannot compile (of this test)")

    monkeypatch.setattr(dispatch, "load_kernels", refuse)
    dispatch._unloaded_because.cache_clear()
    with pytest.warns(UserWarning, match="of this test") as caught:
        assert not any(dispatch.can_launch(GPU, 128, 4, torch.bfloat16) for _ in range(3))
    dispatch._unloaded_because.cache_clear()
    assert len(caught) == 1 and tried == [(0, 128, 4, False)]


@pytest.mark.parametrize("which", ["driver_bindings", "nvrtc_bindings"])
def test_missing_driver_or_nvrtc_falls_back_with_one_warning(monkeypatch, which):
    def missing():
        raise CudaUnavailable("cuda.bindings is missing (of this test)")

    monkeypatch.delenv("VERKV_CUDA", raising=False)
    monkeypatch.setattr(dispatch, which, missing)
    if which == "driver_bindings":
        monkeypatch.setattr(dispatch, "nvrtc_bindings", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    dispatch.unavailable_because.cache_clear()
    dispatch._warn_once.cache_clear()
    with pytest.warns(UserWarning, match="of this test") as caught:
        for _ in range(3):
            assert dispatch.select_backend(GPU, **SHAPE) == "torch"
    assert len(caught) == 1
    dispatch.unavailable_because.cache_clear()


def test_device_that_cannot_read_registered_memory_falls_back(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    monkeypatch.setattr(dispatch, "nvrtc_bindings", lambda: None)
    monkeypatch.setattr(dispatch, "_reads_registered_memory", lambda index: False)
    dispatch.unavailable_because.cache_clear()
    assert "registered host memory" in dispatch.unavailable_because(0)
    dispatch.unavailable_because.cache_clear()


def test_old_device_falls_back(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (7, 5))
    dispatch.unavailable_because.cache_clear()
    assert "compute capability 8.0" in dispatch.unavailable_because(0)
    dispatch.unavailable_because.cache_clear()


def test_missing_bindings_are_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.bindings.nvrtc", None)
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(CudaUnavailable, match=r"cuda\.bindings is missing"):
        build.nvrtc_bindings()


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a CUDA device")
def test_warmup_and_is_available_without_a_device():
    assert verkv.cuda.is_available() is False
    with pytest.raises(CudaUnavailable, match="no CUDA device"):
        verkv.cuda.warmup()
