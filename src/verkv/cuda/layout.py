"""What kernels and host code agree on: constants, the parameter block, buffers and launch shapes of ``kvfetch.cu``.

Needs neither torch nor a GPU; launches depend on sizes only, never on data.
"""

import ctypes
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).with_name("kvfetch.cu")

N_THREADS = 256
CHUNK = 4096  # tokens of one block of plan, peak and shortlist
BINS = 256
SKETCH_GROUP = 128
MAX_SHORTLIST = 1024
MAX_TILE = 8  # query rows that share one read of a key row
HEAD_DIMS = (64, 128, 256)
MAX_GRID_Y = 65535
MAX_SPLITS = 32
MAX_TOKENS = 2**31 - CHUNK  # positions are 32-bit, and the last chunk's bounds must be, too

ROW_STATE_BYTES = 72

# fmt: off
_POINTERS = [
    "query", "codes", "channels", "sketch", "zero", "scale", "row_keys", "row_values", "row_codes", "row_positions",
    "row_offsets", "host_keys", "host_values", "staged_keys", "staged_values", "tail_lse", "shift", "sigma2",
    "tolerances", "logits", "peak", "known", "ranked", "read_keys", "n_read", "tickets", "unit_counts", "candidates",
    "boundary", "n_boundary", "part_denominator", "part_variance", "part_dev", "state", "mask", "shrunk", "n_promoted",
    "n_row_fetched", "bound", "fetch_positions", "n_fetched", "is_exact", "partial", "output", "lse",
]
_INTS = ["n_tokens", "n_rows", "rows_all", "first_row", "n_shortlist", "known_resident", "accumulate", "compact"]
_FLOATS = ["scaling", "log_term", "epsilon", "log_upper", "log_lower", "max_read"]
# fmt: on


class Params(ctypes.Structure):
    """The argument of every kernel, field by field as ``struct Params`` of ``kvfetch.cu``."""

    _fields_ = (
        [(name, ctypes.c_void_p) for name in _POINTERS]
        + [("staged_rows", ctypes.c_longlong)]
        + [(name, ctypes.c_int) for name in _INTS]
        + [(name, ctypes.c_float) for name in _FLOATS]
    )


@dataclass(frozen=True)
class Sizes:
    """Sizes of one pass over one layer, from which all launches and buffers follow.

    Attributes
    ----------
    n_units : int
        KV heads of all contexts.
    n_tokens : int
    rows_all : int
        Query rows of a unit in the pass.
    n_rows : int
        Query rows of a unit that are planned at a time.
    head_dim : int
    n_shortlist : int
    n_splits : int
        Blocks that share a unit's rows in attention.
    """

    n_units: int
    n_tokens: int
    rows_all: int
    n_rows: int
    head_dim: int
    n_shortlist: int = 0
    n_splits: int = 1

    @property
    def n_chunks(self) -> int:
        """Blocks over the tokens in plan."""
        return _ceil_div(self.n_tokens, CHUNK)

    @property
    def n_words(self) -> int:
        """32-bit words of a mask over the tokens."""
        return _ceil_div(self.n_tokens, 32)

    @property
    def tile(self) -> int:
        """Query rows of a tile, VK_G: at most 8, and tiles as even as possible."""
        return tile_of(self.rows_all)

    @property
    def n_tiles(self) -> int:
        """Tiles of all query rows of a unit."""
        return _ceil_div(self.rows_all, self.tile)


def tile_of(n_rows: int) -> int:
    """Query rows that share one read of a key row, for ``n_rows`` rows in all."""
    return _ceil_div(n_rows, _ceil_div(n_rows, MAX_TILE))


def splits_of(n_units: int, n_tiles: int, n_multiprocessors: int) -> int:
    """Blocks that share a unit's rows in attention, so that the device is full; at most ``MAX_SPLITS``."""
    return min(MAX_SPLITS, max(1, 2 * n_multiprocessors // max(1, n_units * n_tiles)))


def grid(kernel: str, sizes: Sizes) -> tuple[int, int, int]:
    """Blocks (x, y, z) of a kernel's launch."""
    units, rows = sizes.n_units, sizes.n_units * sizes.n_rows
    return {
        "vk_score": (_ceil_div(sizes.n_tokens, N_THREADS), units, _ceil_div(sizes.n_rows, sizes.tile)),
        "vk_peak": (sizes.n_chunks, rows, 1),
        "vk_shortlist": (sizes.n_chunks, units, 1),
        "vk_plan": (sizes.n_chunks, rows, 1),
        "vk_emit": (_ceil_div(sizes.n_tokens, 4 * N_THREADS), units, 1),
        "vk_settle": (sizes.n_rows, units, 1),
        "vk_gather": (16, units, 1),
        "vk_attend": (sizes.n_splits, units, sizes.n_tiles),
    }[kernel]


KERNELS = ("vk_score", "vk_peak", "vk_shortlist", "vk_plan", "vk_emit", "vk_settle", "vk_gather", "vk_attend")


def score_buffers(sizes: Sizes) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and dtype of what ``vk_score`` (or ``vk_peak``) and ``vk_shortlist`` write."""
    units, rows = sizes.n_units, sizes.n_rows
    return {
        "logits": ((units, rows, sizes.n_tokens), "float32"),
        "known": ((units, sizes.n_words), "int32"),
        "n_read": ((units,), "int32"),
        "ranked": ((units, sizes.n_tokens), "int64"),
        "read_keys": ((units, sizes.n_shortlist, sizes.head_dim), "int16"),
    }


def zeroed_buffers(sizes: Sizes) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and dtype of what must be zero before a pass; the kernels leave it zero again."""
    units, rows = sizes.n_units, sizes.n_rows
    return {
        "peak": ((units, rows), "int32"),
        "tickets": ((max(2 * units * rows + units, units * sizes.n_tiles),), "int32"),
        "unit_counts": ((units, 2), "int32"),
    }


def plan_buffers(sizes: Sizes) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and dtype of what ``vk_plan``, ``vk_emit`` and ``vk_settle`` write, results and scratch."""
    units, rows, chunks = sizes.n_units, sizes.n_rows, sizes.n_chunks
    return {
        "mask": ((units, sizes.n_words), "int32"),
        "shrunk": ((units, sizes.rows_all, sizes.n_words), "int32"),
        "n_promoted": ((units, sizes.rows_all), "int32"),
        "n_row_fetched": ((units, sizes.rows_all), "int32"),
        "bound": ((units, sizes.rows_all), "float32"),
        "fetch_positions": ((units, sizes.n_tokens), "int32"),
        "n_fetched": ((units,), "int32"),
        "is_exact": ((units,), "int32"),
        "candidates": ((units, rows, sizes.n_tokens), "int32"),
        "boundary": ((units, rows, sizes.n_tokens), "int32"),
        "n_boundary": ((units, rows, 2), "int32"),
        "part_denominator": ((units, rows, chunks), "float64"),
        "part_variance": ((units, rows, chunks, BINS), "int32"),
        "part_dev": ((units, rows, chunks, 2, BINS), "int32"),
        "state": ((units, rows, ROW_STATE_BYTES // 8), "int64"),
    }


def attend_buffers(sizes: Sizes) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and dtype of what ``vk_attend`` writes."""
    units = sizes.n_units
    return {
        "output": ((units, sizes.rows_all, sizes.head_dim), "float32"),
        "lse": ((units, sizes.rows_all), "float32"),
        "partial": ((units, sizes.n_tiles, sizes.n_splits, sizes.tile, sizes.head_dim + 2), "float32"),
    }


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


# Float32 weights and sums, and CUDA's fast exp2 and log2, are off by less than this. Asking for a tolerance smaller by
# as much may promote a token too many, never one too few.
BOUND_MARGIN = 4e-6


def safe_epsilon(epsilon):
    """The tolerance, or tensor of tolerances, to hand to the kernels so that the exact bound is below ``epsilon``."""
    return epsilon * (1.0 - BOUND_MARGIN)
