"""The paper's deployable sketch: the strongest RoPE channel pairs at two bits (Appendix A.1)."""

import dataclasses
import functools
from dataclasses import dataclass

import torch
from torch import Tensor

BITS = 2
CODES_PER_BYTE = 8 // BITS
MAX_CODE = 2**BITS - 1


@dataclass
class RopePairSketch:
    """Keep the channel pairs of largest mean key energy, quantised to 2 bits per group of tokens, A.1 of [1]_.

    RoPE rotates within a pair, so a pair's share of <k, q> does not depend on the position and the choice needs no
    queries. Each kept channel is quantised uniformly between the minimum and the maximum of each group of tokens.
    Codes are packed four to a byte; zero and scale are float16. At head dim 128 codes and parameters are 9 of a bf16
    cache's 512 bytes a token, 1.76 %.

    Parameters
    ----------
    fraction : float in (0, 1]
        Share of the channels that is kept.
    group_size : int
        Tokens that share a zero and a scale.
    rotary_dim : int, optional
        Channels that RoPE rotates, pairs (i, i + rotary_dim / 2); the whole head by default. Channels beyond are not
        rotated; they are paired likewise and compete with the others.

    References
    ----------
    .. [1] Jha et al., "Verify Before You Fetch", arXiv:2611.11319v1.

    Examples
    --------
    >>> import torch
    >>> sketch = RopePairSketch().build(torch.randn(1, 8, 4096, 128))
    >>> round(100 * sketch.nbytes / (8 * 4096 * 128 * 2 * 2), 2)  # per cent of a bf16 cache
    1.76
    """

    fraction: float = 0.25
    group_size: int = 128
    rotary_dim: int | None = None

    name = "rope_pair"
    is_oracle = False
    is_linear = True

    def __post_init__(self):
        if not 0.0 < self.fraction <= 1.0:
            raise ValueError(f"fraction must be in (0, 1], got {self.fraction}")
        if not isinstance(self.group_size, int) or self.group_size < 1:
            raise ValueError(f"group_size must be an integer of at least 1, got {self.group_size!r}")
        rotary_dim = self.rotary_dim
        if rotary_dim is not None and (not isinstance(rotary_dim, int) or rotary_dim < 2 or rotary_dim % 2):
            raise ValueError(f"rotary_dim must be an even number of channels or None, got {rotary_dim!r}")

    def build(self, keys: Tensor, queries: Tensor | None = None, positions: Tensor | None = None) -> "RopePairSketch":
        """Choose channels and quantise keys (B, Hkv, T, d). Queries and positions are not used.

        Raises
        ------
        ValueError
            If keys are not finite, or too large for a float16 zero point.
        """
        channels = self._choose_channels(keys)
        kept = keys.gather(-1, channels[:, :, None, :].long().expand(-1, -1, keys.shape[2], -1)).float()
        zero, scale = self._affine(kept)
        codes = ((kept - self._per_token(zero, kept)) / self._per_token(scale, kept).clamp_min(1e-12)).round()
        built = dataclasses.replace(self)
        built._head_dim, built._channels = keys.shape[-1], channels
        built._zero, built._scale = zero, scale
        built._codes = _pack(codes.clamp(0, MAX_CODE).to(torch.uint8))
        return built

    def logits(self, query: Tensor) -> Tensor:
        """Score the decoded channels; (B, Hkv, R, d) -> (B, Hkv, R, T) in float32.

        A group's tokens share zero and scale, so these are applied to the query: no key is decoded.
        """
        index = self._channels[:, :, None, :].long().expand(-1, -1, query.shape[2], -1)
        query = query.float().gather(-1, index)
        n_tokens, n_channels = self._codes.shape[2], query.shape[-1]
        packed = torch.nn.functional.pad(self._codes, (0, 0, 0, -n_tokens % self.group_size))
        codes = _unpack(packed, n_channels).float().unflatten(2, (-1, self.group_size))
        scaled_query = query[:, :, None] * self._scale[:, :, :, None].float()  # (B, Hkv, n_groups, R, n_channels)
        of_zero = query @ self._zero.float().mT  # (B, Hkv, R, n_groups)
        logits = (scaled_query @ codes.mT).transpose(2, 3) + of_zero[..., None]
        return logits.flatten(3)[..., :n_tokens]

    def decode(self) -> Tensor:
        """The keys of all tokens, (B, Hkv, T, d), float32, with 0 in the channels that are not kept."""
        kept = self._decode_kept()
        index = self._channels[:, :, None, :].long().expand(-1, -1, kept.shape[2], -1)
        return kept.new_zeros(*kept.shape[:3], self._head_dim).scatter(-1, index, kept)

    def charged_bytes(self, n_tokens: int, head_dim: int) -> int:
        """Packed codes plus the float16 parameters of every begun group."""
        n_channels = self._n_channels(head_dim)
        n_groups = -(-n_tokens // self.group_size)
        return n_tokens * (n_channels // CODES_PER_BYTE) + n_groups * n_channels * 2 * 2

    @property
    def nbytes(self) -> int:
        """Codes and affine parameters."""
        return sum(tensor.nbytes for tensor in self.tensors().values())

    @property
    def uncharged_nbytes(self) -> int:
        """The channel choice: one byte or two a kept channel, whatever the length."""
        return self._channels.nbytes

    def tensors(self) -> dict[str, Tensor]:
        """By part of the memory report."""
        return {"sketch_codes": self._codes, "sketch_zero": self._zero, "sketch_scale": self._scale}

    def uncharged_tensors(self) -> dict[str, Tensor]:
        """By part of the memory report."""
        return {"sketch_channels": self._channels}

    def select(self, indices: Tensor) -> "RopePairSketch":
        """Reindex the batch."""
        chosen = dataclasses.replace(self)
        chosen._head_dim = self._head_dim
        for name in ("_channels", "_zero", "_scale", "_codes"):
            value = getattr(self, name)
            setattr(chosen, name, value[indices.to(value.device)])
        return chosen

    def _decode_kept(self) -> Tensor:
        """The kept channels of all tokens, (B, Hkv, T, n_channels), float32."""
        codes = _unpack(self._codes, self._channels.shape[-1]).float()
        return codes * self._per_token(self._scale, codes) + self._per_token(self._zero, codes)

    def _n_channels(self, head_dim: int) -> int:
        """A multiple of four, so that codes fill whole bytes."""
        n_channels = round(head_dim * self.fraction / CODES_PER_BYTE) * CODES_PER_BYTE
        return min(max(n_channels, CODES_PER_BYTE), head_dim - head_dim % CODES_PER_BYTE)

    def _choose_channels(self, keys: Tensor) -> Tensor:
        """Channels of the strongest pairs, (B, Hkv, n_channels): first members, then their partners."""
        head_dim = keys.shape[-1]
        if head_dim < CODES_PER_BYTE or head_dim % 2:
            raise ValueError(
                f"keys have a head dim of {head_dim}; the sketch needs an even one of at least {CODES_PER_BYTE}"
            )
        if self.rotary_dim is not None and self.rotary_dim > head_dim:
            raise ValueError(f"rotary_dim={self.rotary_dim} is larger than the keys' head dim of {head_dim}")
        first, second = _pairs(head_dim, self.rotary_dim or head_dim, keys.device)
        energy = keys.float().square().mean(2)  # (B, Hkv, d)
        if not bool(torch.isfinite(energy).all()):
            raise ValueError("keys hold NaN or infinite values; the sketch cannot be built from them")
        strongest = (energy[..., first] + energy[..., second]).topk(self._n_channels(head_dim) // 2, dim=-1).indices
        strongest = strongest.sort(dim=-1).values
        channels = torch.cat([first[strongest], second[strongest]], dim=-1)
        return channels.to(torch.uint8 if head_dim <= 256 else torch.int16)

    def _affine(self, kept: Tensor) -> tuple[Tensor, Tensor]:
        """float16 zero and scale of each group, (B, Hkv, n_groups, n_channels)."""
        n_tokens = kept.shape[2]
        n_groups = -(-n_tokens // self.group_size)
        missing = n_groups * self.group_size - n_tokens
        padded = torch.cat([kept, kept[:, :, -1:].expand(-1, -1, missing, -1)], dim=2)
        grouped = padded.unflatten(2, (n_groups, self.group_size))
        low, high = grouped.amin(3), grouped.amax(3)
        zero, scale = low.half(), ((high - low) / MAX_CODE).half()
        if not bool(torch.isfinite(zero).all() & torch.isfinite(scale).all()):
            raise ValueError("keys are too large for the sketch's float16 parameters (largest magnitude above 65504)")
        return zero, scale

    def _per_token(self, parameter: Tensor, like: Tensor) -> Tensor:
        """Spread a group's parameter over its tokens."""
        return parameter.float().repeat_interleave(self.group_size, dim=2)[:, :, : like.shape[2]]


def _pairs(head_dim: int, rotary_dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Both members of every channel pair: (i, i + half) among the rotated channels, and likewise among the rest."""
    rotated = torch.arange(rotary_dim // 2, device=device)
    rest_half = (head_dim - rotary_dim) // 2
    rest = rotary_dim + torch.arange(rest_half, device=device)
    return torch.cat([rotated, rest]), torch.cat([rotated + rotary_dim // 2, rest + rest_half])


def _pack(codes: Tensor) -> Tensor:
    """Four 2-bit codes to a byte along the channels."""
    parts = codes.unflatten(-1, (-1, CODES_PER_BYTE))
    packed = parts[..., 0].clone()
    for place in range(1, CODES_PER_BYTE):
        packed |= parts[..., place] << (BITS * place)
    return packed


def _unpack(packed: Tensor, n_channels: int) -> Tensor:
    """The inverse: every byte is looked up as a word of four bytes, one for each code."""
    words = _code_words(packed.device).index_select(0, packed.reshape(-1).int()).view(packed.shape)
    return words.view(torch.uint8)[..., :n_channels]


@functools.lru_cache(maxsize=16)
def _code_words(device: torch.device) -> Tensor:
    """For each byte, the word whose byte k (in memory) is its code k; (256,) int32, little-endian."""
    places = BITS * torch.arange(CODES_PER_BYTE, device=device)
    codes = (torch.arange(2**8, device=device)[:, None] >> places) & MAX_CODE
    return (codes << (8 * torch.arange(CODES_PER_BYTE, device=device))).sum(1).int()
