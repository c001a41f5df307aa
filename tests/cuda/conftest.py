"""The kernels' tests: helpers on the path, and CPU tensors in the place of a device's."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def on_emulator(monkeypatch):
    """Kernels run on the CPU, on CPU tensors; returns the names of those that ran."""
    from emulator import emulator

    from verkv.cuda import launch, operators

    ran = []

    def run(names, sizes, arrays, scalars, dtype):
        params = operators.kernel_params(sizes, arrays, scalars)
        for name in names:
            emulator(sizes.head_dim, sizes.tile, dtype == torch.float16).launch(name, sizes, params)
        ran.extend(names)

    monkeypatch.setattr(operators, "run_kernels", run)
    for module in (operators, launch):
        monkeypatch.setattr(module, "n_multiprocessors", lambda device: 4)
    monkeypatch.setattr(launch, "_check_device", lambda device: None)
    monkeypatch.setattr(launch, "_check_pinned", lambda tensor, name: None)
    return ran


@pytest.fixture
def emulated_device(monkeypatch, on_emulator):
    """Sealed contexts of CPU tensors go through the kernels, on the emulator; returns the names of those that ran."""
    from verkv import device_step
    from verkv.cuda import dispatch

    ask = dispatch.select_backend
    monkeypatch.setattr(dispatch, "unavailable_because", lambda index: "")
    monkeypatch.setattr(dispatch, "select_backend", lambda device, **facts: ask(torch.device("cuda", 0), **facts))
    monkeypatch.setattr(dispatch, "can_launch", lambda device, *shape: True)
    monkeypatch.setattr(device_step, "_is_gpu", lambda device: True)
    monkeypatch.setattr(device_step, "_is_pinned", lambda host: True)
    monkeypatch.delenv("VERKV_CUDA", raising=False)
    dispatch._warn_once.cache_clear()
    yield on_emulator
    dispatch._warn_once.cache_clear()
