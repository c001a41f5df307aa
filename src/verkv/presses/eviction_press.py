"""Deterministic eviction of the lowest scores: the baselines' way, as inclusion probabilities of 0 and 1."""

from dataclasses import dataclass

import torch
from torch import Tensor

from verkv.checks import check_count
from verkv.context import SealPlan
from verkv.presses.budget import LayerGeometry, token_budget
from verkv.presses.prompt import Prompt
from verkv.presses.queries import Queries
from verkv.presses.resealing import chunked_prefill
from verkv.presses.scores import Scores
from verkv.presses.sealing_press import BUDGET_SCOPES, SealingPress
from verkv.tiers import RESIDENT_BIT


@dataclass
class EvictionPress(SealingPress):
    """Keep the tokens with the highest scores and drop the others for good.

    Memory is really saved: evicted rows are neither on the device nor on the host (unless ``audit`` needs the host).

    Parameters
    ----------
    compression_ratio : float in [0, 1)
        Fraction of the cache that is removed: 16x is 0.9375.
    budget_scope : {"model", "layer", "head"}
        Which tokens compete: those of the whole model, of a layer, or of a KV head.
    n_sink : int
        Leading tokens that are always kept.
    audit : bool
        Compare every decision with exact attention over the host's copy.
    """

    compression_ratio: float = 0.0
    budget_scope: str = "model"
    n_sink: int = 4
    audit: bool = False

    def __post_init__(self):
        super().__post_init__()
        self._check_options()

    def _check_options(self) -> None:
        check_count("n_sink", self.n_sink)
        check_budget_scope(self.budget_scope)

    def _n_protected_ends(self, n_tokens: int, prefix_length: int) -> tuple[int, int]:
        return self.n_sink, 0  # the methods' own rule; a template's prefix is evicted if its scores are low

    def _token_budget(self, prompt: Prompt, geometry: LayerGeometry, model, n_kept: Tensor) -> Tensor:
        return token_budget(
            prompt.lengths, n_kept, self.compression_ratio, geometry, None, bytes_per_token=0, floor=0.0
        )

    def _plans(
        self,
        scores: Scores,
        prompt: Prompt,
        geometry: LayerGeometry,
        model,
        cache,
        queries: Queries,
        generator: torch.Generator,
    ) -> tuple[dict[int, SealPlan], list[str]]:
        budget = self._token_budget(prompt, geometry, model, prompt.n_protected)
        layers = sorted(scores)
        stacked = torch.stack([scores[i].to(scores[layers[0]].device) for i in layers], dim=1)  # (C, L, H, T)
        kept = top_tokens(stacked, budget, prompt.protected, prompt.is_token, BUDGET_SCOPES[self.budget_scope])
        codes = kept.to(torch.uint8) * RESIDENT_BIT
        plans = {
            i: SealPlan(
                codes[:, j],
                prompt.n_padding,
                keep_host=chunked_prefill.get(),
                audit=self.audit,
                beams=prompt.beams,
                is_token=prompt.is_token,
            )
            for j, i in enumerate(layers)
        }
        return plans, ["evicted tokens are gone: neither on the device nor on the host"] if not self.audit else []


def top_tokens(scores: Tensor, budget: Tensor, protected: Tensor, is_token: Tensor, shared_dims: int) -> Tensor:
    """The highest-scored tokens within a budget, protected ones first.

    Parameters
    ----------
    scores : Tensor, shape (C, L, H, T)
    budget : Tensor, shape (C,)
        Tokens per KV head; those of the ``shared_dims`` trailing axes are added up and rounded down.
    protected, is_token : Tensor, shape (C, T), bool
    shared_dims : int

    Returns
    -------
    Tensor, shape (C, L, H, T), bool
    """
    spread = lambda mask: mask[:, None, None].expand_as(scores)  # noqa: E731
    ranked = scores.masked_fill(spread(protected), torch.inf).masked_fill(~spread(is_token), -torch.inf)
    n_groups = scores.dim() - shared_dims
    flat = ranked.flatten(n_groups)
    n_heads = scores.shape[n_groups:-1].numel()
    n_kept = (budget * n_heads).floor().long().to(scores.device)  # float64 stays on the CPU: MPS has none
    n_kept = n_kept.view(-1, *[1] * (n_groups - 1)).expand(flat.shape[:-1])
    order = flat.argsort(dim=-1, descending=True, stable=True)
    rank = torch.empty_like(order).scatter(-1, order, torch.arange(flat.shape[-1], device=flat.device).expand_as(order))
    return (rank < n_kept[..., None]).reshape(scores.shape) & spread(is_token)


def check_budget_scope(scope: str) -> None:
    """Raise ValueError unless the scope is one of the three."""
    if not isinstance(scope, str) or scope not in BUDGET_SCOPES:
        raise ValueError(f"budget_scope must be one of {sorted(BUDGET_SCOPES)}, got {scope!r}")
