"""The one place where kernels or torch are chosen."""

import functools
import os
import warnings

import torch

from verkv.cuda.build import MIN_CAPABILITY, CudaUnavailable, check, driver_bindings, load_kernels, nvrtc_bindings
from verkv.cuda.layout import HEAD_DIMS, MAX_TOKENS, tile_of

DTYPES = (torch.bfloat16, torch.float16)


def is_available() -> bool:
    """Whether there are a CUDA device, its driver and NVRTC; ``VERKV_CUDA=0`` does not matter here.

    Returns
    -------
    bool
    """
    return torch.cuda.is_available() and not unavailable_because(torch.cuda.current_device())


def warmup(
    head_dim: int = 128, n_rows: int = 4, dtype: torch.dtype = torch.bfloat16, device: int | None = None
) -> None:
    """Compile and load the kernels of one shape now, instead of at the first sealed layer.

    Parameters
    ----------
    head_dim : {64, 128, 256}
    n_rows : int
        Query rows of a KV head: query heads per KV head in a decode step, times the tokens of a longer pass.
    dtype : torch.bfloat16 or torch.float16
        Of keys and values.
    device : int, optional
        The current CUDA device by default.

    Raises
    ------
    CudaUnavailable
        If there is no device, driver or NVRTC, or the shape is not supported.
    """
    if not torch.cuda.is_available():
        raise CudaUnavailable("torch sees no CUDA device")
    index = torch.cuda.current_device() if device is None else device
    if reason := unavailable_because(index) or unsupported_because(head_dim, head_dim, dtype, 1):
        raise CudaUnavailable(reason)
    load_kernels(index, head_dim, tile_of(n_rows), dtype == torch.float16)


def select_backend(
    device: torch.device,
    *,
    key_dim: int,
    value_dim: int,
    dtype: torch.dtype,
    n_tokens: int,
    shrinkage: str = "binary",
    is_pinned: bool = True,
) -> str:
    """Which implementation serves a sealed layer.

    Where the kernels would be used but cannot, says why in one warning per reason, and torch serves the layer.

    Parameters
    ----------
    device : torch.device
        Of the layer's rows.
    key_dim, value_dim : int
        Head dims.
    dtype : torch.dtype
        Of keys and values.
    n_tokens : int
        Length of the context.
    shrinkage : {"binary", "optimal"}
        The kernels have the first.
    is_pinned : bool
        Whether the host's copy is in pinned memory, which alone a kernel can read.

    Returns
    -------
    {"cuda", "torch"}

    Raises
    ------
    ValueError
        If the environment variable ``VERKV_CUDA`` is neither 0 nor 1.
    """
    wanted = os.environ.get("VERKV_CUDA", "") or "1"
    if wanted not in ("0", "1"):
        raise ValueError(f"VERKV_CUDA must be 0 (torch only) or 1, got {wanted!r}")
    if wanted == "0" or device.type != "cuda":
        return "torch"
    reason = unavailable_because(torch.cuda.current_device() if device.index is None else device.index)
    reason = reason or unsupported_because(key_dim, value_dim, dtype, n_tokens)
    if not reason and shrinkage != "binary":
        reason = f"they have binary shrinkage only, not {shrinkage!r}"
    if not reason and not is_pinned:
        reason = "the context is not in pinned host memory"
    if not reason:
        return "cuda"
    _warn_once(f"VerKV's CUDA kernels are not used: {reason}. torch serves these layers, more slowly")
    return "torch"


@functools.cache
def unavailable_because(device_index: int) -> str:
    """Why no kernel can run on a CUDA device; empty if they can."""
    if torch.version.hip:
        return "they are for NVIDIA devices"
    capability = torch.cuda.get_device_capability(device_index)
    if capability < MIN_CAPABILITY:
        return f"they need compute capability {MIN_CAPABILITY[0]}.{MIN_CAPABILITY[1]}, the device has {capability}"
    try:
        nvrtc_bindings()
        if not _reads_registered_memory(device_index):
            return "the device cannot read registered host memory at its address on the host"
    except CudaUnavailable as error:
        return str(error)
    return ""


def _reads_registered_memory(device_index: int) -> bool:
    """Whether a kernel may use the host's pointers to pinned memory, however that was pinned."""
    driver = driver_bindings()
    attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM
    device = check(driver, driver.cuDeviceGet(device_index))
    return bool(check(driver, driver.cuDeviceGetAttribute(attribute, device)))


def unsupported_because(key_dim: int, value_dim: int, dtype: torch.dtype, n_tokens: int) -> str:
    """Why a layer's shape cannot be served by the kernels; empty if it can. Groups of any size can."""
    if key_dim not in HEAD_DIMS or value_dim != key_dim:
        return f"head dims must be equal and one of {HEAD_DIMS}, got {key_dim} for keys and {value_dim} for values"
    if dtype not in DTYPES:
        return f"keys and values must be bfloat16 or float16, got {dtype}"
    if n_tokens > MAX_TOKENS:
        return f"a context of {n_tokens} tokens is longer than {MAX_TOKENS}"
    return ""


@functools.cache
def _warn_once(message: str) -> None:
    warnings.warn(message, stacklevel=3)
