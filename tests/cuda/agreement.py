"""Assertions that a pass of the kernels agrees with float64."""

import itertools
import shutil

import numpy as np
import pytest
import torch
from emulator import Emulator, Pass, emulator
from problems import Answer, Layer, attend, solve
from torch import Tensor

from verkv.cuda.layout import Sizes
from verkv.estimators.certificate import log_terms
from verkv.tiers import LEVEL_MASK, RESIDENT_BIT

needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None, reason="needs g++ to compile the kernels for the CPU (Debian: apt-get install g++)"
)

DELTA = 0.1
# Eq. (7), and the two sides apart with equal parts of delta and as the library's default has it.
UPPER_SHARES = (None, 0.5, 0.7)
# Float32 rounding of weights and sums. Two outcomes that float64 tells apart by less are a tie, and either is right.
TIE = 2e-6


def log_scalars(upper_share: float | None) -> dict[str, float]:
    """Of delta, as the kernels take it."""
    return dict(zip(("log_term", "log_upper", "log_lower"), log_terms(DELTA, upper_share), strict=True))


def run_layer(
    layer: Layer,
    epsilon: float,
    shortlist: int = 32,
    paper: bool = False,
    n_splits: int = 3,
    seed: int = 1,
    kernels: Emulator | None = None,
    upper_share: float | None = None,
) -> tuple[Pass, np.ndarray]:
    """A decode step of one layer, and the logits it planned with."""
    n_units, n_rows, head_dim = layer.query.shape
    sizes = Sizes(n_units, layer.keys.shape[2], n_rows, n_rows, head_dim, shortlist, n_splits)
    kernels = kernels or emulator(head_dim, sizes.tile, layer.keys.dtype == torch.float16)
    scalars = {"scaling": layer.scaling, "epsilon": epsilon, "known_resident": int(paper)} | log_scalars(upper_share)
    step = Pass(kernels, sizes, layer.inputs(), seed, **scalars)
    step.launch("vk_score", *(["vk_shortlist"] if shortlist else []))
    logits = step["logits"].copy()
    step.launch("vk_plan", "vk_emit", "vk_settle", "vk_attend")
    step.check_zeroed()
    return step, logits


def plan_again(step: Pass, logits: np.ndarray, upper_share: float | None) -> Pass:
    """A plan from the same logits and known tokens as another step's, with another bound."""
    inputs = step.inputs | {"logits": logits, "known": step.arrays.get("known")}
    again = Pass(step.emulator, step.sizes, inputs, **step.scalars | log_scalars(upper_share))
    again.launch("vk_peak", "vk_plan", "vk_emit", "vk_settle").check_zeroed()
    return again


def check_plan(
    step: Pass,
    logits: Tensor,
    tail_lse: Tensor,
    codes: Tensor,
    epsilon: float,
    known: Tensor | None = None,
    sigma2: Tensor | None = None,
    upper_share: float | None = None,
) -> int:
    """k*, union and fetch lists are the float64 greedy's, but for ties; returns how many rows were decided by a tie."""
    residual = (codes & LEVEL_MASK) > 0
    shrunk = torch.from_numpy(step.bits("shrunk"))
    answer = solve(logits, tail_lse, codes, epsilon, DELTA, known, sigma2, upper_share=upper_share)
    differs = (shrunk != (answer.shrinkage < 1)).any(-1)
    if differs.any():  # u = 2 beta up to rounding, or weights too small to matter: then both errors are the same
        assert not (shrunk & ~residual[:, None]).any()
        own = solve(logits, tail_lse, codes, epsilon, DELTA, known, sigma2, shrunk, upper_share)
        excess = own.squared_error() - answer.squared_error()
        assert (excess <= TIE * answer.squared_error() + (1e-9 * answer.denominator) ** 2).all()
        answer = own
    bound = torch.from_numpy(step["bound"]).double()
    # Weights below 2^-23 of the largest share one bin, so a bound far below any tolerance is known less exactly.
    assert torch.allclose(bound, answer.plan.error_bound, rtol=2 * TIE, atol=1e-9)

    k, union = torch.from_numpy(step["n_promoted"]).long(), torch.from_numpy(step.bits("mask"))
    assert not (union & ~residual).any()
    promoted, n_ties = answer.plan.promoted, 0
    if (k != answer.plan.n_promoted).any() or (union != promoted.any(1)).any():
        promoted, n_ties = _resolve_ties(answer, k, union, epsilon)
    assert (union == promoted.any(1)).all()
    _check_lists(step, union, promoted, codes)
    return n_ties


def _resolve_ties(answer: Answer, k: Tensor, union: Tensor, epsilon: float) -> tuple[Tensor, int]:
    """The kernels' own sets, where each differs from the reference's by a tie only, and how many rows do.

    Two kinds of ties: the bound of some prefix is epsilon, or tokens at the boundary of the prefix have the same drop.
    """
    drop, order = answer.order()
    promoted = answer.plan.promoted.clone()
    suspects = (k != answer.plan.n_promoted) | (union != promoted.any(1)).any(-1, keepdim=True)
    n_ties = 0
    for unit, row in suspects.nonzero().tolist():
        count, others = int(k[unit, row]), order[unit, row]
        if count == int(promoted[unit, row].sum()) and bool((union[unit] | ~promoted[unit, row]).all()):
            continue  # the reference's own set is part of the union
        sets = _tied_sets(drop[unit, row], others, count)
        for own in sets:
            trial = answer.plan.promoted.clone()
            trial[unit, row] = own
            bound = float(answer.bound(trial)[unit, row])
            if bool((union[unit] | ~own).all()) and bound < epsilon * (1 + TIE):
                promoted[unit, row] = own
                break
        else:
            raise AssertionError(f"row {row} of unit {unit} promotes {count} tokens: no tie explains it")
        too_many = count - int(answer.plan.n_promoted[unit, row])
        if too_many > 0:
            shorter = answer.plan.promoted[unit, row].sum()
            assert abs(float(answer.plan.planned_bound[unit, row]) / epsilon - 1) < TIE, (unit, row, count, shorter)
        n_ties += 1
    return promoted, n_ties


def _tied_sets(drop: Tensor, order: Tensor, count: int) -> list[Tensor]:
    """Sets of ``count`` tokens that are a prefix of the order by drop, if drops that differ by rounding are equal."""
    boundary = drop[order[max(count - 1, 0)]]
    tied = ((drop / boundary - 1).abs() < 10 * TIE).nonzero()[:, 0]
    above = (drop > boundary) & ((drop / boundary - 1).abs() >= 10 * TIE)
    left = count - int(above.sum())
    sets = []
    for chosen in itertools.islice(itertools.combinations(tied.tolist(), left), 1000):
        own = above.clone()
        own[list(chosen)] = True
        sets.append(own)
    return sets


def _check_lists(step: Pass, union: Tensor, promoted: Tensor, codes: Tensor) -> None:
    """Rows to fetch: promoted and not resident, ascending; and each row's own count of them."""
    missing = (codes & RESIDENT_BIT) == 0
    for unit, fetched in enumerate(union & missing):
        expected = fetched.nonzero()[:, 0]
        assert step["n_fetched"][unit] == len(expected)
        assert np.array_equal(step["fetch_positions"][unit, : len(expected)], expected.numpy())
    own = (promoted & missing[:, None]).sum(-1)
    agree = torch.from_numpy(step["n_row_fetched"]) == own
    assert agree.all() or (promoted.sum(-1) != torch.from_numpy(step["n_promoted"])).any()


def check_attention(step: Pass, layer: Layer, tolerance: float = 1e-5) -> None:
    """Output and log-denominator of the rows that the step left and fetched are float64's."""
    union, shrunk = torch.from_numpy(step.bits("mask")), torch.from_numpy(step.bits("shrunk"))
    output, lse = attend(layer, union, shrunk)
    error = (torch.from_numpy(step["output"]) - output).norm(dim=-1) / output.norm(dim=-1)
    assert error.max() < tolerance
    assert (torch.from_numpy(step["lse"]) - lse).abs().max() < tolerance
