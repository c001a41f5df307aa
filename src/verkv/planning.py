"""Algorithm 2 over one layer: which exact weights may enter the plan, how often it is made, what is read for it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from verkv.estimators.sampling import decode_inclusion_probs
from verkv.kvfetch import Decision, FetchConfig, OutputContext, decide
from verkv.sketches import shortlist
from verkv.sketches.error import SketchError
from verkv.tiers import LEVEL_MASK, RESIDENT_BIT, pad_rows


@dataclass(frozen=True)
class QueryRows:
    """Some query rows of N KV heads, to be planned at once.

    Attributes
    ----------
    rows : Tensor, shape (N, R, d), float32
    score : callable
        Returns the sketch's unscaled logits, (N, R, T).
    tail_lse : Tensor, shape (N, R)
        log-sum-exp of the logits of tokens after the context.
    epsilon : float or Tensor, shape (N, R)
        Tolerance of each row.
    hidden : Tensor, shape broadcastable to (N, R, T), bool, optional
        Tokens that a row does not see.
    output : OutputContext, optional
        Bound the output instead of the denominator.
    """

    rows: Tensor
    score: Callable[[], Tensor]
    tail_lse: Tensor
    epsilon: float | Tensor
    hidden: Tensor | None = None
    output: OutputContext | None = None


@dataclass
class KeyPool:
    """Keys read from the host in this pass, in (unit, position) order: each is read, and counted, once."""

    n_tokens: int
    units: Tensor
    positions: Tensor
    keys: Tensor

    @classmethod
    def empty(cls, n_tokens: int, like: Tensor) -> "KeyPool":
        """A pool for keys of the dtype, head dim and device of ``like`` (..., d)."""
        none = torch.zeros(0, dtype=torch.int64, device=like.device)
        return cls(n_tokens, none, none, like.new_zeros(0, like.shape[-1]))

    def add(self, units: Tensor, positions: Tensor, keys: Tensor) -> None:
        """Add keys that are not in the pool yet, in (unit, position) order."""
        if not len(self.units):
            self.units, self.positions, self.keys = units, positions, keys
            return
        units, positions = torch.cat([self.units, units]), torch.cat([self.positions, positions])
        order = (units * self.n_tokens + positions).argsort()
        self.units, self.positions = units[order], positions[order]
        self.keys = torch.cat([self.keys, keys])[order]

    def find(self, units: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Which of M wanted tokens are in the pool, (M,) bool, and the place in it of those."""
        wanted = units * self.n_tokens + positions
        held = self.units * self.n_tokens + self.positions
        if not len(held):
            return torch.zeros_like(wanted, dtype=torch.bool), held
        place = torch.searchsorted(held, wanted).clamp_max(len(held) - 1)
        is_held = held[place] == wanted
        return is_held, place[is_held]


@dataclass(frozen=True)
class Plan:
    """What one pass over one layer decided.

    Attributes
    ----------
    promoted : Tensor, shape (N, T), bool
        Union over a KV head's query rows: exact for each of them.
    decisions : list of Decision
        Of every :class:`QueryRows`, in order; without their ``promoted``, which would be large.
    fetching : list of Tensor, shape (N, R), bool
        Rows that promote at least one token that is not resident.
    is_exact : Tensor, shape (N,), bool
        KV heads for which everything is read: by their plans, or because these exceeded ``max_read``.
    pool : KeyPool
        Keys read to plan.
    n_shortlisted, n_keys_first : int
        How many for the shortlist, and how many promoted ones before their values.
    """

    promoted: Tensor
    decisions: list[Decision]
    fetching: list[Tensor]
    is_exact: Tensor
    pool: KeyPool
    n_shortlisted: int
    n_keys_first: int


class Planner:
    """Plans query rows of N KV heads over a context of T tokens.

    Parameters
    ----------
    codes : Tensor, shape (N, T), uint8
        Resident bit and level of every token; 0 where absent.
    resident_keys : Tensor, shape (N, S, d), float32
        Padded per KV head, in the order of their positions.
    is_row : Tensor, shape (N, S), bool
        Which of them are rows.
    read_keys : callable
        ``(units, positions)`` to keys (M, d), from the host.
    fetch : FetchConfig
    is_oracle : bool
        The sketch's logits are exact.
    error : SketchError or None
        Of shape (N, 1, ...): moments of the sketch's error, for weights that know them.
    scaling : float
        Factor of <k, q>.
    """

    def __init__(
        self,
        codes: Tensor,
        resident_keys: Tensor,
        is_row: Tensor,
        read_keys: Callable[[Tensor, Tensor], Tensor],
        fetch: FetchConfig,
        is_oracle: bool,
        error: SketchError | None,
        scaling: float,
    ):
        self.resident_keys, self.is_row, self.read_keys = resident_keys, is_row, read_keys
        self.fetch, self.is_oracle, self.error, self.scaling = fetch, is_oracle, error, scaling
        self.resident = (codes & RESIDENT_BIT) != 0
        levels = codes & LEVEL_MASK
        self.residual = levels > 0
        self.absent = codes == 0
        self.inclusion_probs = decode_inclusion_probs(levels)
        self.row_units, self.row_positions = self.resident.nonzero(as_tuple=True)
        # Slots that are no row point at token 0 and are masked by is_row.
        self.slot_positions = torch.zeros_like(is_row, dtype=torch.long).masked_scatter_(is_row, self.row_positions)

    def output_context(self, norms: Tensor, centre: Tensor, resident_values: Tensor) -> OutputContext:
        """What bounding the output needs of the context, without the tail's part.

        Norms (N, T) and centre (N, dv) of the values, and the resident values (N, S, dv) in the order of the keys.
        """
        certain = ~self.residual & ~self.absent
        is_certain = certain.gather(1, self.slot_positions) & self.is_row
        values = torch.where(is_certain[..., None], resident_values.float() - centre[:, None], 0.0)
        return OutputContext(norms, centre, certain, values, self.slot_positions)

    def run(self, chunks: list[QueryRows]) -> Plan:
        """Plan all rows, read keys first where that is asked for, and unite what a KV head's rows promote."""
        known = self._start(chunks)
        n_shortlisted = len(self.pool.units)
        for _ in range(0 if self.is_oracle else self.fetch.key_rounds):
            promoted = self._unite(chunks, known)[0]
            new = promoted & ~known
            if not bool(new.any()):
                break
            self._read(new & ~self.resident)
            known = known | new
        promoted, decisions, fetching = self._unite(chunks, known, keep=True)
        is_exact = self._needs_everything(promoted, decisions)
        promoted = torch.where(is_exact[:, None], self.residual, promoted)
        n_keys_first = len(self.pool.units) - n_shortlisted
        return Plan(promoted, decisions, fetching, is_exact, self.pool, n_shortlisted, n_keys_first)

    def score(self, chunks: list[QueryRows]) -> tuple[list[Tensor], list[Tensor | None], Tensor]:
        """The first half of a plan: logits to plan with (N, R, T) and the variance (N, R) of the sketch's by chunk, and
        the tokens (N, T) whose logits are exact."""
        known = self._start(chunks)
        logits, variances = zip(*self._scored(chunks, known), strict=True)
        return list(logits), list(variances), known

    def _start(self, chunks: list[QueryRows]) -> Tensor:
        """Begin a pass with an empty pool; the tokens (N, T) that are known before anything is planned."""
        self.pool = KeyPool.empty(self.resident.shape[1], self.resident_keys)
        return self._known_before(chunks)

    def _known_before(self, chunks: list[QueryRows]) -> Tensor:
        """Tokens (N, T) whose exact weight enters the first plan, chosen by a rule that is blind to the draw.

        Those are tokens with r = 1 and shortlisted ones. Sampled residual tokens are resident, too, but their weight
        would tell the plan which of them were drawn; ``paper=True`` uses it all the same, and shortlists others. With
        an exact sketch nothing is left to know.
        """
        if self.is_oracle:
            return torch.zeros_like(self.residual)
        candidates = self.residual & ~self.resident if self.fetch.paper else self.residual
        chosen = torch.zeros_like(candidates)
        if self.fetch.shortlist:
            best = [_hide(chunk.score(), chunk.hidden).amax(1) for chunk in chunks]
            chosen = shortlist(torch.stack(best, 1), candidates, self.fetch.shortlist)
        self._read(chosen & ~self.resident)
        return chosen | (self.resident if self.fetch.paper else ~self.residual & ~self.absent)

    def _read(self, wanted: Tensor) -> None:
        """Read the keys of wanted tokens (N, T), none of which is in the pool or resident."""
        units, positions = wanted.nonzero(as_tuple=True)
        self.pool.add(units, positions, self.read_keys(units, positions).to(self.resident_keys.dtype))

    def _unite(
        self, chunks: list[QueryRows], known: Tensor, keep: bool = False
    ) -> tuple[Tensor, list[Decision], list[Tensor]]:
        """Plan every chunk; the union of promoted tokens (N, T), and the decisions where they are wanted."""
        union = torch.zeros_like(self.residual)
        decisions, fetching = [], []
        for chunk, (logits, variance) in zip(chunks, self._scored(chunks, known), strict=True):
            decision = decide(
                logits,
                chunk.tail_lse,
                self.inclusion_probs,
                self.residual,
                self.fetch,
                epsilon=chunk.epsilon,
                unknown=self.residual & ~known,
                logit_variance=variance,
                output=chunk.output,
            )
            union |= decision.promoted.any(1)
            if keep:
                fetching.append((decision.promoted & ~self.resident[:, None]).any(-1))
                decisions.append(decision.at(self.slot_positions))
        return union, decisions, fetching

    def _scored(self, chunks: list[QueryRows], known: Tensor) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Logits and variance of each chunk, one after another: all at once would be large."""
        slot_is_known = known.gather(1, self.slot_positions) & self.is_row
        keys, is_key = pad_rows(self.pool.keys, self.pool.units, len(known))
        for chunk in chunks:
            yield self._logits(chunk, known, slot_is_known, keys, is_key)

    def _logits(
        self, chunk: QueryRows, known: Tensor, slot_is_known: Tensor, keys: Tensor, is_key: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Logits to plan with, (N, R, T), and the variance (N, R) of the sketch's: exact for known tokens."""
        mean, variance = 0.0, None
        if self.error is not None:
            mean, variance = self.error.logit_moments(chunk.rows[:, None], self.scaling)
            mean, variance = mean[:, 0, :, None], variance[:, 0]
        planning = chunk.score() * self.scaling + mean
        planning.masked_fill_(self.absent[:, None], -torch.inf)
        rows = chunk.rows * self.scaling
        by_token = planning.mT  # a view (N, T, R): known tokens are written row by row
        by_token[known & self.resident] = (rows @ self.resident_keys.mT).mT[slot_is_known]
        by_token[self.pool.units, self.pool.positions] = (rows @ keys.mT).mT[is_key]
        return _hide(planning, chunk.hidden), variance

    def _needs_everything(self, promoted: Tensor, decisions: list[Decision]) -> Tensor:
        """KV heads (N,) to compute exactly: no finite bound, or more to promote than ``max_read`` of the context."""
        n_tokens = (~self.absent).sum(-1)
        too_much = promoted.sum(-1) > self.fetch.max_read * n_tokens
        unbounded = torch.stack([~torch.isfinite(d.planned_bound).all(1) for d in decisions]).any(0)
        everything = (promoted == self.residual).all(-1) & self.residual.any(-1)
        return too_much | unbounded | everything


def _hide(logits: Tensor, hidden: Tensor | None) -> Tensor:
    return logits if hidden is None else logits.masked_fill(hidden, -torch.inf)
