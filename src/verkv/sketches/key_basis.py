"""The basis in which keys are coded: fitted on a prompt, or on other contexts before and read from a file."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from verkv.rotary import Rotary
from verkv.sketches.key_metric import query_metric, symmetric_roots, unrotated_query_metric

PARTS = ("weights", "vectors")
CHUNK_TOKENS = 4096


@dataclass(frozen=True)
class KeyBasis:
    """Principal directions of one layer's keys, all KV heads together, in the metric of the logits' error.

    Attributes
    ----------
    weights : Tensor, shape (Hkv, d, d), float32
        Square root of each KV head's metric: symmetric, positive definite.
    vectors : Tensor, shape (Hkv * d, Hkv * d), float32
        Orthonormal columns, principal directions of the weighted keys, strongest first.

    Raises
    ------
    ValueError
        If shapes do not fit or values are not finite.
    """

    weights: Tensor
    vectors: Tensor

    def __post_init__(self):
        weights, vectors = self.weights, self.vectors
        if weights.dim() != 3 or weights.shape[1] != weights.shape[2] or not weights.numel():
            raise ValueError(f"weights must have shape (Hkv, d, d), got {tuple(weights.shape)}")
        n_features = weights.shape[0] * weights.shape[1]
        if vectors.shape != (n_features, n_features):
            raise ValueError(f"vectors must have shape {(n_features, n_features)}, got {tuple(vectors.shape)}")
        if not bool(torch.isfinite(weights).all() & torch.isfinite(vectors).all()):
            raise ValueError("weights and vectors must be finite")

    def matrices(self) -> tuple[Tensor, Tensor]:
        """From features to components (F, C), and back (C, F); float32, on the CPU.

        Features are the channels of all KV heads. Components are (features - mean) @ to, and those @ back are
        features - mean again.
        """
        weights = self.weights.detach().cpu().double()
        vectors = self.vectors.detach().cpu().double().unflatten(0, weights.shape[:2])  # (Hkv, d, C)
        to, back = weights @ vectors, torch.linalg.solve(weights, vectors)
        return to.flatten(0, 1).float(), back.flatten(0, 1).mT.float()


def fit_key_basis(
    keys: Tensor, queries: Tensor | None = None, rotary: Rotary | None = None, first_position: int = 0
) -> KeyBasis:
    """Fit a layer's basis to the keys and queries of one context.

    Parameters
    ----------
    keys : Tensor, shape (Hkv, T, d)
        RoPE undone, if there is a ``rotary``.
    queries : Tensor, shape (Hq, M, d), optional
        As attention sees them. Without them, all channels weigh the same.
    rotary : Rotary, optional
        RoPE that was undone on the keys.
    first_position : int
        Position of the first key; the others follow it.

    Returns
    -------
    KeyBasis
    """
    n_kv_heads, n_tokens, head_dim = keys.shape
    if queries is None:
        metric = torch.eye(head_dim, dtype=torch.float64, device="cpu").expand(n_kv_heads, -1, -1)
    elif rotary is None:
        metric = query_metric(queries, n_kv_heads)
    else:
        metric = unrotated_query_metric(queries, n_kv_heads, rotary, first_position, n_tokens)
    weights, _ = symmetric_roots(metric)
    weight = torch.block_diag(*weights)
    vectors = torch.linalg.eigh(weight @ _covariance(keys) @ weight).eigenvectors.flip(1)
    return KeyBasis(weights.float(), vectors.float())


def save_key_bases(path: str | Path, bases: Mapping[int, KeyBasis]) -> None:
    """Write bases by layer to a safetensors file: tensors ``layer.<index>.weights`` and ``layer.<index>.vectors``."""
    from safetensors.torch import save_file  # comes with transformers; sketches alone need only torch

    tensors = {f"layer.{layer}.{part}": getattr(basis, part) for layer, basis in bases.items() for part in PARTS}
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, str(path))


def load_key_bases(path: str | Path) -> dict[int, KeyBasis]:
    """Read the bases that :func:`save_key_bases` wrote, by layer.

    Raises
    ------
    ValueError
        If the file holds other tensors than it should, or they are not those of a basis.
    """
    from safetensors.torch import load_file

    parts: dict[int, dict[str, Tensor]] = {}
    for name, tensor in load_file(str(path)).items():
        layer, _, part = name.removeprefix("layer.").partition(".")
        if name != f"layer.{layer}.{part}" or not layer.isdecimal() or part not in PARTS:
            raise ValueError(f"{path} is not a file of key bases: it holds a tensor named {name!r}")
        parts.setdefault(int(layer), {})[part] = tensor
    for layer, tensors in parts.items():
        if set(tensors) != set(PARTS):
            raise ValueError(f"{path} lacks a tensor of layer {layer}: it has {sorted(tensors)}, not {sorted(PARTS)}")
    bases = {layer: KeyBasis(**tensors) for layer, tensors in sorted(parts.items())}
    for layer, basis in bases.items():
        _check(basis, f"{path}, layer {layer}")
    return bases


def _check(basis: KeyBasis, where: str) -> None:
    """What a fit ensures and a file may not."""
    weights, vectors = basis.weights.double(), basis.vectors.double()
    if not torch.allclose(weights, weights.mT, atol=1e-4 * float(weights.abs().max())):
        raise ValueError(f"{where}: weights must be symmetric")
    if not bool((torch.linalg.eigvalsh(weights) > 1e-6 * weights.abs().max()).all()):
        raise ValueError(f"{where}: weights must be positive definite")
    if not torch.allclose(vectors.mT @ vectors, torch.eye(len(vectors), dtype=torch.float64, device="cpu"), atol=1e-3):
        raise ValueError(f"{where}: vectors must be orthonormal")


def _covariance(keys: Tensor) -> Tensor:
    """Of all KV heads' channels together, (Hkv * d, Hkv * d), float64, on the CPU."""
    centred = (keys - keys.mean(1, keepdim=True)).transpose(0, 1).flatten(1)  # (T, Hkv * d)
    total = sum((chunk.mT @ chunk).cpu().double() for chunk in centred.split(CHUNK_TOKENS))
    return total.cpu() / len(centred)
