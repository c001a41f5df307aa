"""Figure 2: the mean squared error of the denominator as more tokens are shrunk, for one query row.

    python experiments/figure2_shrinkage.py
    python experiments/figure2_shrinkage.py --preset paper

Tokens are switched from lambda = 1 to lambda = r in the order of w (1 - r) / r. The order and where to stop come from
exact weights, or, as deployed, from those of the 2-bit sketch; the error is always computed with exact weights. Nothing
is random here: the estimator's error is known in closed form, Eq. (6). Beside one row, all rows of the step are summed
up, for one row may be special.
"""

from dataclasses import dataclass

import numpy as np
import torch
from paper_items import main, paper_table, write
from scored_prompt import N_PROTECTED, ScoredPrompt, load_prompt, prompt_parser
from torch import Tensor

from verkv.attention import observe_attention
from verkv.estimators import (
    MIN_INCLUSION_PROB,
    binary_shrinkage,
    inclusion_probabilities,
    quantize_inclusion_probs,
)
from verkv.report import plots
from verkv.sketches import RopePairSketch

COMPRESSION = 16.0


@dataclass(frozen=True)
class Curve:
    """Errors of all prefixes of an order, and which prefix is chosen.

    Attributes
    ----------
    errors : Tensor, shape (..., T + 1)
        Mean squared error over the unbiased estimator's with the first 0, 1, ... tokens of the order shrunk.
    n_shrunk : Tensor, shape (...,), int64
        Where the weights that gave the order stop.
    """

    errors: Tensor
    n_shrunk: Tensor

    @property
    def chosen(self) -> Tensor:
        """Error at the chosen prefix."""
        return self.errors.gather(-1, self.n_shrunk[..., None])[..., 0]


def curve(weights: Tensor, order_weights: Tensor, r: Tensor, residual: Tensor) -> Curve:
    """The error along the order that some weights give.

    Parameters
    ----------
    weights, order_weights : Tensor, shape (..., T), float64
        Exact weights; those that order and stop.
    r : Tensor, shape (..., T)
        Inclusion probabilities.
    residual : Tensor, shape (..., T), bool
    """
    shrinkage = binary_shrinkage(order_weights, r, residual)
    inside = torch.where(residual, weights, 0.0)
    odds = torch.where(residual, (1.0 - r) / r, 0.0)
    order = torch.where(residual, order_weights * odds, -1.0).argsort(dim=-1, descending=True)
    bias = (inside * (1.0 - r)).gather(-1, order).cumsum(-1)
    at_one = inside.square() * odds  # variance with lambda = 1; with lambda = r it is r^2 of that
    saved = (at_one * (1.0 - r.square())).gather(-1, order).cumsum(-1)
    start = at_one.sum(-1, keepdim=True)
    errors = torch.cat([start, bias.square() + start - saved], dim=-1) / start
    return Curve(errors, ((shrinkage < 1) & residual).sum(-1))


@torch.inference_mode()
def query_rows(prompt: ScoredPrompt, n_steps: int) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
    """Queries of dense attention's decode step ``n_steps``, scaled, and keys of the context, by layer."""
    cache, next_ids = prompt.scored.fork(), prompt.question_ids
    queries: dict[int, Tensor] = {}

    def observe(module, query, key, scaling):
        queries[module.layer_idx] = query[:, :, -1:].double() * scaling

    with observe_attention(observe):
        for _ in range(1 + n_steps):
            next_ids = prompt.model(input_ids=next_ids, past_key_values=cache).logits[:, -1:].argmax(-1)
    keys = {i: cache.layers[i].keys[:, :, : prompt.scored.n_tokens] for i in queries}
    return queries, keys


def layer_curves(scores: Tensor, query: Tensor, keys: Tensor, certain: Tensor) -> tuple[Curve, Curve, Tensor]:
    """Curves by exact weights and by the sketch's, (1, Hkv, G), and the residual set (1, Hkv, 1, T)."""
    n_tokens, head_dim, group = keys.shape[2], keys.shape[3], query.shape[1] // keys.shape[1]
    row_bytes = 2 * head_dim * keys.element_size()
    budget = n_tokens / COMPRESSION - RopePairSketch().charged_bytes(n_tokens, head_dim) / row_bytes
    probabilities = inclusion_probabilities(scores, budget, certain=certain, floor=MIN_INCLUSION_PROB)
    r = quantize_inclusion_probs(probabilities)[1][:, :, None].double()
    rows = query.unflatten(1, (-1, group))[:, :, :, 0]  # (1, Hkv, G, d)
    logits = rows @ keys.double().mT
    sketched = RopePairSketch().build(keys).logits(rows.float()).double()
    weights = (logits - logits.amax(-1, keepdim=True)).exp()
    sketch_weights = (sketched - logits.amax(-1, keepdim=True)).exp()
    residual = r < 1
    r, residual = r.expand_as(weights), residual.expand_as(weights)
    return curve(weights, weights, r, residual), curve(weights, sketch_weights, r, residual), residual


def all_curves(prompt: ScoredPrompt, n_steps: int, n_protected: int) -> dict[int, tuple[Curve, Curve, Tensor]]:
    """Of every layer."""
    queries, keys = query_rows(prompt, n_steps)
    scores, prefix_length = prompt.scored.scores[prompt.source], prompt.scored.prefix_lengths[prompt.source]
    position = torch.arange(prompt.scored.n_tokens, device=prompt.model.device)
    certain = (position < prefix_length + n_protected) | (position >= len(position) - n_protected)
    return {i: layer_curves(scores[i].float(), queries[i], keys[i], certain) for i in queries if i in scores}


def rows_of(curves: dict, layer: int, head: int) -> list[dict]:
    """The chosen row, the median over all rows, and the paper's."""
    told = {row["weights"]: row for row in paper_table("figure2_shrinkage")}
    chosen, found = curves[layer], []
    n_residual = int(chosen[2].flatten(0, 2)[head].sum())
    for place, weights in ((0, "exact"), (1, "2-bit sketch")):
        one = chosen[place]
        every = torch.cat([c[place].chosen.flatten() for c in curves.values()])
        shrunk = int(one.n_shrunk.flatten()[head])
        found.append(_row(weights, shrunk, n_residual, float(one.chosen.flatten()[head]), every, told[weights]))
    last = torch.cat([c[0].errors[..., -1].flatten() for c in curves.values()])
    one = float(chosen[0].errors.flatten(0, -2)[head, -1])
    return [*found, _row("all shrunk", n_residual, n_residual, one, last, told["all shrunk"])]


def _row(weights: str, shrunk: int, n_residual: int, error: float, every: Tensor, told: dict) -> dict:
    quartiles = every[torch.isfinite(every)].quantile(torch.tensor([0.25, 0.5, 0.75], dtype=every.dtype)).tolist()
    return {
        "weights": weights,
        "tokens shrunk": shrunk,
        "of": n_residual,
        "MSE / unbiased": error,
        "paper's": told["relative_mse"],
        "paper's tokens": int(told["tokens_shrunk"]),
        "median of all rows": quartiles[1],
        "quartile 1": quartiles[0],
        "quartile 3": quartiles[2],
    }


@plots.styled
def picture(curves: dict, layer: int, head: int):
    """Error along both orders against the share of tokens shrunk, with the chosen prefixes marked."""
    figure, axes = plots.start(2)
    exact, sketch, residual = curves[layer]
    n_residual = int(residual.flatten(0, 2)[head].sum())
    share = np.arange(1, n_residual + 1) / n_residual
    looks = (
        (exact, "order and stop by exact weights", "#009E73", "^"),
        (sketch, "by the 2-bit sketch's", "#D55E00", "s"),
    )
    for one, label, colour, marker in looks:
        errors = one.errors.flatten(0, -2)[head, 1 : n_residual + 1].cpu()
        axes.plot(share, errors, color=colour, label=label)
        shrunk = int(one.n_shrunk.flatten()[head])
        if shrunk:
            axes.plot([share[shrunk - 1]], [errors[shrunk - 1]], color=colour, marker=marker, markersize=8)
    axes.axhline(1, color=plots.GREY, linestyle="--", linewidth=1.2)
    axes.set(
        xscale="log", yscale="log", xlabel="share of the residual tokens with λ = r", ylabel="MSE over unbiased (ratio)"
    )
    plots.legend_below(figure, axes, ncols=1)
    return figure


def usual_row(curves: dict) -> tuple[int, int]:
    """The row whose error at the exact stop is the median, so that the picture shows a usual one."""
    every = [
        (float(e), i, h) for i, c in curves.items() for h, e in enumerate(c[0].chosen.flatten().tolist()) if e == e
    ]
    _, layer, head = sorted(every)[len(every) // 2]
    return layer, head


def run(options) -> None:
    """Run, print, write."""
    prompt = load_prompt(options)
    curves = all_curves(prompt, options.step, N_PROTECTED[options.preset])
    usual = usual_row(curves)
    layer = usual[0] if options.layer is None else options.layer
    head = usual[1] if options.head is None else options.head
    n_heads = curves[usual[0]][0].chosen.numel()
    if layer not in curves or not 0 <= head < n_heads:
        raise ValueError(
            f"--layer {layer} --head {head}: the model has layers {min(curves)} to {max(curves)}, {n_heads} heads"
        )
    n_tokens = prompt.scored.n_tokens
    print(f"{prompt.name}, cwe, {n_tokens:,} context tokens, {COMPRESSION:g}x, layer {layer}, query head {head}\n")
    write(options, rows_of(curves, layer, head), picture(curves, layer, head))


def options_parser():
    """Options of this script."""
    made = prompt_parser(__doc__, "figure2_shrinkage")
    made.add_argument("--layer", type=int, help="of the row (default: the row whose error is the median)")
    made.add_argument("--head", type=int, help="query head of the row")
    made.add_argument("--step", type=int, default=21, help="decode step of the query, as in the paper (default: 21)")
    return made


if __name__ == "__main__":
    main(run, options_parser().parse_args())
