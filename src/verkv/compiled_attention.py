"""Attention on a CPU by compiled loops, where numba is installed: fetched rows are read in place, not copied first."""

import numpy
import torch
from torch import Tensor

from verkv import loops
from verkv.estimators.compiled_plan import compiles
from verkv.tiers import HostTier, ResidentRows

DTYPES = (torch.float32, torch.bfloat16)


def reads_in_place(rows: ResidentRows, host: HostTier | None) -> bool:
    """Whether :func:`attend_in_place` can attend to these rows: on a CPU, of a dtype it reads, the host's in one piece.

    Parameters
    ----------
    rows : ResidentRows
    host : HostTier or another tier, or None
        None where nothing is fetched.

    Returns
    -------
    bool
    """
    if host is not None and type(host) is not HostTier:
        return False
    tensors = [rows.keys, rows.values, *(() if host is None else (host.keys, host.values))]
    return all(tensor.is_cpu and tensor.dtype in DTYPES for tensor in tensors) and compiles()


def as_array(rows: Tensor):
    """Rows as loops read them: bfloat16, which numpy does not know, as 16 bits; a view."""
    return (rows.view(torch.uint16) if rows.dtype == torch.bfloat16 else rows).numpy()


def attend_in_place(
    query: Tensor,
    rows: ResidentRows,
    log_weights: Tensor,
    host: tuple[Tensor, Tensor] | None,
    fetched: Tensor | None,
    tail: tuple[Tensor, Tensor],
    scaling: float,
) -> tuple[Tensor, Tensor]:
    """Softmax attention over resident rows, fetched rows and the tail: :func:`weighted_attention` of these parts.

    Parameters
    ----------
    query : Tensor, shape (N, B, R, d), float32
        R rows of each of B beams that share a KV head.
    rows : ResidentRows
        Of N units.
    log_weights : Tensor, shape broadcastable to (N, B, R, S), float32
        Of the resident rows, S at least as many as any unit has.
    host : tuple of Tensor, shape (C, Hkv, T, d), or None
        All keys and values.
    fetched : Tensor, shape (F, 2), int64, or None
        Unit and position of the rows to read, in ascending order.
    tail : tuple of Tensor
        Logits (N, B, R, t) and values (N, B, t, d) of the tokens after the context.
    scaling : float
        Factor of <k, q>.

    Returns
    -------
    output : Tensor, shape (N, B, R, d), float32
    lse : Tensor, shape (N, B, R), float32
        Log of the denominator; -inf where every token is left out (the output is 0 there).
    """
    if host is None:
        host = [side.new_empty(1, query.shape[0], 0, side.shape[-1]) for side in (rows.keys, rows.values)]
        fetched = rows.offsets.new_empty(0, 2)
    host = [side.flatten(0, 1) for side in host]
    output = query.new_zeros(*query.shape[:-1], rows.values.shape[-1])
    lse = query.new_empty(query.shape[:-1])
    log_weights = log_weights.expand(*query.shape[:-1], log_weights.shape[-1])
    inputs = query, rows.keys, rows.values, rows.offsets, log_weights, *host, fetched, tail[0], tail[1].float()
    arrays = [as_array(tensor.detach().contiguous()) for tensor in inputs]
    loops.load()["attention"].attend_units(*arrays, numpy.float32(scaling), output.numpy(), lse.numpy())
    return output, lse
