"""What sketches check and look up before they are fitted: keys, positions and the default size."""

from dataclasses import dataclass

import torch
from torch import Tensor

from verkv.checks import check_count
from verkv.sketches.rope_pair import RopePairSketch

LARGEST_KEY = 1e9  # products of four such numbers, and sums of many, stay finite in float32 and float64


@dataclass(frozen=True)
class Span:
    """Where one row's context lies: left padding, then consecutive positions.

    Attributes
    ----------
    padding : int
        Tokens before the first one of the context; copies of it.
    first : int
        Position of the first token.
    """

    padding: int = 0
    first: int = 0

    def positions(self, n_tokens: int, device: torch.device) -> Tensor:
        """Of all tokens, (T,), int64; the padding has the first token's."""
        return self.first + (torch.arange(n_tokens, device=device) - self.padding).clamp_min(0)


def checked_keys(keys: Tensor) -> Tensor:
    """Keys (B, Hkv, T, d) in float32.

    Raises
    ------
    ValueError
        If there is no token, or keys are not finite or too large.
    """
    if keys.dim() != 4 or not keys.shape[2]:
        raise ValueError(f"keys must have shape (B, Hkv, T, d) with at least one token, got {tuple(keys.shape)}")
    keys = keys.detach().float()
    largest = float(keys.abs().amax())
    if not largest < float("inf"):  # also NaN
        raise ValueError("keys hold NaN or infinite values; the sketch cannot be built from them")
    if largest > LARGEST_KEY:
        raise ValueError(f"keys are too large for the sketch: {largest:.3g}, at most {LARGEST_KEY:.0e} are supported")
    return keys


def position_spans(keys: Tensor, positions: Tensor | None) -> list[Span]:
    """The span of every row from its positions (B, T).

    Raises
    ------
    ValueError
        If positions are not consecutive, up to copies of the first one at the left.
    """
    batch, _, n_tokens, _ = keys.shape
    if positions is None:
        return [Span()] * batch
    if positions.shape != (batch, n_tokens) or positions.is_floating_point():
        raise ValueError(
            f"positions must be integers of shape {(batch, n_tokens)}, got {positions.dtype} {tuple(positions.shape)}"
        )
    steps = positions.diff(dim=1)
    padding = (steps == 0).sum(1)
    expected = torch.arange(n_tokens - 1, device=positions.device) >= padding[:, None]
    if not torch.equal(steps, expected.to(steps)):
        raise ValueError("positions must increase by one from token to token, after copies of the first at the left")
    return [Span(*span) for span in torch.stack([padding, positions[:, 0]], dim=1).tolist()]


def check_bits_per_token(bits_per_token: int | None) -> None:
    """Raise a ValueError unless it is None or a positive integer."""
    if bits_per_token is not None:
        check_count("bits_per_token", bits_per_token, least=1)


def token_bits(bits_per_token: int | None, head_dim: int, most_per_channel: int = 8) -> int:
    """Bits for each token and KV head; by default as many as the default 2-bit RoPE pair sketch has.

    Raises
    ------
    ValueError
        If there are more than ``most_per_channel`` for each channel.
    """
    if bits_per_token is None:
        rope_pair = RopePairSketch()
        bits_per_token = rope_pair.charged_bytes(rope_pair.group_size, head_dim) * 8 // rope_pair.group_size
    if bits_per_token > most_per_channel * head_dim:
        raise ValueError(
            f"bits_per_token={bits_per_token} is too large: at most {most_per_channel} for each of {head_dim} channels"
        )
    return bits_per_token
