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
        The mean value of the context.
    """

    codes: NormCodes
    centre: Tensor

    @classmethod
    def measure(cls, values: Tensor, is_token: Tensor) -> "ValueNorms":
        """Of values (C, Hkv, T, dv); ``is_token`` (C, T) is False at padding, whose norm is 0."""
        is_token = is_token[:, None, :, None]
        values = torch.where(is_token, values.float(), 0.0)
        centre = values.sum(2) / is_token.sum(2).clamp_min(1)
        norms = value_norms(values, centre) * is_token[..., 0]
        return cls(encode_norms(norms.flatten(0, 1)), centre.flatten(0, 1))

    def decode(self) -> Tensor:
        """||v - c|| of every token, never too small, (N, T)."""
        return decode_norms(self.codes)

    def select(self, units: Tensor) -> "ValueNorms":
        """Some of the KV heads (a copy)."""
        codes = NormCodes(self.codes.codes[units], self.codes.top[units], self.codes.step[units])
        return ValueNorms(codes, self.centre[units])

    def tensors(self) -> dict[str, Tensor]:
        """By part of the memory report; charged."""
        return {"value_norms": self.codes.codes}

    def uncharged_tensors(self) -> dict[str, Tensor]:
        """By part of the memory report; they do not grow with the context."""
        return {"value_norm_scale": self.codes.top, "value_norm_step": self.codes.step, "value_centre": self.centre}
