"""Calibrated tolerances of a sealed cache: from true errors on the prompt's own last queries (split conformal)."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from verkv.context import SealedContext
from verkv.estimators.calibration import calibrated_tolerance, monotone_losses, required_queries
from verkv.kvfetch import MAX_PLANNED_PAIRS
from verkv.replay import DecodeReplay

SCOPES = ("head", "layer", "model")
N_CALIBRATION = 32  # positions; every second one of the prompt's last, the others fit the sketch

# Nominal tolerances that are tried, times epsilon. An output's error is larger than its denominator's.
STEPS = {
    "denominator": (0.25, 0.5, 1.0, 1.5, 2.2, 3.3, 5.0),
    "output": (0.05, 0.1, 0.2, 0.35, 0.55, 0.8, 1.2, 1.8),
}
EXACT = 1e-9  # the tolerance of heads for which every nominal one misses too often: everything is read


def split_queries(queries: Tensor) -> tuple[Tensor, Tensor]:
    """Those that fit the sketch, and those that calibrate: no query does both, (C, Hq, M, d) each."""
    n_queries = queries.shape[2]
    offset = torch.arange(n_queries, 0, -1, device=queries.device)  # from the end, 1 is the last
    calibrates = (offset % 2 == 1) & (offset < 2 * N_CALIBRATION)
    return queries[:, :, ~calibrates], queries[:, :, calibrates]


@dataclass
class ToleranceCalibration:
    """Finds, for each query head, the largest nominal tolerance that keeps the true error within epsilon.

    Parameters
    ----------
    epsilon : float
        What the true error must not exceed.
    delta : float
        How often it may, on average over queries exchangeable with those of the calibration.
    target : {"denominator", "output"}
        Whose error.
    scope : {"head", "layer", "model"}
        What shares a tolerance: the query heads of a KV head, of a layer, or all.
    n_local : int
        Tokens before a query that are exact, as the local window is.
    """

    epsilon: float
    delta: float
    target: str
    scope: str
    n_local: int
    notes: list[str] = field(default_factory=list)

    def __post_init__(self):
        self.tolerances = torch.tensor(
            [self.epsilon * step for step in STEPS[self.target]], dtype=torch.float64, device="cpu"
        )

    def run(self, contexts: dict[int, SealedContext], queries: dict[int, Tensor], n_first: int) -> None:
        """Set the tolerances of sealed layers; contexts with too few queries stay uncalibrated, which a note says.

        Parameters
        ----------
        contexts : dict of int to SealedContext
            By layer.
        queries : dict of int to Tensor, shape (C, Hq, M, d)
            That calibrate, by layer: of positions T - 2 M + 1, T - 2 M + 3, ...
        n_first : int
            Tokens of a row before it has enough of a context for its queries to calibrate.
        """
        layers = sorted(contexts)
        first = contexts[layers[0]]
        n_queries = queries[layers[0]].shape[2] if all(i in queries for i in layers) else 0
        positions = first.n_tokens - 1 - 2 * torch.arange(n_queries - 1, -1, -1, device=first.device)
        usable = (positions >= first.n_padding[:, None] + n_first).cpu()  # (C, M)
        needed = required_queries(self.delta)
        if int(usable.sum(-1).max()) < needed:
            self._note_too_few(needed, int(usable.sum(-1).max()))
            return
        losses = torch.stack([self._losses(contexts[i], queries[i], positions) for i in layers], dim=2)
        losses = losses.unflatten(3, (first.n_kv_heads, -1))  # (M, C, layers, Hkv, G, grid)
        found = [self._tolerances(losses[usable[c], c], needed) for c in range(first.n_contexts)]
        for j, i in enumerate(layers):
            contexts[i].tolerances = torch.stack([tolerance[j] for tolerance in found]).to(contexts[i].device)

    def _tolerances(self, losses: Tensor, needed: int) -> Tensor:
        """Of one context's query heads, (layers, Hq), from its losses (m, layers, Hkv, G, grid).

        Query heads of a KV head profit from each other's promotions, so they can only be calibrated together.
        """
        shape = losses.shape[1:-1]
        if len(losses) < needed:
            self._note_too_few(needed, len(losses))
            return torch.full(shape, self.epsilon, device="cpu").flatten(1)
        pooled = {"head": 3, "layer": (2, 3), "model": (1, 2, 3)}[self.scope]
        found = calibrated_tolerance(losses, self.tolerances, self.delta, pooled_dims=pooled)
        tolerance = torch.where(found.is_calibrated, found.tolerance, EXACT).float()
        unpooled = tolerance.view(*tolerance.shape, *[1] * (3 - tolerance.dim()))
        tolerance = unpooled.expand(shape).flatten(1)
        n_exact = int((tolerance <= EXACT).sum())
        if n_exact:
            self.notes.append(
                f"{n_exact} of {tolerance.numel()} heads miss epsilon={self.epsilon:g} too often at every tolerance "
                f"that was tried: they are computed exactly"
            )
        return tolerance

    def _note_too_few(self, needed: int, found: int) -> None:
        self.notes.append(
            f"not calibrated: delta={self.delta:g} needs {needed} queries of the prompt, there are {found}; the "
            f"uncalibrated bound is used"
        )

    def _losses(self, context: SealedContext, queries: Tensor, positions: Tensor) -> Tensor:
        """Losses of a layer, (M, C, Hq, grid): 1 from the first tolerance on at which the error exceeds epsilon.

        The walk up stops where no scope of this layer can still be kept; larger tolerances count as losses.
        """
        n_allowed = self.delta * (len(positions) + 1) - 1
        n_pairs = context.n_units * (queries.shape[1] // context.n_kv_heads) * context.n_tokens
        size = max(1, MAX_PLANNED_PAIRS // max(1, n_pairs))
        blocks = [slice(start, start + size) for start in range(0, len(positions), size)]
        make = lambda block: DecodeReplay(  # noqa: E731
            context, queries[:, :, block], positions[block], self.n_local
        )
        only = make(blocks[0]) if len(blocks) == 1 else None
        shape = (len(positions), context.n_contexts, queries.shape[1], len(self.tolerances))
        errors = torch.full(shape, torch.nan, device="cpu")
        for j, tolerance in enumerate(self.tolerances.tolist()):
            for block in blocks:
                found = (only or make(block)).errors(tolerance)
                errors[block, ..., j] = getattr(found, self.target).transpose(0, 1).cpu()
            missed = (~(errors[..., : j + 1] <= self.epsilon)).any(-1).float()  # (M, C, Hq)
            missed = missed.unflatten(-1, (context.n_kv_heads, -1)).mean(-1)
            missed = missed if self.scope == "head" else missed.mean(-1)
            if self.scope != "model" and bool((missed.sum(0) > n_allowed).all()):
                break
        return monotone_losses(errors, self.epsilon)
