"""In which metric a key sketch should be close: the expected squared error of logits, from queries seen before."""

import torch
from torch import Tensor

from verkv.rotary import Rotary

# Of the metric's mean, added in every direction. The queries to come differ from those seen; 0.2 to 0.4 were best.
RIDGE = 0.3
FLOOR = 1e-3  # the same, relative to all KV heads: for a head whose queries are 0


def query_metric(queries: Tensor, n_kv_heads: int, ridge: float = RIDGE) -> Tensor:
    """Second moment of each KV head's queries, with a ridge, as the metric of errors in keys.

    A key error e costs E[<e, q>^2] = e^T C e, with C = E[q q^T].

    Parameters
    ----------
    queries : Tensor, shape (Hq, M, d)
        Query heads h * G .. (h + 1) * G - 1 belong to KV head h.
    n_kv_heads : int
    ridge : float >= 0
        Relative to the mean of C's diagonal.

    Returns
    -------
    Tensor, shape (Hkv, d, d), float64, on the CPU
        Positive definite, of mean diagonal 1 over all heads.
    """
    rows = _rows_by_kv_head(queries, n_kv_heads)
    return _with_ridge(rows.mT @ rows / rows.shape[1], ridge)


def unrotated_query_metric(
    queries: Tensor, n_kv_heads: int, rotary: Rotary, first_position: int, n_positions: int, ridge: float = RIDGE
) -> Tensor:
    """The metric of errors in keys whose RoPE was undone, if the error does not depend on the position.

    With R_m the rotation to position m, the error e costs E[<R_m e, q>^2] = e^T C e, with C the mean of
    R_m^T q q^T R_m over the queries and over the key positions m. Fast pairs end up weighted by their energy alone;
    what slow pairs have in common, RoPE does not average away.

    Parameters
    ----------
    queries : Tensor, shape (Hq, M, d)
        As attention sees them, RoPE applied.
    n_kv_heads : int
    rotary : Rotary
    first_position, n_positions : int
        The key positions first_position .. first_position + n_positions - 1.
    ridge : float >= 0
        Relative to the mean of C's diagonal.

    Returns
    -------
    Tensor, shape (Hkv, d, d), float64, on the CPU
        Positive definite, of mean diagonal 1 over all heads.
    """
    rows = _rows_by_kv_head(queries, n_kv_heads)
    half, head_dim = len(rotary.inv_freq), rows.shape[-1]
    frequency = rotary.inv_freq.cpu().double()
    # In coordinates z = x + iy of each pair, its conjugate, and the unrotated rest, a rotation multiplies by a phase.
    z = torch.complex(rows[..., :half], rows[..., half : 2 * half])
    phasors = torch.cat([z, z.conj(), rows[..., 2 * half :].to(z.dtype)], dim=-1)  # (Hkv, N, d)
    speed = torch.cat([frequency, -frequency, frequency.new_zeros(head_dim - 2 * half)])
    moment = phasors.mT @ phasors.conj() / rows.shape[1]
    moment *= mean_phase(speed[None, :] - speed[:, None], first_position, n_positions)
    to_channels = torch.eye(head_dim, dtype=z.dtype, device="cpu")
    pair = torch.arange(half, device="cpu")
    to_channels[pair, pair] = to_channels[pair, pair + half] = 0.5  # x = (z + z*) / 2
    to_channels[pair + half, pair], to_channels[pair + half, pair + half] = -0.5j, 0.5j  # y = (z - z*) / 2i
    return _with_ridge((to_channels @ moment @ to_channels.mH).real, ridge)


def mean_phase(speed: Tensor, first_position: int, n_positions: int) -> Tensor:
    """Mean of exp(i speed m) over consecutive positions m, in closed form (Dirichlet's kernel), complex128."""
    half = speed.double() / 2
    denominator = half.sin()
    is_whole = denominator.abs() < 1e-9  # every step a whole turn: the limit of the quotient
    kernel = (n_positions * half).sin() / (n_positions * torch.where(is_whole, 1.0, denominator))
    kernel = torch.where(is_whole, (n_positions * half).cos() / half.cos(), kernel)
    return torch.polar(torch.ones_like(half), half * (2 * first_position + n_positions - 1)) * kernel


def symmetric_roots(metric: Tensor) -> tuple[Tensor, Tensor]:
    """Square root and inverse square root of positive definite matrices (..., d, d)."""
    values, vectors = torch.linalg.eigh(metric)
    root = values.clamp_min(1e-12).sqrt()[..., None, :]
    return (vectors * root) @ vectors.mT, (vectors / root) @ vectors.mT


def _rows_by_kv_head(queries: Tensor, n_kv_heads: int) -> Tensor:
    """(Hkv, G * M, d), float64."""
    if queries.shape[0] % n_kv_heads or not queries.shape[1]:
        raise ValueError(
            f"queries have shape {tuple(queries.shape)}: the number of query heads must be a multiple of the keys' "
            f"{n_kv_heads} KV heads, and there must be at least one query"
        )
    rows = queries.detach().cpu().double().unflatten(0, (n_kv_heads, -1)).flatten(1, 2)
    if not bool(torch.isfinite(rows).all()):
        raise ValueError("queries hold NaN or infinite values; the sketch cannot be weighted by them")
    return rows


def _with_ridge(moment: Tensor, ridge: float) -> Tensor:
    energy = moment.diagonal(dim1=-2, dim2=-1).mean(-1)  # (Hkv,)
    identity = torch.eye(moment.shape[-1], dtype=moment.dtype, device="cpu")
    if not bool(energy.mean() > 0):
        return identity.expand_as(moment)
    metric = moment + (ridge * energy + FLOOR * energy.mean())[:, None, None] * identity
    return metric / metric.diagonal(dim1=-2, dim2=-1).mean()
