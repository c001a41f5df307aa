"""Before they serve a first context on a device, the kernels answer small problems there, held against float64.

What is checked is what a step does: scores and shortlist, plan, fetch list, rows read from pinned host memory, and
attention. The reference is the estimators, on the CPU. Problems are the same in every process.
"""

import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from verkv.cuda import launch, layout
from verkv.cuda.launch import DeviceLayer, DevicePlan, unpack_bits
from verkv.estimators.certificate import bernstein_certificate
from verkv.estimators.fetching import certificate_drop, fetch_plan
from verkv.estimators.sampling import LEVELS_PER_OCTAVE, MAX_LEVEL, decode_inclusion_probs, poisson_sample
from verkv.estimators.shrinkage import binary_shrinkage, mean_squared_error
from verkv.sketches import RopePairSketch, shortlist

LENGTHS = (300, 1500, 5000)  # one block of everything; several blocks of score and attention; and of plan and shortlist
N_UNITS = 2
EPSILON, DELTA, UPPER_SHARES = 0.05, 0.1, (None, 0.7)
SHORTLISTS = range(8, 25)
# Relative. Logits in float32 and fast exp2 are off by less than a tenth of it; a wrong result is off by far more.
ROUNDING = 1e-4

_RESIDENT_BIT = MAX_LEVEL + 1

_failures: dict[int, str] = {}  # by device


def unfit_because(device_index: int, head_dim: int, tile: int, dtype: torch.dtype) -> str:
    """Why the kernels may not serve contexts on a device; empty if their answers there were right.

    Runs once a process for each set of arguments; most of its time, about a second, goes into the reference. Once a
    shape has failed on a device nothing more is run there, and all other shapes count as unfit with it. An error counts
    as a failure, too; after one that CUDA does not recover from (an illegal address) torch can use the device no more,
    either, and its next call into CUDA raises.

    Parameters
    ----------
    device_index : int
        Of a CUDA device.
    head_dim : {64, 128, 256}
    tile : int in [1, 8]
        Query rows that share one read of a key row, as the kernels are compiled for.
    dtype : torch.bfloat16 or torch.float16
        Of keys and values.

    Returns
    -------
    str
    """
    if device_index not in _failures and (found := _found_once(device_index, head_dim, tile, dtype)):
        _failures[device_index] = (
            f"on CUDA device {device_index} they failed their self-check with head dim {head_dim}, {tile} query rows "
            f"and {dtype} ({found}). Please report this, with the output of nvidia-smi and the version of torch"
        )
    return _failures.get(device_index, "")


@functools.cache
def _found_once(device_index: int, head_dim: int, tile: int, dtype: torch.dtype) -> str:
    try:
        return next(disagreements(_device(device_index), head_dim, tile, dtype), "")
    except Exception as error:  # whatever it is: a context must not be lost to a check of its kernels
        return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def _device(index: int) -> torch.device:
    return torch.device("cuda", index)


@torch.no_grad()
def disagreements(device: torch.device, head_dim: int, tile: int, dtype: torch.dtype) -> Iterator[str]:
    """What the kernels of one shape answer otherwise than float64, problem by problem."""
    for problem in _problems(head_dim, tile, dtype):
        for name, what in _differences(problem, device):
            yield f"{problem.codes.shape[1]} tokens, {name}: {what}"


# --- problems -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Problem:
    """A sealed layer of N units, and R query rows of each; all on the CPU."""

    keys: Tensor  # (N, T, d)
    values: Tensor
    codes: Tensor  # (N, T): certain, drawn, not drawn, and no tokens at the beginning of the last unit
    query: Tensor  # (N, R, d), float32
    tail_lse: Tensor  # (N, R)
    sketch: RopePairSketch

    @property
    def scaling(self) -> float:
        return self.keys.shape[-1] ** -0.5

    @property
    def resident(self) -> Tensor:
        return (self.codes & _RESIDENT_BIT) != 0

    @property
    def levels(self) -> Tensor:
        return self.codes & MAX_LEVEL

    @property
    def exact_logits(self) -> Tensor:
        """(N, R, T), float64; of what are no tokens, too."""
        return self.query.double() @ self.keys.double().mT * self.scaling

    def planning_logits(self, paper: bool) -> tuple[Tensor, Tensor]:
        """What is planned with, (N, R, T) in float64, and the tokens (N, T) of the shortlist."""
        exact, residual = self.exact_logits, self.levels > 0
        sketched = self.query.double() @ self.sketch.decode()[0].double().mT * self.scaling
        listed = _clear_shortlist(sketched, residual & ~self.resident if paper else residual)
        is_exact = listed | ~residual | (self.resident if paper else False)
        logits = torch.where(is_exact[:, None], exact, sketched)
        return logits.masked_fill((self.codes == 0)[:, None], -torch.inf), listed

    def on_device(self, device: torch.device) -> DeviceLayer:
        """As the kernels read it."""
        resident, pin = self.resident, device.type == "cuda"
        offsets = torch.nn.functional.pad(resident.sum(-1).cumsum(0), (1, 0))
        rows = (self.keys[resident], self.values[resident], self.codes[resident], resident.nonzero()[:, 1].int())
        host = [tensor.pin_memory() if pin else tensor for tensor in (self.keys, self.values)]
        return DeviceLayer(self.codes.to(device), *(part.to(device) for part in (*rows, offsets)), *host)


def _clear_shortlist(logits: Tensor, candidates: Tensor) -> Tensor:
    """A shortlist (N, T) of a size at which the choice does not hang on rounding: where logits fall the most."""
    best = logits.amax(1).masked_fill(~candidates, -torch.inf).sort(-1, descending=True).values
    falls = (best[:, :-1] - best[:, 1:]).amin(0)[SHORTLISTS.start - 1 : SHORTLISTS.stop - 1]
    return shortlist(logits, candidates, SHORTLISTS[int(falls.argmax())])


def _problems(head_dim: int, tile: int, dtype: torch.dtype) -> Iterator[_Problem]:
    """One of each length; the longest in two tiles of query rows, where passes of two have this one's size."""
    for n_tokens in LENGTHS:
        in_two = 2 * tile - 1
        is_two = n_tokens == LENGTHS[-1] and layout.tile_of(in_two) == tile
        yield _make_problem(n_tokens, in_two if is_two else tile, head_dim, dtype)


def _make_problem(n_tokens: int, n_rows: int, head_dim: int, dtype: torch.dtype) -> _Problem:
    """Noise with strong channels and a few needles of each row; tokens of large weight are mostly kept."""
    cpu = {"device": "cpu", "dtype": torch.float32}  # whatever the defaults are
    generator = torch.Generator("cpu").manual_seed(n_tokens)
    normal = lambda *shape: torch.randn(shape, generator=generator, **cpu)  # noqa: E731
    uniform = lambda *shape: torch.rand(shape, generator=generator, **cpu)  # noqa: E731
    query = 0.5 * normal(N_UNITS, n_rows, head_dim)
    needles = torch.where(uniform(N_UNITS, n_tokens, n_rows) < 20 / n_tokens, 2 + 5 * uniform(n_tokens, 1), 0.0)
    direction = query / query.square().sum(-1, keepdim=True) * head_dim**0.5
    noise = normal(N_UNITS, n_tokens, head_dim) * (0.5 * normal(N_UNITS, 1, head_dim)).exp()
    keys = (noise + needles @ direction).to(dtype)
    values = normal(N_UNITS, n_tokens, head_dim).to(dtype)
    best = (query @ keys.float().mT * head_dim**-0.5).amax(1)
    levels = (30 - 6 * best + 4 * normal(N_UNITS, n_tokens)).round().clamp(1, MAX_LEVEL).to(torch.uint8)
    n_padding = n_tokens // 4
    for certain in (slice(16), slice(n_padding, n_padding + 16), slice(-16, None)):
        levels[:, certain] = 0
    drawn = poisson_sample(decode_inclusion_probs(levels), generator)
    codes = levels | drawn.to(torch.uint8) * _RESIDENT_BIT
    codes[-1, :n_padding] = 0
    tail_lse = normal(N_UNITS, n_rows)
    tail_lse[0, 0] = -torch.inf  # a row without a tail
    return _Problem(keys, values, codes, query, tail_lse, RopePairSketch().build(keys[None]))


# --- the kernels' answers -------------------------------------------------------------------------------------------


def _differences(problem: _Problem, device: torch.device) -> Iterator[tuple[str, str]]:
    """Names of steps, and what is wrong with their answers."""
    layer, query, tail_lse = problem.on_device(device), problem.query.to(device), problem.tail_lse.to(device)
    sketch = {name: part.to(device) for name, part in launch.rope_pair_tensors(problem.sketch).items()}
    for paper, upper_share in itertools.product((False, True), UPPER_SHARES):
        name = f"plan_rope_pair(paper={paper}, upper_share={upper_share})"
        logits, listed = problem.planning_logits(paper)
        given = layer, sketch, query, tail_lse, problem.scaling, EPSILON, DELTA, int(listed[0].sum())
        plan = launch.plan_rope_pair(*given, paper=paper, upper_share=upper_share)
        answer = _Answer(problem, plan, *launch.attend(layer, plan, query, problem.scaling))
        yield from ((name, what) for what in answer.differences(logits, upper_share))
        if not torch.equal(plan.n_shortlisted.cpu().long(), (listed & ~problem.resident).sum(-1)):
            yield name, "the shortlist"
    for upper_share in UPPER_SHARES:
        name = f"plan_logits(upper_share={upper_share})"
        logits, listed = problem.planning_logits(paper=False)
        given = logits.float().to(device), tail_lse, torch.full_like(tail_lse, EPSILON), DELTA, listed.to(device)
        plan = launch.plan_logits(layer, *given, upper_share=upper_share)
        answer = _Answer(problem, plan, *launch.attend(layer, plan, query, problem.scaling))
        yield from ((name, what) for what in answer.differences(logits, upper_share))


class _Answer:
    """A plan and what it attends to, on the CPU."""

    def __init__(self, problem: _Problem, plan: DevicePlan, output: Tensor, lse: Tensor):
        n_tokens = problem.codes.shape[1]
        self.problem, self.output, self.lse = problem, output.cpu().double(), lse.cpu().double()
        self.plan = DevicePlan(*(getattr(plan, field.name).cpu() for field in fields(plan)))
        self.union, self.shrunk = (unpack_bits(words, n_tokens) for words in (self.plan.promoted, self.plan.shrunk))

    def differences(self, logits: Tensor, upper_share: float | None) -> Iterator[str]:
        """What is not as float64 has it, up to rounding. No comparison holds for a NaN."""
        yield from self._plan_differences(_Reference(self.problem, logits, self.shrunk, upper_share))
        yield from self._list_differences()
        output, lse = self._attention()
        error = (self.output - output).norm(dim=-1) / output.norm(dim=-1)
        if not (error <= ROUNDING).all():
            yield f"attention, with an error of {float(error.max()):.1e}"
        if not ((self.lse - lse).abs() <= ROUNDING).all():
            yield "the attention's denominator"

    def _plan_differences(self, reference: "_Reference") -> Iterator[str]:
        """Shrinkage, the certificate before and after promoting, k* and the promoted tokens."""
        plan, missing = self.plan, ~self.problem.resident[:, None]
        if not reference.is_shrinkage_best:
            yield "shrinkage"
        if not ((plan.error_bound / reference.error_bound - 1).abs() <= ROUNDING).all():
            yield "the certificate"
        bound = reference.bound(self.union[:, None])
        if not (bound < EPSILON * (1 + ROUNDING)).all():
            yield f"promoted tokens, which leave a bound of {float(bound.max()):.3g} where {EPSILON} is allowed"
        (sure, fewest), (possible, most) = reference.promoted(1 + ROUNDING), reference.promoted(1 - ROUNDING)
        if not ((fewest <= plan.n_promoted) & (plan.n_promoted <= most)).all():
            yield "the number of promoted tokens"
        if (sure.any(1) & ~self.union).any() or (self.union & ~possible.any(1)).any():
            yield "the promoted tokens"
        few, many = ((tokens & missing).sum(-1) for tokens in (sure, possible))
        if not ((few <= plan.n_row_fetched) & (plan.n_row_fetched <= many)).all():
            yield "the number of tokens that a row fetches"

    def _list_differences(self) -> Iterator[str]:
        """What is fetched is what is promoted and not resident; and counters are left at zero."""
        plan, residual = self.plan, self.problem.levels > 0
        for unit, fetched in enumerate(self.union & ~self.problem.resident):
            positions = plan.fetch_positions[unit, : max(0, int(plan.n_fetched[unit]))]
            if not torch.equal(positions.long(), fetched.nonzero()[:, 0]):
                yield "the list of rows to fetch"
        if not torch.equal(plan.is_exact.bool(), (self.union == residual).all(-1)):
            yield "whether all is promoted"
        if plan.tickets.any() or plan.unit_counts.any():
            yield "counters that are to be zero after a step"

    def _attention(self) -> tuple[Tensor, Tensor]:
        """Output (N, R, d) and log-denominator (N, R) over resident and promoted tokens, as the plan weighs them."""
        problem, union = self.problem, self.union[:, None]
        log_weight = problem.levels.double()[:, None] * (math.log(2) / LEVELS_PER_OCTAVE)
        log_weight = torch.where(self.shrunk | union, 0.0, log_weight)
        log_weight = torch.where(problem.resident[:, None] | union, log_weight, -torch.inf)
        logits = problem.exact_logits + log_weight
        return logits.softmax(-1) @ problem.values.double(), logits.logsumexp(-1)


class _Reference:
    """The estimators in float64, with the shrinkage of the plan that is checked, which is compared on its own."""

    def __init__(self, problem: _Problem, logits: Tensor, shrunk: Tensor, upper_share: float | None):
        tail_lse = problem.tail_lse.double()
        peak = torch.maximum(logits.amax(-1), tail_lse)[..., None]
        weights, tail = (logits - peak).exp(), (tail_lse - peak[..., 0]).exp()
        r = decode_inclusion_probs(problem.levels, torch.float64)[:, None].expand_as(weights)
        residual = (problem.levels > 0)[:, None].expand_as(weights)
        least = mean_squared_error(weights, r, binary_shrinkage(weights, r, residual), residual)
        shrinkage = torch.where(shrunk, r, 1.0)
        own = mean_squared_error(weights, r, shrinkage, residual)
        self.is_shrinkage_best = bool((own <= (1 + ROUNDING) * least).all() and not (shrunk & ~residual).any())
        self.residual, self.upper_share = residual, upper_share
        self._terms = weights, r, shrinkage
        self._denominator = weights.sum(-1) + tail
        self.error_bound = self.bound(torch.zeros_like(residual))
        drop = certificate_drop(*self._terms, residual, self._denominator, DELTA)
        self._drop = torch.where(residual, drop, -torch.inf)

    def bound(self, promoted: Tensor) -> Tensor:
        """Of every row (N, R), once these tokens are promoted."""
        left = self.residual & ~promoted
        return bernstein_certificate(*self._terms, left, self._denominator, DELTA, self.upper_share).error_bound

    def promoted(self, factor: float) -> tuple[Tensor, Tensor]:
        """For a tolerance times ``factor``: tokens (N, R, T) and k* (N, R).

        Of tokens whose drops are equal up to rounding either may be promoted: above 1 those that surely are, below 1
        all that may be.
        """
        given = *self._terms, self.residual, self._denominator
        plan = fetch_plan(*given, EPSILON * factor, DELTA, self.upper_share)
        smallest = torch.where(plan.promoted, self._drop, torch.inf).amin(-1, keepdim=True)
        return self._drop > smallest * factor, plan.n_promoted
