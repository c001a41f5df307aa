"""From a memory budget in bytes to an expected number of tokens, every charged part counted."""

from dataclasses import dataclass

import torch
from torch import Tensor

from verkv.sketches import Sketch

OFFSET_BYTES = 8  # one int64 per KV head and one more per layer, see ResidentRows


class BudgetTooSmall(ValueError):
    """The budget does not pay for the parts that do not depend on the sample."""


@dataclass(frozen=True)
class LayerGeometry:
    """Shape of one layer's cache.

    Attributes
    ----------
    n_units : int
        KV heads. Of one context: a row's budget does not depend on its neighbours.
    key_dim, value_dim : int
        Channels of a key and of a value.
    element_size : int
        Bytes of one element.
    """

    n_units: int
    key_dim: int
    value_dim: int
    element_size: int

    @property
    def token_bytes(self) -> int:
        """Key and value of one token of one KV head."""
        return (self.key_dim + self.value_dim) * self.element_size


def token_budget(
    n_tokens: Tensor,
    n_protected: Tensor,
    compression_ratio: float,
    geometry: LayerGeometry,
    sketch: Sketch | None,
    bytes_per_token: int,
    floor: float,
) -> Tensor:
    """Expected number of tokens per KV head that the budget pays for.

    The budget is (1 - compression_ratio) of the full cache in its own dtype. Charged are, per KV head: the sketch, what
    the plan needs of every token (a byte of r, and one of its value's norm where outputs are bounded), the row offsets,
    and per kept token its key, its value and its own byte.

    Parameters
    ----------
    n_tokens, n_protected : Tensor, shape (C,), int64
        Real tokens of each context, and how many of them are always kept.
    compression_ratio : float in [0, 1)
    geometry : LayerGeometry
    sketch : Sketch or None
    bytes_per_token : int
        Kept on the device of every token for the plan: its r, its value's norm.
    floor : float
        Smallest r of a token that is not protected.

    Returns
    -------
    Tensor, shape (C,), float64
        On the CPU. All tokens where every token is protected anyway.

    Raises
    ------
    BudgetTooSmall
        If the parts that do not depend on the sample exceed the budget: names them and the largest ratio that works.
    """
    n_tokens, n_protected = n_tokens.cpu(), n_protected.cpu()  # a few numbers; not every device has float64
    tokens = n_tokens.double()
    sketch_bytes = torch.tensor(
        [sketch.charged_bytes(int(n), geometry.key_dim) if sketch else 0 for n in n_tokens],
        dtype=torch.float64,
        device="cpu",
    )
    code_bytes = bytes_per_token * tokens
    offset_bytes = OFFSET_BYTES * (geometry.n_units + 1) / geometry.n_units
    row_bytes = geometry.token_bytes + 1
    full_bytes = tokens * geometry.token_bytes

    fixed_bytes = sketch_bytes + code_bytes + offset_bytes
    least_rows = n_protected + floor * (tokens - n_protected)
    least_bytes = fixed_bytes + least_rows * row_bytes
    allowed_bytes = (1.0 - compression_ratio) * full_bytes
    all_protected = n_protected == n_tokens

    short = (allowed_bytes < least_bytes) & ~all_protected
    if bool(short.any()):
        i = int((least_bytes / full_bytes).masked_fill(~short, -torch.inf).argmax())
        parts = {
            f"{int(n_protected[i])} protected tokens (n_sink, n_local, template prefix, outliers)": n_protected[i]
            * row_bytes,
            "sketch": sketch_bytes[i],
            "inclusion probabilities and norms": code_bytes[i],
            "row offsets": offset_bytes,
            "smallest sample": (least_rows[i] - n_protected[i]) * row_bytes,
        }
        sizes = float(least_bytes[i]), float(full_bytes[i])
        raise BudgetTooSmall(_too_small(compression_ratio, int(n_tokens[i]), parts, *sizes))
    budget = ((allowed_bytes - fixed_bytes) / row_bytes).clamp(max=tokens)
    return torch.where(all_protected, tokens, budget)


def solving_device(device: torch.device) -> torch.device:
    """Where inclusion probabilities are solved for, in float64: on the layer's device, or on the CPU if it has none.

    Apple's MPS is one that has none. Sums over 10^6 tokens would miss their budget in float32.
    """
    try:
        torch.zeros((), dtype=torch.float64, device=device)
    except (TypeError, RuntimeError):
        return torch.device("cpu")
    return device


def check_compression_ratio(value: float) -> float:
    """The ratio, or a ValueError that explains what it means."""
    hint = "it is the fraction of the cache that is removed, as in KVPress: 16x is 0.9375, 8x is 0.875"
    try:
        ratio = float(value)
    except (TypeError, ValueError):
        raise ValueError(f"compression_ratio must be a number in [0, 1), got {value!r}; {hint}") from None
    if not 0.0 <= ratio < 1.0:
        factor = f" (for {ratio:g}x pass {1 - 1 / ratio:g})" if ratio > 1.0 else ""
        raise ValueError(f"compression_ratio must be in [0, 1), got {value!r}; {hint}{factor}")
    return ratio


def _too_small(
    compression_ratio: float, n_tokens: int, parts: dict[str, float], least_bytes: float, full_bytes: float
) -> str:
    """Say which parts do not fit and which ratio would work."""
    shares = {name: 100 * float(size) / full_bytes for name, size in parts.items()}
    largest_ratio = int((1 - least_bytes / full_bytes) * 1e4) / 1e4  # rounded down, so that it does work
    if (1.0 - largest_ratio) * full_bytes < least_bytes:  # it is the ratio itself, and rounding made it too large
        largest_ratio = round(largest_ratio - 1e-4, 4)
    remedy = f"use compression_ratio <= {largest_ratio}" if largest_ratio > 0 else "leave so short a context as it is"
    listed = ", ".join(f"{name} {share:.2f} %" for name, share in shares.items())
    return (
        f"compression_ratio={compression_ratio:g} leaves {100 * (1 - compression_ratio):.2f} % of the cache of "
        f"{n_tokens} tokens, but its fixed parts need {sum(shares.values()):.2f} %: {listed}; "
        f"{remedy}, or protect fewer tokens"
    )
