"""The kernels as operators of torch, so that ``torch.compile`` can trace through a step, and how they are launched.

Operators only write to buffers that they are given, so tracing needs to know no more than that.
"""

import ctypes

import torch
from torch import Tensor

from verkv.cuda import layout
from verkv.cuda.build import check, driver_bindings, load_kernels
from verkv.cuda.layout import Params, Sizes


@torch.library.custom_op("verkv::kvfetch_score", mutates_args=("logits", "known", "n_read", "peak", "tickets"))
def _score_op(
    query: Tensor,
    codes: Tensor,
    channels: Tensor,
    sketch: Tensor,
    zero: Tensor,
    scale: Tensor,
    row_keys: Tensor,
    row_codes: Tensor,
    row_positions: Tensor,
    row_offsets: Tensor,
    host_keys: Tensor,
    shift: Tensor | None,
    logits: Tensor,
    known: Tensor,
    n_read: Tensor,
    peak: Tensor,
    tickets: Tensor,
    scaling: float,
    first_row: int,
    n_shortlist: int,
    paper: bool,
) -> None:
    arrays = dict(locals())
    n_units, n_rows, n_tokens = logits.shape
    scalars = {name: arrays.pop(name) for name in ("scaling", "first_row", "n_shortlist")}
    scalars["known_resident"] = arrays.pop("paper")
    sizes = Sizes(n_units, n_tokens, query.shape[1], n_rows, query.shape[2], n_shortlist)
    arrays |= empty_buffers(layout.score_buffers(sizes), query.device, ("ranked", "read_keys"))
    kernels = ("vk_score", "vk_shortlist") if n_shortlist else ("vk_score",)
    run_kernels(kernels, sizes, arrays, scalars, row_keys.dtype)


@torch.library.custom_op(
    "verkv::kvfetch_plan",
    mutates_args=(
        *("peak", "tickets", "unit_counts", "mask", "shrunk", "n_promoted", "n_row_fetched", "bound"),
        *("fetch_positions", "n_fetched", "is_exact"),
    ),
)
def _plan_op(
    logits: Tensor,
    codes: Tensor,
    tail_lse: Tensor,
    known: Tensor | None,
    sigma2: Tensor | None,
    tolerances: Tensor | None,
    peak: Tensor,
    tickets: Tensor,
    unit_counts: Tensor,
    mask: Tensor,
    shrunk: Tensor,
    n_promoted: Tensor,
    n_row_fetched: Tensor,
    bound: Tensor,
    fetch_positions: Tensor,
    n_fetched: Tensor,
    is_exact: Tensor,
    find_peak: bool,
    epsilon: float,
    log_term: float,
    log_upper: float,
    log_lower: float,
    max_read: float,
    first_row: int,
    paper: bool,
    head_dim: int,
    is_fp16: bool,
) -> None:
    arrays = dict(locals())
    n_units, n_rows, n_tokens = logits.shape
    rows_all = n_promoted.shape[1]
    names = ("epsilon", "log_term", "log_upper", "log_lower", "max_read", "first_row")
    scalars = {name: arrays.pop(name) for name in names}
    scalars |= {"known_resident": arrays.pop("paper"), "accumulate": first_row > 0}
    scalars["compact"] = first_row + n_rows == rows_all
    # No kernel here depends on head dim and dtype: they only say which compiled variant the layer uses anyway.
    sizes = Sizes(n_units, n_tokens, rows_all, n_rows, arrays.pop("head_dim"))
    dtype = torch.float16 if arrays.pop("is_fp16") else torch.bfloat16
    scratch = ("candidates", "boundary", "n_boundary", "part_denominator", "part_variance", "part_dev", "state")
    arrays |= empty_buffers(layout.plan_buffers(sizes), logits.device, scratch)
    kernels = ("vk_peak",) if arrays.pop("find_peak") else ()
    run_kernels((*kernels, "vk_plan", "vk_emit", "vk_settle"), sizes, arrays, scalars, dtype)


@torch.library.custom_op("verkv::kvfetch_attend", mutates_args=("tickets", "output", "lse"))
def _attend_op(
    query: Tensor,
    row_keys: Tensor,
    row_codes: Tensor,
    row_positions: Tensor,
    row_offsets: Tensor,
    row_values: Tensor,
    host_keys: Tensor,
    host_values: Tensor,
    staged_keys: Tensor | None,
    staged_values: Tensor | None,
    mask: Tensor,
    shrunk: Tensor,
    fetch_positions: Tensor,
    n_fetched: Tensor,
    tickets: Tensor,
    output: Tensor,
    lse: Tensor,
    scaling: float,
) -> None:
    arrays = dict(locals())
    scalars = {"scaling": arrays.pop("scaling"), "staged_rows": 0 if staged_keys is None else staged_keys.shape[1]}
    n_units, rows_all, head_dim = query.shape
    tiles = -(-rows_all // layout.tile_of(rows_all))
    splits = layout.splits_of(n_units, tiles, n_multiprocessors(query.device))
    sizes = Sizes(n_units, fetch_positions.shape[1], rows_all, rows_all, head_dim, n_splits=splits)
    arrays |= empty_buffers(layout.attend_buffers(sizes), query.device, ("partial",))
    kernels = ("vk_attend",) if staged_keys is None else ("vk_gather", "vk_attend")
    run_kernels(kernels, sizes, arrays, scalars, row_keys.dtype)


for _op in (_score_op, _plan_op, _attend_op):
    _op.register_fake(lambda *args, **kwargs: None)


def run_kernels(
    names: tuple[str, ...],
    sizes: Sizes,
    arrays: dict[str, Tensor | None],
    scalars: dict[str, float],
    dtype: torch.dtype,
) -> None:
    """Launch kernels one after another on the current stream of the tensors' device."""
    device = next(array.device for name, array in arrays.items() if array is not None and "host" not in name)
    driver = driver_bindings()
    handles = load_kernels(device.index, sizes.head_dim, sizes.tile, dtype == torch.float16)
    arguments = (ctypes.c_void_p * 1)(ctypes.addressof(params := kernel_params(sizes, arrays, scalars)))
    with torch.cuda.device(device):
        stream = torch.cuda.current_stream(device).cuda_stream
        for name in names:
            blocks = layout.grid(name, sizes)
            threads = (layout.N_THREADS, 1, 1)
            check(
                driver,
                driver.cuLaunchKernel(handles[name], *blocks, *threads, 0, stream, ctypes.addressof(arguments), 0),
            )
    del params  # until here: the driver copies the block at each launch


def kernel_params(sizes: Sizes, arrays: dict[str, Tensor | None], scalars: dict[str, float]) -> Params:
    """The kernels' argument block."""
    pointers = {name: array.data_ptr() for name, array in arrays.items() if array is not None and array.numel()}
    counts = {name: getattr(sizes, name) for name in ("n_tokens", "n_rows", "rows_all", "n_shortlist")}
    return Params(**pointers, **counts | scalars)


def empty_buffers(
    buffers: dict[str, tuple[tuple[int, ...], str]], device: torch.device, names: tuple[str, ...]
) -> dict[str, Tensor]:
    """Uninitialised buffers by name, of shapes from :mod:`verkv.cuda.layout`."""
    return {
        name: torch.empty(buffers[name][0], dtype=getattr(torch, buffers[name][1]), device=device) for name in names
    }


def n_multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a device."""
    return torch.cuda.get_device_properties(device).multi_processor_count
