"""KVFetch on CUDA devices: one file of kernels, compiled by NVRTC at first use.

Importing this package loads neither the kernels nor the CUDA bindings, and works where there is no GPU.
"""

from importlib import import_module

_PUBLIC = {
    "CudaUnavailable": "build",
    "is_available": "dispatch",
    "select_backend": "dispatch",
    "warmup": "dispatch",
    "DeviceLayer": "launch",
    "DevicePlan": "launch",
    "attend": "launch",
    "plan_logits": "launch",
    "plan_rope_pair": "launch",
    "rope_pair_tensors": "launch",
    "unpack_bits": "launch",
}

__all__ = sorted(_PUBLIC)


def __getattr__(name: str):
    if name in _PUBLIC:
        return getattr(import_module(f"{__name__}.{_PUBLIC[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_PUBLIC])
