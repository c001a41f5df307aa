"""Random layers in the library's own formats, and what the kernels must answer: the estimators in float64."""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from verkv.estimators.certificate import bernstein_certificate
from verkv.estimators.fetching import FetchPlan, certificate_drop, fetch_plan
from verkv.estimators.sampling import (
    MIN_INCLUSION_PROB,
    decode_inclusion_probs,
    inclusion_probabilities,
    poisson_sample,
    quantize_inclusion_probs,
)
from verkv.estimators.shrinkage import binary_shrinkage, mean_squared_error
from verkv.sketches import RopePairSketch
from verkv.tiers import LEVEL_MASK, RESIDENT_BIT, ResidentRows


@dataclass
class Layer:
    """A sealed layer of C contexts of H KV heads, and R query rows for each of their N = C * H units."""

    keys: Tensor  # (C, H, T, d)
    values: Tensor
    codes: Tensor  # (C, H, T)
    rows: ResidentRows
    row_positions: Tensor  # (M,)
    sketch: RopePairSketch
    query: Tensor  # (N, R, d), float32
    tail_lse: Tensor  # (N, R)
    scaling: float

    @property
    def unit_codes(self) -> Tensor:
        """Codes by unit, (N, T)."""
        return self.codes.flatten(0, 1)

    @property
    def resident(self) -> Tensor:
        """Which tokens of each unit are on the device, (N, T)."""
        return (self.unit_codes & RESIDENT_BIT) != 0

    @property
    def residual(self) -> Tensor:
        """Which tokens of each unit have 0 < r < 1, (N, T)."""
        return (self.unit_codes & LEVEL_MASK) > 0

    def inputs(self) -> dict[str, np.ndarray]:
        """What the kernels read, by the names of ``struct Params``."""
        tensors = {
            "query": self.query,
            "codes": self.unit_codes,
            "channels": self.sketch._channels,
            "sketch": self.sketch._codes,
            "zero": self.sketch._zero,
            "scale": self.sketch._scale,
            "row_keys": self.rows.keys,
            "row_values": self.rows.values,
            "row_codes": self.rows.codes,
            "row_positions": self.row_positions,
            "row_offsets": self.rows.offsets,
            "host_keys": self.keys,
            "host_values": self.values,
            "tail_lse": self.tail_lse,
        }
        return {name: as_array(tensor) for name, tensor in tensors.items()}


def as_array(tensor: Tensor) -> np.ndarray:
    """The tensor's memory; 16-bit floats as int16."""
    tensor = tensor.contiguous()
    return (tensor.view(torch.int16) if tensor.element_size() == 2 else tensor).numpy()


def make_layer(
    n_tokens: int,
    n_rows: int = 4,
    head_dim: int = 128,
    dtype: torch.dtype = torch.bfloat16,
    n_contexts: int = 1,
    n_kv_heads: int = 2,
    sharpness: float = 1.0,
    fraction: float = 0.06,
    n_padding: int = 0,
    seed: int = 0,
) -> Layer:
    """Keys with strong channels, a sink and a few needles per query row; the last context is padded on the left."""
    generator = torch.Generator().manual_seed(seed)
    normal = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    n_units, T = n_contexts * n_kv_heads, n_tokens
    query = normal(n_units, n_rows, head_dim) * sharpness
    keys = normal(n_units, T, head_dim) * (0.5 * normal(n_units, 1, head_dim)).exp()
    for unit in range(n_units):
        for row in query[unit]:
            needles = torch.randint(0, T, (12,), generator=generator)
            keys[unit, needles] += row / sharpness * (0.3 + 0.9 * torch.rand(12, 1, generator=generator))
            keys[unit, :4] += 0.5 * row / sharpness / n_rows
    keys = keys.to(dtype).unflatten(0, (n_contexts, n_kv_heads))
    values = normal(n_contexts, n_kv_heads, T, head_dim).to(dtype)
    scaling = head_dim**-0.5

    best = (query @ keys.flatten(0, 1).float().mT * scaling).amax(1).unflatten(0, (n_contexts, n_kv_heads))
    scores = torch.exp(0.5 * best + normal(n_contexts, n_kv_heads, T))
    position = torch.arange(T)
    padding = torch.zeros(n_contexts, 1, 1, dtype=torch.long)
    padding[-1] = min(n_padding, T - 1)
    absent = (position < padding).expand_as(scores)
    n_protected = min(64, T // 8)
    certain = ((position < padding + n_protected) | (position >= T - n_protected)) & ~absent
    present = (~absent[:, 0]).sum(-1)
    floor = MIN_INCLUSION_PROB
    budget = (certain[:, 0].sum(-1) + fraction * present).clamp(max=present).double()
    r = inclusion_probabilities(scores, budget[:, None], certain=certain, absent=absent, floor=floor, shared_dims=1)
    levels, r = quantize_inclusion_probs(r, absent=absent)
    codes = levels | (poisson_sample(r, generator).to(torch.uint8) * RESIDENT_BIT)
    rows = ResidentRows.gather(keys, values, codes)
    positions = ((codes.flatten(0, 1) & RESIDENT_BIT) != 0).nonzero()[:, 1].int()
    tail_lse = normal(n_units, n_rows)
    tail_lse[:, 0] = -torch.inf  # a row that has no tail
    return Layer(keys, values, codes, rows, positions, RopePairSketch().build(keys), query, tail_lse, scaling)


@dataclass
class Answer:
    """What float64 says about R query rows of N units."""

    weights: Tensor  # (N, R, T): planning weights
    denominator: Tensor  # (N, R)
    inclusion_probs: Tensor  # (N, 1, T)
    residual: Tensor  # (N, R, T)
    shrinkage: Tensor  # (N, R, T)
    plan: FetchPlan
    delta: float
    upper_share: float | None

    def bound(self, promoted: Tensor) -> Tensor:
        """The bound of every row, (N, R), once a set (N, R, T) is promoted."""
        left = self.residual & ~promoted
        certificate = bernstein_certificate(
            self.weights, self.inclusion_probs, self.shrinkage, left, self.denominator, self.delta, self.upper_share
        )
        return certificate.error_bound

    def order(self) -> tuple[Tensor, Tensor]:
        """The drop that the greedy order goes by, (N, R, T), and the tokens from the largest drop on."""
        drop = certificate_drop(
            self.weights, self.inclusion_probs, self.shrinkage, self.residual, self.denominator, self.delta
        )
        drop = torch.where(self.residual, drop, -torch.inf)
        return drop, drop.argsort(dim=-1, descending=True, stable=True)

    def squared_error(self) -> Tensor:
        """What shrinkage minimises, (N, R)."""
        return mean_squared_error(self.weights, self.inclusion_probs, self.shrinkage, self.residual)


def solve(
    logits: Tensor,
    tail_lse: Tensor,
    codes: Tensor,
    epsilon: float,
    delta: float,
    known: Tensor | None = None,
    sigma2: Tensor | None = None,
    shrunk: Tensor | None = None,
    upper_share: float | None = None,
) -> Answer:
    """Algorithm 2, lines 2-10, in float64 with sorts, on the logits that the kernels planned with.

    A token whose weight is not ``known`` has planning weight exp(logit + sigma2), and enters the denominator as
    exp(logit + sigma2 / 2). With ``shrunk`` (N, R, T), shrinkage is taken from there instead of being solved for.
    """
    levels = codes & LEVEL_MASK
    residual = levels > 0
    logits = logits.double().masked_fill((codes == 0)[:, None], -torch.inf)
    extra = torch.zeros_like(logits)
    if sigma2 is not None:
        unknown = residual if known is None else residual & ~known
        extra = torch.where(unknown[:, None], sigma2.double()[..., None], 0.0)
    peak = torch.maximum((logits + extra).amax(-1), tail_lse.double())[..., None]
    weights = (logits + extra - peak).exp()
    denominator = (logits + extra / 2 - peak).exp().sum(-1) + (tail_lse.double() - peak[..., 0]).exp()
    r = decode_inclusion_probs(levels, torch.float64)[:, None]
    inside = residual[:, None].expand_as(weights)
    if shrunk is None:
        shrinkage = binary_shrinkage(weights, r, inside)
    else:
        shrinkage = torch.where(shrunk, r.expand_as(weights), 1.0)
    plan = fetch_plan(weights, r, shrinkage, inside, denominator, epsilon, delta, upper_share)
    return Answer(weights, denominator, r, inside, shrinkage, plan, delta, upper_share)


def attend(layer: Layer, union: Tensor, shrunk: Tensor) -> tuple[Tensor, Tensor]:
    """Output (N, R, d) and log-denominator (N, R) in float64, for promoted tokens (N, T) and shrunk ones (N, R, T)."""
    keys, values = (x.flatten(0, 1).double() for x in (layer.keys, layer.values))
    levels = layer.unit_codes & LEVEL_MASK
    log_weight = (levels * (math.log(2) / 8)).double()[:, None].expand_as(shrunk)
    log_weight = torch.where(shrunk | union[:, None], 0.0, log_weight)
    log_weight = torch.where((layer.resident | union)[:, None], log_weight, -torch.inf)
    logits = layer.query.double() @ keys.mT * layer.scaling + log_weight
    lse = logits.logsumexp(-1)
    return (logits - lse[..., None]).exp() @ values, lse


def make_rows(kind: str, n_units: int, n_rows: int, n_tokens: int, generator: torch.Generator) -> Tensor:
    """Planning logits (N, R, T) of a named shape."""
    shape = (n_units, n_rows, n_tokens)
    normal = torch.randn(shape, generator=generator)
    uniform = torch.rand(shape, generator=generator)
    if kind == "flat":
        return 0.3 * normal
    if kind == "peaked":
        return 6.0 * normal
    if kind == "heavy_tailed":
        return 1.5 * normal + torch.where(uniform < 20 / n_tokens, 4 + 8 * torch.rand(shape, generator=generator), 0.0)
    if kind == "tied":
        return (4.0 * normal).round() / 2
    if kind == "constant":
        return torch.full(shape, 3.7)
    if kind == "one_huge_weight":
        normal[..., n_tokens // 2] = 60.0
        return normal
    raise ValueError(kind)


def make_codes(kind: str, n_units: int, n_tokens: int, generator: torch.Generator) -> Tensor:
    """Codes (N, T) with inclusion probabilities of a named shape, and a draw; the last unit is padded."""
    normal = torch.randn(n_units, n_tokens, generator=generator)
    levels = {
        "spread": (20 + 10 * normal).clamp(0, LEVEL_MASK),
        "at_the_floor": torch.full_like(normal, LEVEL_MASK),
        "all_alike": torch.full_like(normal, 30.0),
        "certain": torch.zeros_like(normal),
        "nearly_certain": (2 + normal.abs()).clamp_max(LEVEL_MASK),
    }[kind]
    levels = levels.round().to(torch.uint8)
    levels[:, : n_tokens // 16] = 0
    drawn = poisson_sample(decode_inclusion_probs(levels), generator)
    codes = levels | drawn.to(torch.uint8) * RESIDENT_BIT
    codes[-1, : n_tokens // 5] = 0
    return codes


def pack(mask: Tensor) -> np.ndarray:
    """A mask (..., T) as 32-bit words."""
    missing = -mask.shape[-1] % 32
    bits = np.pad(mask.numpy(), [(0, 0)] * (mask.dim() - 1) + [(0, missing)])
    return np.packbits(bits, axis=-1, bitorder="little").view(np.int32)
