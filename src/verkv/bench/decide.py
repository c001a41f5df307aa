"""What to fetch, decided in linear time, against one sort of the same rows and the reference, which sorts twice."""

import dataclasses

import torch
from torch import Tensor

from verkv.bench.settings import BenchSettings
from verkv.bench.timing import Comparison, compare
from verkv.estimators import binary_shrinkage, decode_inclusion_probs, fetch_plan, linear_plan
from verkv.estimators.compiled_plan import compiled_plan, compiles

DELTA = 0.1
SHAPES = [(8, 4, 8_192), (8, 4, 32_768), (8, 4, 131_072), (1, 4, 1_048_576)]  # KV heads, query heads of each, tokens
QUICK_SHAPES = [(2, 2, 1000), (2, 2, 4000)]


def run(settings: BenchSettings) -> list[Comparison]:
    """Time shrinkage, certificate and plan from the planning logits, exponential and denominator included.

    Parameters
    ----------
    settings : BenchSettings

    Returns
    -------
    list of Comparison
        One for each shape; growth in the number of tokens shows in them.
    """
    comparisons = []
    for shape in QUICK_SHAPES if settings.quick else SHAPES:
        logits, r, residual = make_rows(*shape, settings.seed, settings.torch_device)

        def decide_linear(logits=logits, r=r, residual=residual):
            weights, denominator = _weights(logits)
            return linear_plan(weights, r, residual, denominator, settings.epsilon, DELTA)

        def decide_by_sorting(logits=logits, r=r, residual=residual):
            weights, denominator = _weights(logits)
            everywhere = residual.expand_as(weights)
            shrinkage = binary_shrinkage(weights, r, everywhere)
            return fetch_plan(weights, r, shrinkage, everywhere, denominator, settings.epsilon, DELTA)

        def decide_compiled(logits=logits, r=r, residual=residual):
            weights, denominator = _weights(logits)
            return compiled_plan(weights, r, residual, denominator, settings.epsilon, DELTA)

        cases = {
            "one torch.sort": lambda logits=logits: torch.sort(logits, dim=-1),
            "decide, linear": decide_linear,
            "decide, reference (sorts)": decide_by_sorting,
        }
        if logits.is_cpu and compiles():
            cases["decide, compiled"] = decide_compiled
        n_heads, group, n_tokens = shape
        comparison = compare(
            f"decide: {n_heads * group} rows x {n_tokens:,} tokens",
            cases,
            "one torch.sort",
            rounds=settings.n_rounds(9),
            seed=settings.seed,
            device=settings.torch_device,
            threads=settings.threads,
        )
        plan, reference = decide_linear(), decide_by_sorting()
        facts = {
            "rows": n_heads * group,
            "tokens": n_tokens,
            "ns per row and token": 1e9 * comparison.median("decide, linear") / logits.numel(),
            "promoted": float(plan.n_promoted.double().mean() / n_tokens),
            "most tokens promoted beyond the reference": int((plan.n_promoted - reference.n_promoted).max()),
        }
        if "decide, compiled" in cases:
            facts["ns per row and token, compiled"] = 1e9 * comparison.median("decide, compiled") / logits.numel()
        comparisons.append(dataclasses.replace(comparison, facts=facts))
    return comparisons


def make_rows(
    n_heads: int, group: int, n_tokens: int, seed: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Logits (N, G, T), probabilities (N, 1, T) that rise with them, and the residual set; ends and outliers are known.

    Parameters
    ----------
    n_heads, group, n_tokens : int
    seed : int
    device : torch.device

    Returns
    -------
    tuple of Tensor
    """
    generator = torch.Generator().manual_seed(seed)
    logits = 2.0 * torch.randn(n_heads, group, n_tokens, generator=generator)
    noise = 8.0 * torch.randn(n_heads, n_tokens, generator=generator)
    levels = (33.0 + noise - 4.0 * logits.mean(1)).round().clamp(0, 127)
    levels[:, : n_tokens // 100] = 0
    levels[:, n_tokens - n_tokens // 100 :] = 0
    r = decode_inclusion_probs(levels.to(torch.uint8))[:, None]
    return logits.to(device), r.to(device), (r < 1).to(device)


def _weights(logits: Tensor) -> tuple[Tensor, Tensor]:
    weights = (logits - logits.amax(-1, keepdim=True)).exp()
    return weights, weights.sum(-1)
