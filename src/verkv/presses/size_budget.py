"""A budget by size, for a context that grows: a number of tokens or of bytes that all segments share."""

from dataclasses import dataclass

import torch
from torch import Tensor

from verkv.checks import check_count
from verkv.estimators.sampling import MIN_INCLUSION_PROB
from verkv.estimators.thinning import expected_rows, n_protected, thin_counts, thinning_steps, variance_of_rows
from verkv.presses.budget import OFFSET_BYTES, BudgetTooSmall, LayerGeometry
from verkv.sketches import Sketch

CODE_BYTES = 2  # of a resident row: its probability, and the surplus of its score


@dataclass(frozen=True)
class SizeBudget:
    """What one sequence's sealed context may take, in all its segments; one of the two is given.

    Attributes
    ----------
    tokens : int or None
        Expected resident tokens, mean over KV heads and layers.
    n_bytes : int or None
        Expected bytes on the device of all sealed layers together, every charged part counted.
    """

    tokens: int | None
    n_bytes: int | None

    def __post_init__(self):
        for name, value in (("budget_tokens", self.tokens), ("budget_bytes", self.n_bytes)):
            if value is not None:
                check_count(name, value, least=1)
        if self.tokens is not None and self.n_bytes is not None:
            raise ValueError("budget_tokens and budget_bytes are both given: leave one out")

    def rows(
        self,
        lengths: Tensor,
        n_certain: Tensor,
        geometry: LayerGeometry,
        n_layers: int,
        sketch: Sketch | None,
        bytes_per_token: int,
    ) -> Tensor:
        """Expected resident rows per KV head that the budget pays for, in all segments.

        Parameters
        ----------
        lengths : Tensor, shape (C, S), int64
            Real tokens of every segment, the one that is to be sealed included.
        n_certain : Tensor, shape (C,), int64
            Tokens per KV head that are always kept.
        geometry : LayerGeometry
        n_layers : int
            Layers that are sealed.
        sketch : Sketch or None
            One per segment.
        bytes_per_token : int
            Kept on the device of every token for the plan.

        Returns
        -------
        Tensor, shape (C,), float64
            On the CPU; at most all tokens.

        Raises
        ------
        BudgetTooSmall
            If the parts that do not depend on the sample exceed the budget: names them and the smallest that works.
        """
        lengths, n_certain = lengths.cpu(), n_certain.cpu().double()
        n_tokens = lengths.sum(-1).double()
        least_rows = n_certain + MIN_INCLUSION_PROB * (n_tokens - n_certain)
        if self.tokens is not None:
            allowed = torch.full_like(n_tokens, float(self.tokens))
            self._check(allowed, least_rows, {"protected tokens": n_certain}, lengths, 1.0)
            return torch.minimum(allowed, n_tokens)
        n_units = n_layers * geometry.n_units
        row_bytes = geometry.token_bytes + CODE_BYTES
        parts = {
            "sketches": _sketch_bytes(sketch, lengths, geometry.key_dim),
            "inclusion probabilities and norms": bytes_per_token * n_tokens,
            "row offsets": torch.full_like(n_tokens, OFFSET_BYTES * (geometry.n_units + 1) / geometry.n_units),
        }
        fixed = sum(parts.values())
        allowed = torch.full_like(n_tokens, self.n_bytes / n_units)
        parts = {"protected tokens (n_sink, n_local, template prefix, outliers)": n_certain * row_bytes} | parts
        self._check(allowed, fixed + least_rows * row_bytes, parts, lengths, n_units)
        return torch.minimum((allowed - fixed) / row_bytes, n_tokens)

    def _check(self, allowed: Tensor, least: Tensor, parts: dict, lengths: Tensor, factor: float) -> None:
        short = allowed < least
        if not bool(short.any()):
            return
        i = int((least - allowed).argmax())
        name, unit = ("budget_tokens", "tokens") if self.tokens is not None else ("budget_bytes", "bytes")
        listed = ", ".join(f"{part} {factor * float(size[i]):,.0f}" for part, size in parts.items())
        needed = int(factor * float(least[i])) + 1
        raise BudgetTooSmall(
            f"{name}={self.tokens or self.n_bytes} is too small for a context of {int(lengths[i].sum()):,} tokens in "
            f"{lengths.shape[1]} segment(s), whose fixed parts need {needed:,} {unit}: {listed}; use {name} >= "
            f"{needed}, or protect fewer tokens"
        )


def _sketch_bytes(sketch: Sketch | None, lengths: Tensor, key_dim: int) -> Tensor:
    sizes = [[sketch.charged_bytes(n, key_dim) if sketch and n else 0 for n in row] for row in lengths.tolist()]
    return torch.tensor(sizes, dtype=torch.float64).sum(-1)


def make_room(counts: Tensor, total: Tensor, n_new: Tensor, n_certain: Tensor) -> tuple[Tensor, Tensor]:
    """How far earlier segments' samples are thinned for a new segment, and what that leaves to it.

    Every token that is not protected gets about the same share of the budget, of whatever segment. What the grid of
    probabilities leaves over goes to the new segment.

    Parameters
    ----------
    counts : Tensor, shape (..., 256), int64
        Of the earlier segments' tokens, see :func:`verkv.estimators.thinning.count_levels`.
    total : Tensor, shape (...), float64
        Expected rows in all.
    n_new, n_certain : Tensor, shape (...)
        Tokens of the new segment, and those of them that are always kept.

    Returns
    -------
    steps : Tensor, shape (...), int64
    budget : Tensor, shape (...), float64
        Expected rows of the new segment, at most ``n_new``.

    Raises
    ------
    BudgetTooSmall
        If the new segment's protected tokens do not fit beside those of the earlier ones.
    """
    certain_before, n_before = n_protected(counts).double(), counts.sum(-1).double()
    n_new, n_certain = n_new.double(), n_certain.double()
    free_before, free_new = n_before - certain_before, n_new - n_certain
    share = free_before / (free_before + free_new).clamp_min(1)
    target = certain_before + share * (total - certain_before - n_certain)
    steps = thinning_steps(counts, torch.maximum(target, total - n_new))
    budget = torch.minimum(total - expected_rows(thin_counts(counts, steps)), n_new)
    if bool((budget < n_certain + MIN_INCLUSION_PROB * free_new).any()):
        raise BudgetTooSmall(
            f"the budget pays for {float(total.mean()):.1f} rows, but protected tokens alone, of the earlier segments "
            f"and of the new one, are {float((certain_before + n_certain).max()):.0f}: raise it or protect fewer tokens"
        )
    return steps, budget


@dataclass(frozen=True)
class BudgetReport:
    """How a sealed cache stands to its budget.

    Attributes
    ----------
    unit : {"bytes", "tokens"}
        Bytes of all sealed layers, or resident tokens as a mean over KV heads and layers.
    budget : float
        Of all sequences of the batch, in bytes; of each, in tokens.
    expected : float
        Its expectation given the probabilities: what depends on the sum of r, and not on the draw.
    standard_deviation : float
        Of the draw around that.
    realised : float
        What is there.
    """

    unit: str
    budget: float
    expected: float
    standard_deviation: float
    realised: float

    @property
    def headroom(self) -> float:
        """What the budget leaves, in expectation."""
        return self.budget - self.expected

    def __str__(self) -> str:
        return (
            f"{self.realised:,.0f} {self.unit} of {self.budget:,.0f}: {self.expected:,.0f} expected, standard "
            f"deviation {self.standard_deviation:,.0f}, headroom {self.headroom:,.0f}"
        )


def budget_report(size: SizeBudget, contexts: list) -> BudgetReport:
    """The report of a cache's sealed contexts.

    Parameters
    ----------
    size : SizeBudget
    contexts : list of SealedContext
        Of all sealed layers, sealed under a budget by size.
    """
    counts = sum(context.level_counts.sum(0) for context in contexts)
    n_rows = sum(len(context.rows.codes) for context in contexts)
    n_expected, deviation = float(expected_rows(counts)), float(variance_of_rows(counts)) ** 0.5
    if size.tokens is not None:
        n_units = sum(context.n_units for context in contexts)
        return BudgetReport("tokens", size.tokens, n_expected / n_units, deviation / n_units, n_rows / n_units)
    charged = sum(sum(context.memory()["device"].values()) for context in contexts)
    first = contexts[0]
    row_bytes = (first.key_dim + first.value_dim) * first.dtype.itemsize + CODE_BYTES
    expected = charged + (n_expected - n_rows) * row_bytes
    return BudgetReport("bytes", size.n_bytes * first.n_contexts, expected, deviation * row_bytes, charged)
