"""The one place where kernels or torch are chosen."""

import functools
import warnings

import torch

from verkv.checks import is_switched_on
from verkv.cuda.build import MIN_CAPABILITY, CudaUnavailable, check, driver_bindings, load_kernels, nvrtc_bindings
from verkv.cuda.layout import HEAD_DIMS, MAX_GRID_Y, MAX_TOKENS, tile_of

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
    """Compile, load and check the kernels of one shape now, instead of at the first sealed layer.

    With ``VERKV_CUDA=0`` they are not checked.

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
        If there is no device, driver or NVRTC, if the shape is not supported, or if the kernels' answers on the device
        are not those of the estimators.
    ValueError
        If the environment variable ``VERKV_CUDA`` is neither 0 nor 1.
    """
    is_checked = is_switched_on("VERKV_CUDA")
    if not torch.cuda.is_available():
        raise CudaUnavailable("torch sees no CUDA device")
    index = torch.cuda.current_device() if device is None else device
    if reason := unavailable_because(index) or unsupported_because(head_dim, head_dim, dtype, 1):
        raise CudaUnavailable(reason)
    tile = tile_of(n_rows)
    load_kernels(index, head_dim, tile, dtype == torch.float16)
    if is_checked and (reason := _unfit_because(index, head_dim, tile, dtype)):
        raise CudaUnavailable(f"the kernels are not used: {reason}")


def select_backend(
    device: torch.device,
    *,
    key_dim: int,
    value_dim: int,
    dtype: torch.dtype,
    n_tokens: int,
    n_units: int = 1,
    shrinkage: str = "binary",
    target: str = "denominator",
    key_rounds: int = 0,
    n_segments: int = 1,
    is_coded: bool = False,
    is_whole: bool = True,
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
    n_units : int
        KV heads of all contexts of the batch.
    shrinkage : {"binary", "optimal"}
        The kernels have the first.
    target : {"denominator", "output"}
        What the plan bounds; the kernels bound the first.
    key_rounds : int
        How often the plan is made again with promoted keys; the kernels plan once.
    n_segments : int
        Stretches of tokens, each in host memory of its own; the kernels read one.
    is_coded : bool
        Whether the host keeps coded rows, which a kernel cannot read in place.
    is_whole : bool
        Whether the host's copy is contiguous: not the beginning of a longer one.
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
    if not is_switched_on("VERKV_CUDA") or device.type != "cuda":
        return "torch"
    reason = (
        unavailable_because(_index(device))
        or unsupported_because(key_dim, value_dim, dtype, n_tokens, n_units)
        or _unplanned_because(shrinkage, target, key_rounds)
        or _unreadable_because(n_segments, is_coded, is_whole, is_pinned)
    )
    if not reason:
        return "cuda"
    warn_once(reason)
    return "torch"


def warn_once(reason: str) -> None:
    """Say why torch serves what the kernels would be expected to; once a process for each reason."""
    _warn_once(f"VerKV's CUDA kernels are not used: {reason}. torch serves these layers, more slowly")


def can_launch(device: torch.device, head_dim: int, n_rows: int, dtype: torch.dtype) -> bool:
    """Whether the kernels of a pass are compiled, loaded and checked, all of it here at their first use; warns if not.

    Parameters
    ----------
    device : torch.device
    head_dim : int
    n_rows : int
        Query rows of a KV head in the pass.
    dtype : torch.dtype
        Of keys and values.

    Returns
    -------
    bool
    """
    index, tile = _index(device), tile_of(n_rows)
    reason = _unloaded_because(index, head_dim, tile, dtype == torch.float16)
    if reason := reason or _unfit_because(index, head_dim, tile, dtype):
        warn_once(reason)
    return not reason


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


@functools.cache  # a failure, too: compiling again at every layer of every step would take seconds each
def _unloaded_because(device_index: int, head_dim: int, tile: int, fp16: bool) -> str:
    try:
        load_kernels(device_index, head_dim, tile, fp16)
    except CudaUnavailable as error:
        return str(error)
    return ""


def _unfit_because(device_index: int, head_dim: int, tile: int, dtype: torch.dtype) -> str:
    from verkv.cuda import selfcheck  # it launches kernels, and what launches them asks this module

    return selfcheck.unfit_because(device_index, head_dim, tile, dtype)


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


def unsupported_because(key_dim: int, value_dim: int, dtype: torch.dtype, n_tokens: int, n_units: int = 1) -> str:
    """Why a layer's shape cannot be served by the kernels; empty if it can. Groups of any size can."""
    if key_dim not in HEAD_DIMS or value_dim != key_dim:
        return f"head dims must be equal and one of {HEAD_DIMS}, got {key_dim} for keys and {value_dim} for values"
    if dtype not in DTYPES:
        return f"keys and values must be bfloat16 or float16, got {dtype}"
    if n_tokens > MAX_TOKENS:
        return f"a context of {n_tokens} tokens is longer than {MAX_TOKENS}"
    if n_units > MAX_GRID_Y:
        return f"a batch with {n_units} KV heads in all has more than {MAX_GRID_Y}"
    return ""


def _unplanned_because(shrinkage: str, target: str, key_rounds: int) -> str:
    """Why the kernels cannot make the plan that is asked for; empty if they can."""
    if target != "denominator":
        return f"they bound the denominator, not the {target} (target={target!r})"
    if shrinkage != "binary":
        return f"they have binary shrinkage only, not {shrinkage!r}"
    return f"they plan once, without key_rounds={key_rounds}" if key_rounds else ""


def _unreadable_because(n_segments: int, is_coded: bool, is_whole: bool, is_pinned: bool) -> str:
    """Why the kernels cannot read the host's copy of the context in place; empty if they can."""
    if n_segments != 1:
        return "they read one stretch of host memory, and the context was sealed in several segments"
    if is_coded:
        return "they read rows in place, and the host keeps them coded"
    if not is_whole:
        return "the context is the beginning of a longer stretch of host memory"
    return "" if is_pinned else "the context is not in pinned host memory"


@functools.cache
def _warn_once(message: str) -> None:
    warnings.warn(message, stacklevel=3)
