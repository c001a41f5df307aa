"""What a sketch gets wrong, in two moments: measured exactly while all keys are still at hand, used to plan."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class SketchError:
    """Mean and covariance of e = key - sketched key over the tokens of every KV head.

    For a query q the sketch's logit of a token is off by <e, q>: with mean <mean, q> and variance q^T covariance q.
    Both are independent of the context's length.

    Attributes
    ----------
    mean : Tensor, shape (B, Hkv, d), float32
    covariance : Tensor, shape (B, Hkv, d, d), float32
    """

    mean: Tensor
    covariance: Tensor

    @classmethod
    def measure(cls, keys: Tensor, sketched: Tensor, included: Tensor) -> "SketchError":
        """Moments over some tokens.

        Parameters
        ----------
        keys, sketched : Tensor, shape (B, Hkv, T, d)
            Exact keys, and what the sketch makes of them.
        included : Tensor, shape (B, Hkv, T), bool
            Tokens that are planned with their sketch weight. Where there is none both moments are 0.
        """
        error = torch.where(included[..., None], keys.float() - sketched, 0.0)
        count = included.sum(-1).clamp_min(1)[..., None].float()
        mean = error.sum(2) / count
        centred = torch.where(included[..., None], error - mean[:, :, None], 0.0)
        return cls(mean, centred.mT @ centred / count[..., None])

    def logit_moments(self, rows: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
        """Mean and variance of the logit error for query rows (B, Hkv, R, d): two tensors (B, Hkv, R), float32.

        The logit is ``scaling`` times the product; the variance is >= 0.
        """
        mean = (rows @ self.mean[..., None])[..., 0]
        variance = ((rows @ self.covariance) * rows).sum(-1).clamp_min(0.0)
        return scaling * mean, scaling**2 * variance

    def where(self, is_large: Tensor) -> "SketchError":
        """The covariance of some KV heads only, (B, Hkv) bool; that of the others is 0."""
        return SketchError(self.mean, torch.where(is_large[..., None, None], self.covariance, 0.0))

    def pooled(self, other: "SketchError", share: float) -> "SketchError":
        """Moments over the tokens of both, ``share`` of which are the other's.

        A KV head whose covariance both leave out keeps none.
        """
        step = other.mean - self.mean
        covariance = (1 - share) * self.covariance + share * other.covariance
        between = share * (1 - share) * step[..., :, None] * step[..., None, :]
        has_covariance = covariance.flatten(2).any(-1)[..., None, None]
        return SketchError(self.mean + share * step, torch.where(has_covariance, covariance + between, covariance))

    def flat(self) -> "SketchError":
        """Every KV head as a context of its own, (B * Hkv, 1, ...): a view."""
        return SketchError(self.mean.flatten(0, 1)[:, None], self.covariance.flatten(0, 1)[:, None])

    def repeat(self, n_repeats: int) -> "SketchError":
        """Every context ``n_repeats`` times in a row."""
        return SketchError(self.mean.repeat_interleave(n_repeats, 0), self.covariance.repeat_interleave(n_repeats, 0))

    def select(self, indices: Tensor) -> "SketchError":
        """Reindex the batch (a copy)."""
        indices = indices.to(self.mean.device)
        return SketchError(self.mean[indices], self.covariance[indices])

    def tensors(self) -> dict[str, Tensor]:
        """By part of the memory report; none grows with the context."""
        return {"sketch_error_mean": self.mean, "sketch_error_covariance": self.covariance}


def worst_sketched(keys: Tensor, sketched: Tensor, queries: Tensor | None, eligible: Tensor, count: Tensor) -> Tensor:
    """The tokens whose keys the sketch codes worst, in the metric of the queries.

    The metric is e^T C e with e the error minus its mean over the eligible tokens and C the second moment of the
    queries of the KV head's group, to which a tenth of its mean eigenvalue is added; without queries, |e|^2.

    Parameters
    ----------
    keys, sketched : Tensor, shape (B, Hkv, T, d)
    queries : Tensor, shape (B, Hq, M, d), optional
        As attention sees them.
    eligible : Tensor, shape (B, T), bool
        Tokens that may be chosen.
    count : Tensor, shape (B,), int64
        How many of each row's KV heads; all eligible ones where there are fewer.

    Returns
    -------
    Tensor, shape (B, Hkv, T), bool
    """
    eligible = eligible[:, None].expand(keys.shape[:3])
    error = torch.where(eligible[..., None], keys.float() - sketched, 0.0)
    mean = error.sum(2) / eligible.sum(-1).clamp_min(1)[..., None]
    error = error - mean[:, :, None]
    if queries is None:
        size = error.square().sum(-1)
    else:
        batch, n_heads = keys.shape[:2]
        rows = queries.float().reshape(batch, n_heads, -1, keys.shape[-1])
        moment = rows.mT @ rows / max(1, rows.shape[2])
        ridge = 0.1 * moment.diagonal(dim1=-2, dim2=-1).mean(-1)
        moment = moment + ridge[..., None, None] * torch.eye(keys.shape[-1], device=keys.device)
        size = ((error @ moment) * error).sum(-1)
    size = size.masked_fill(~eligible, -torch.inf)
    order = size.argsort(dim=-1, descending=True, stable=True)
    rank = torch.arange(keys.shape[2], device=keys.device).expand_as(order)
    chosen = torch.zeros_like(eligible).scatter(-1, order, rank < count.to(keys.device)[:, None, None])
    return chosen & eligible
