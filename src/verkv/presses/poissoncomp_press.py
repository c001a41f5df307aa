"""PoissonComp: keep a Poisson sample of the tokens, drawn with probabilities from importance scores (Algorithm 1)."""

import copy
from dataclasses import dataclass, field

import torch
from torch import Tensor

from verkv.cache import unsealed_states
from verkv.checks import check_count
from verkv.context import SealedContext, SealPlan
from verkv.estimators.sampling import (
    MIN_INCLUSION_PROB,
    defensive_mixture,
    inclusion_probabilities,
    poisson_sample,
    quantize_inclusion_probs,
)
from verkv.estimators.thinning import Thinning, draw_survivors, surplus_levels
from verkv.kvfetch import FetchConfig
from verkv.presses.budget import LayerGeometry, solving_device, token_budget
from verkv.presses.eviction_press import check_budget_scope
from verkv.presses.prompt import Prompt
from verkv.presses.queries import Queries
from verkv.presses.resealing import chunked_prefill
from verkv.presses.scores import Scores, ScoreSource
from verkv.presses.sealing_press import BUDGET_SCOPES, SealingPress
from verkv.presses.size_budget import BudgetReport, SizeBudget, budget_report, make_room
from verkv.presses.sources import resolve_source
from verkv.sketches import Sketch
from verkv.sketches.fit import FittedSketch
from verkv.tiers import LEVEL_MASK, RESIDENT_BIT


@dataclass
class PoissonCompPress(SealingPress):
    """Keep a Poisson sample of the prompt's tokens and attend to it with Horvitz-Thompson weights, Algorithm 1 of [1]_.

    A token is kept with probability r = min(1, c tau) and then weighs 1 / r, so the softmax denominator and numerator
    are unbiased. Nothing is fetched: what was not sampled is gone.

    Parameters
    ----------
    press : object
        Where the scores tau come from: ``KVzipPress()``, ``FastKVzipPress()`` (VerKV's or KVPress'), any KVPress
        ``ScorerPress``, or ``AdaKVPress`` around one (without its ``alpha_safeguard``). It is not changed.
    compression_ratio : float in [0, 1), optional
        Fraction of the cache that is removed, all parts counted: 16x is 0.9375. Taken from ``press`` if not given.
    budget_tokens, budget_bytes : int > 0, optional
        Instead of a ratio, what one sequence's sealed context may take however long it becomes: resident tokens, as a
        mean over KV heads and layers, or bytes on the device in all sealed layers, every charged part counted. Kept to
        in expectation: each new segment thins the earlier ones' samples to make room. See :meth:`budget_report`.
    n_sink, n_local : int
        Leading and trailing context tokens that are always kept (with the chat template's prefix, for KVzip).
    alpha : float in [0, 1]
        Defensive mixture of the scores with their mean; 0 is the paper.
    budget_scope : {"head", "layer", "model"}, optional
        Whose tokens share a budget. Default "head", "layer" for AdaKV.
    seed : int or None
        Of the draw; None for a fresh one each time.
    audit : bool
        Keep the full context on the host and compare every decision with exact attention.

    References
    ----------
    .. [1] Jha et al., "Verify Before You Fetch", arXiv:2611.11319v1.

    Examples
    --------
    >>> press = PoissonCompPress(KVzipPress(), compression_ratio=0.9375)  # doctest: +SKIP
    >>> pipe(context, question=question, press=press)["answer"]  # doctest: +SKIP
    """

    press: object = None
    compression_ratio: float | None = None
    n_sink: int = 64
    n_local: int = 64
    alpha: float = 0.0
    budget_scope: str | None = None
    seed: int | None = 0
    audit: bool = False
    budget_tokens: int | None = field(default=None, kw_only=True)
    budget_bytes: int | None = field(default=None, kw_only=True)

    def __post_init__(self):
        super().__post_init__()
        resolve_source(self.press)  # refuses what gives no scores, now rather than after a prefill
        self._check_options()

    def __setattr__(self, name: str, value) -> None:
        if name == "compression_ratio" and value is None:
            value = getattr(self.press, "compression_ratio", 0.0)
        super().__setattr__(name, value)

    def source(self) -> ScoreSource:
        """The score source of ``press``."""
        return resolve_source(copy.copy(self.press))[0]

    def _check_options(self) -> None:
        self._size()
        check_count("n_sink", self.n_sink)
        check_count("n_local", self.n_local)
        alpha = self._mixture()
        if not isinstance(alpha, (int, float)) or not 0.0 <= alpha <= 1.0:
            raise ValueError(f"alpha must be a number in [0, 1], got {alpha!r}")
        if self.seed is not None and not -(2**63) <= check_count("seed", self.seed, least=-(2**63)) < 2**64:
            raise ValueError(f"seed must fit 64 bits, got {self.seed}")
        check_budget_scope(self._scope())

    def _size(self) -> SizeBudget | None:
        """The budget by size, where there is one."""
        if self.budget_tokens is None and self.budget_bytes is None:
            return None
        if self.compression_ratio > 0.0:
            raise ValueError(
                f"compression_ratio={self.compression_ratio:g} (also of the press inside) and a budget by size exclude "
                f"each other: leave one out"
            )
        return SizeBudget(self.budget_tokens, self.budget_bytes)

    @property
    def keeps_everything(self) -> bool:
        """Whether nothing is to be removed, and so nothing scored."""
        return super().keeps_everything and self._size() is None

    def check_growth(self, context: SealedContext) -> None:
        """Raise ValueError if the context was sealed under the other kind of budget."""
        has_size = context.rows.surplus is not None
        if has_size and self._size() is None:
            raise ValueError("the cache was sealed under a budget by size: go on with budget_tokens or budget_bytes")
        if not has_size and self._size() is not None:
            raise ValueError(
                "the cache was sealed with a compression_ratio, so that its sample cannot be thinned: go on with that, "
                "or prefill with budget_tokens or budget_bytes"
            )

    def budget_report(self, cache=None) -> BudgetReport:
        """How a cache that this press has sealed stands to the budget by size.

        Parameters
        ----------
        cache : transformers.Cache, optional
            The one that was handled last, by default.

        Raises
        ------
        ValueError
            If there is no budget by size, or no such cache.
        """
        size, cache = self._size(), cache if cache is not None else self._cache_ref and self._cache_ref()
        layers = [] if cache is None else [layer for layer in cache.layers if getattr(layer, "sealed", False)]
        if size is None or not layers or layers[0].context.rows.surplus is None:
            raise ValueError("budget_report needs budget_tokens or budget_bytes, and a cache that was sealed with it")
        return budget_report(size, [layer.context for layer in layers])

    def _scope(self) -> str:
        return self.budget_scope if self.budget_scope is not None else resolve_source(self.press)[1]

    def _n_protected_ends(self, n_tokens: int, prefix_length: int) -> tuple[int, int]:
        return max(self.n_sink, prefix_length), self.n_local

    # --- what VerKVPress changes ------------------------------------------------------------------------------------

    def _fetch_config(self) -> FetchConfig | None:
        return None

    def _sketch(self, model) -> Sketch | None:
        return None

    def _bytes_per_token(self) -> int:
        """What the plan keeps of every token."""
        return 0

    def _of_layer(self, sketch: Sketch, layer_idx: int) -> Sketch:
        """The sketch's recipe for one layer."""
        return sketch

    def _violation_options(self) -> dict[str, str | None]:
        """What audited steps do about violations: options of SealPlan."""
        return {}

    def _coded_host(self, layer_idx: int, keys: Tensor, values: Tensor, prompt: Prompt):
        """A host tier of coded rows, where there is to be one."""
        return None

    def _n_outliers(self, prompt: Prompt, sketch: Sketch, budget: Tensor) -> Tensor:
        """Tokens per KV head that are kept because their sketch is poor, (C,), of a budget (C,) of tokens; CPU."""
        raise NotImplementedError

    def _fit(
        self, sketch: Sketch, keys: Tensor, prompt: Prompt, queries: Tensor | None, n_outliers: Tensor
    ) -> FittedSketch | None:
        """Build the sketch before sealing, where that is needed to decide what is kept."""
        raise NotImplementedError

    # --- planning ---------------------------------------------------------------------------------------------------

    def _mixture(self) -> float:
        """The share of uniform sampling."""
        return self.alpha

    def _token_budget(self, prompt: Prompt, geometry: LayerGeometry, model, n_kept: Tensor) -> Tensor:
        """Of what is to be sealed; under a budget by size, of the whole context."""
        size = self._size()
        if size is not None:
            lengths, n_certain = prompt.lengths[:, None].cpu(), n_kept.cpu()
            if prompt.earlier is not None:
                lengths = torch.cat([prompt.earlier.cpu(), lengths], -1)
                n_certain = n_certain + prompt.n_certain_before
            n_layers = len(self.full_layers(model))
            sketch, n_bytes = self._sketch(model), self._bytes_per_token()
            return size.rows(lengths, n_certain, geometry, n_layers, sketch, n_bytes)
        return token_budget(
            prompt.lengths,
            n_kept,
            self.compression_ratio,
            geometry,
            self._sketch(model),
            bytes_per_token=self._bytes_per_token(),
            floor=MIN_INCLUSION_PROB,
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
        fetch, sketch = self._fetch_config(), self._sketch(model)
        budget, n_outliers = self._token_budget(prompt, geometry, model, prompt.n_protected), None
        if sketch is not None:
            n_outliers = self._n_outliers(prompt, sketch, budget * _share(prompt))
            budget = self._token_budget(prompt, geometry, model, prompt.n_protected.cpu() + n_outliers)
        plans, coded, expected, variance = {}, [], 0.0, 0.0
        for layers in self._budget_groups(sorted(scores)):
            device = solving_device(scores[layers[0]].device)
            stacked = torch.stack([scores[i].to(device) for i in layers], dim=1)  # (C, L, H, T)
            fitted, hosts = {}, {}
            if sketch is not None:
                for i in layers:
                    keys, values = (t[:: prompt.beams, :, : prompt.n_tokens] for t in unsealed_states(cache.layers[i]))
                    hosts[i] = self._coded_host(i, keys, values, prompt)
                    keys = keys if hosts[i] is None else hosts[i].keys.to(keys.device)
                    fitted[i] = self._fit(self._of_layer(sketch, i), keys, prompt, queries.get(i), n_outliers)
            coded += [host for host in hosts.values() if host is not None]
            outliers = [fitted[i].outliers.to(device) for i in layers if fitted.get(i) is not None]
            outliers = torch.stack(outliers, dim=1) if outliers else torch.zeros_like(stacked, dtype=torch.bool)
            thinning, of_group = self._room(cache, layers, budget.to(device), prompt, outliers, generator)
            codes, r, surplus = self._draw(stacked, of_group, prompt, outliers, generator)
            expected, variance = expected + float(r.sum()), variance + float((r * (1 - r)).sum())
            for j, i in enumerate(layers):
                plans[i] = SealPlan(
                    codes[:, j],
                    prompt.n_padding,
                    fetch=fetch,
                    sketch=sketch,
                    fitted=fitted.get(i),
                    keep_host=fetch is not None or chunked_prefill.get(),
                    audit=self.audit,
                    beams=prompt.beams,
                    is_token=prompt.is_token,
                    surplus=None if surplus is None else surplus[:, j],
                    thinning=thinning.get(i),
                    host=hosts.get(i),
                    **self._violation_options(),
                )
        return plans, [*self._notes(expected, variance, sketch), *_host_notes(coded)]

    def _budget_groups(self, layers: list[int]) -> list[list[int]]:
        """Layers solved together: all that share a budget, otherwise one by one to save memory."""
        return [layers] if self._scope() == "model" else [[i] for i in layers]

    def _room(
        self, cache, layers: list[int], budget: Tensor, prompt: Prompt, outliers: Tensor, generator: torch.Generator
    ) -> tuple[dict[int, Thinning], Tensor]:
        """How a group of layers is thinned, and the tokens that all who share a budget may keep: (C, L, H) or less."""
        shape, n_shared = outliers.shape[:-1], BUDGET_SCOPES[self._scope()] - 1
        shared = tuple(range(3 - n_shared, 3))
        n_heads = shape[3 - n_shared :].numel()
        total = (budget * n_heads).view(-1, *[1] * (2 - n_shared)).expand(shape[: 3 - n_shared])
        if prompt.earlier is None or self._size() is None:
            return {}, total
        summed = lambda t: t.sum(shared) if shared else t  # noqa: E731
        contexts = [cache.layers[i].context for i in layers]
        counts = [c.level_counts.view(c.n_contexts, c.n_kv_heads, -1) for c in contexts]
        n_new = prompt.lengths.cpu()[:, None, None].expand(shape)
        steps, of_group = make_room(
            summed(torch.stack(counts, 1)), total.cpu(), summed(n_new), summed(outliers.sum(-1).cpu())
        )
        steps = steps.view(*steps.shape, *[1] * n_shared).expand(shape)
        thinning = {}
        for j, (i, context) in enumerate(zip(layers, contexts, strict=True)):
            of_units, rows = steps[:, j].flatten(), context.rows
            if bool(of_units.any()):
                of_rows = of_units.to(rows.codes.device).repeat_interleave(rows.offsets.diff())
                kept = draw_survivors(rows.codes & LEVEL_MASK, rows.surplus, of_rows, generator)
                thinning[i] = Thinning(of_units, kept)
        return thinning, of_group.to(budget.device)

    def _draw(
        self, scores: Tensor, budget: Tensor, prompt: Prompt, outliers: Tensor, generator: torch.Generator
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Codes, inclusion probabilities and surplus (C, L, H, T) of a group of layers, given its budget."""
        shared_dims = BUDGET_SCOPES[self._scope()]
        protected = prompt.protected.to(scores.device)[:, None, None] | outliers
        absent = ~prompt.is_token.to(scores.device)[:, None, None]
        tau = defensive_mixture(scores, self._mixture(), eligible=~(protected | absent))
        r = inclusion_probabilities(
            tau.double(),
            budget,
            certain=protected,
            absent=absent,
            floor=MIN_INCLUSION_PROB,
            shared_dims=shared_dims,
        )
        exact = r
        levels, r = quantize_inclusion_probs(exact, absent=absent, shared_dims=shared_dims)
        surplus = None
        if self._size() is not None:
            masks = {"certain": protected, "absent": absent}
            surplus = surplus_levels(tau, exact, levels, shared_dims=shared_dims, **masks)
        sampled = poisson_sample(r, generator)
        return levels | (sampled.to(torch.uint8) * RESIDENT_BIT), r, surplus

    def _notes(self, expected: float, variance: float, sketch: Sketch | None) -> list[str]:
        return [
            f"the sample's size varies with the draw: {expected:.0f} rows expected over all heads, standard deviation "
            f"{variance**0.5:.0f}"
        ]


def _host_notes(coded: list) -> list[str]:
    """What a user must know of host tiers that hold their rows coded with loss."""
    if not coded:
        return []
    key_error, value_error = (sum(c.tier_error[f"{n}_error"] for c in coded) / len(coded) for n in ("key", "value"))
    return [
        f"the host tier is coded: relative error of its keys {key_error:.3f}, of its values {value_error:.3f} (mean "
        f"over layers); bounds, calibration and audit refer to the restored cache"
    ]


def _share(prompt: Prompt) -> Tensor:
    """Of a context's tokens, those that are to be sealed now; (C,), on the CPU."""
    lengths = prompt.lengths.cpu().double()
    return lengths / (lengths if prompt.earlier is None else lengths + prompt.first.cpu()).clamp_min(1)
