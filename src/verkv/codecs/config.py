"""How a codec compresses: its options, checked."""

from dataclasses import dataclass

from verkv.checks import check_count
from verkv.codecs import lossless
from verkv.codecs.quantiser import MODES

LAYOUTS = ("store", "fetch")


@dataclass(frozen=True)
class KvtcConfig:
    """How caches are coded.

    Parameters
    ----------
    ratio : float
        Nominal compression ratio of coded tokens against 16 bit, before lossless compression, [1]_. 8 is safe for
        reasoning and code, 16 for chat and stored documents.
    k_ratio, v_ratio : float, optional
        For keys and values separately; ``ratio`` by default.
    sinks, window : int
        Leading and trailing tokens that are kept as they are. Coding the first four ruins a model.
    mode : {"dynamic", "static"}
        A range per token and group of coordinates, as the paper, or calibrated steps: better from 16x on where the text
        is of the kind that was calibrated on.
    layout : {"store", "fetch"}
        By component, smallest on disk, or by token in rows of one width that can be read singly.
    lossless : {"deflate", "huffman", "isal", "zstd", "none"}, optional
        By default "deflate" in the layout `store`; `fetch` takes none.
    block_tokens : int
        Tokens that are coded, compressed and checksummed together.
    outlier_factor : float
        Tokens whose residual, absolute or relative to their row's norm, is more than so many times the calibrated one
        are kept as they are ...
    outlier_fraction : float in [0, 1]
        ... at most this share of the coded ones.

    Raises
    ------
    ValueError
        If a value is out of range.

    References
    ----------
    .. [1] "KV Cache Transform Coding for Compact Storage in LLM Inference", arXiv:2511.01815v1.
    """

    ratio: float = 16.0
    k_ratio: float | None = None
    v_ratio: float | None = None
    sinks: int = 4
    window: int = 128
    mode: str = "dynamic"
    layout: str = "store"
    lossless: str | None = None
    block_tokens: int = 1024
    outlier_factor: float = 4.0
    outlier_fraction: float = 0.01

    def __post_init__(self):
        for name in ("ratio", "k_ratio", "v_ratio"):
            value = getattr(self, name)
            if value is None and name != "ratio":
                continue
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 1.0 <= value < float("inf"):
                raise ValueError(f"{name} must be a number of at least 1, got {value!r}")
        check_count("sinks", self.sinks)
        check_count("window", self.window)
        check_count("block_tokens", self.block_tokens, least=1)
        for name, allowed in (("mode", MODES), ("layout", LAYOUTS)):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {sorted(allowed)}, got {getattr(self, name)!r}")
        if self.lossless is None:
            object.__setattr__(self, "lossless", "deflate" if self.layout == "store" else "none")
        lossless.check_lossless(self.lossless)
        if self.layout == "fetch" and self.lossless != "none":
            raise ValueError(
                f"lossless={self.lossless!r} would keep single rows from being read: layout 'fetch' needs 'none'"
            )
        if not self.outlier_factor > 0:
            raise ValueError(f"outlier_factor must be positive, got {self.outlier_factor!r}")
        if not 0.0 <= self.outlier_fraction <= 1.0:
            raise ValueError(f"outlier_fraction must be in [0, 1], got {self.outlier_fraction!r}")

    def side_ratio(self, side: str) -> float:
        """The ratio of side "k" or "v"."""
        own = self.k_ratio if side == "k" else self.v_ratio
        return float(self.ratio if own is None else own)
