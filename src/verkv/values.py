"""What the output's bound needs of the values: one byte a token on the device, and a centre per KV head."""

from dataclasses import dataclass

import torch
from torch import Tensor

from verkv.estimators.distances import NormCodes, decode_norms, encode_norms, value_norms


@dataclass(frozen=True)
class ValueNorms:
    """Distances of N KV heads' values from their centres, rounded up.

    Attributes
    ----------
    codes : NormCodes
        Of shapes (N, T) and (N,).
    centre : Tensor, shape (N, dv), float32
        The mean value of the context, of its first segment if it has grown: any point will do that is fixed before
        the draw.
    later : tuple of NormCodes
        Of later segments, each with a scale of its own.
    """

    codes: NormCodes
    centre: Tensor
    later: tuple[NormCodes, ...] = ()

    @classmethod
    def measure(cls, values: Tensor, is_token: Tensor) -> "ValueNorms":
        """Of values (C, Hkv, T, dv); ``is_token`` (C, T) is False at padding, whose norm is 0."""
        is_token = is_token[:, None, :, None]
        values = torch.where(is_token, values.float(), 0.0)
        centre = values.sum(2) / is_token.sum(2).clamp_min(1)
        norms = value_norms(values, centre) * is_token[..., 0]
        return cls(encode_norms(norms.flatten(0, 1)), centre.flatten(0, 1))

    def append(self, values: Tensor, is_token: Tensor) -> "ValueNorms":
        """With norms of later values (C, Hkv, t, dv), from the same centre; 0 where ``is_token`` (C, t) is False."""
        centre = self.centre.unflatten(0, values.shape[:2])
        values = torch.where(is_token[:, None, :, None], values.float(), centre[:, :, None])
        codes = encode_norms(value_norms(values, centre).flatten(0, 1))
        return ValueNorms(self.codes, self.centre, (*self.later, codes))

    def head(self, n_tokens: int) -> "ValueNorms":
        """Of the first tokens only."""
        kept = []
        for part in self._parts:
            if n_tokens > 0:
                kept.append(NormCodes(part.codes[:, :n_tokens].clone(), part.top, part.step))
            n_tokens -= part.codes.shape[1]
        return ValueNorms(kept[0], self.centre, tuple(kept[1:]))

    def decode(self) -> Tensor:
        """||v - c|| of every token, never too small, (N, T)."""
        return torch.cat([decode_norms(codes) for codes in self._parts], -1)

    def select(self, units: Tensor) -> "ValueNorms":
        """Some of the KV heads (a copy)."""
        first, *later = (NormCodes(part.codes[units], part.top[units], part.step[units]) for part in self._parts)
        return ValueNorms(first, self.centre[units], tuple(later))

    def tensors(self) -> dict[str, list[Tensor]]:
        """By part of the memory report; charged."""
        return {"value_norms": [part.codes for part in self._parts]}

    def uncharged_tensors(self) -> dict[str, list[Tensor]]:
        """By part of the memory report; they do not grow with a segment's length."""
        return {
            "value_norm_scale": [part.top for part in self._parts],
            "value_norm_step": [part.step for part in self._parts],
            "value_centre": [self.centre],
        }

    @property
    def _parts(self) -> tuple[NormCodes, ...]:
        return (self.codes, *self.later)
