"""Sealing the tail of a cache as a further segment: what that needs between forward passes, and the checks."""

import contextvars
import copy
import math
import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from verkv.cache import VerKVLayer, adopt_layers
from verkv.presses.budget import BudgetTooSmall
from verkv.presses.scores import Scores, ScoreSource, Tail
from verkv.tail import TailRecord

# Whether presses work on a prompt that comes in chunks, each of which is to be sealed.
chunked_prefill: contextvars.ContextVar[bool] = contextvars.ContextVar("verkv_chunked_prefill", default=False)

# Whether a tail is being sealed: the replays that score it are no passes of a press' block.
sealing_tail: contextvars.ContextVar[bool] = contextvars.ContextVar("verkv_sealing_tail", default=False)


class Resealer:
    """Seals a cache's tail with the press that sealed the cache. Bound to the cache as ``cache.resealer``.

    Of the model only a weak reference is kept. Copies of the cache have a copy, which goes on drawing from the same
    state; a pickled one forgets press and model, and ``press.reseal(model, cache)`` gives them back.

    Parameters
    ----------
    press : SealingPress
    model : PreTrainedModel
    generator : torch.Generator
        Of the draws. Its state goes on from segment to segment, so that these are drawn independently.
    prefix_length : int
        Leading tokens that the scores say nothing about.
    """

    def __init__(self, press, model, generator: torch.Generator, prefix_length: int = 0):
        self.press, self.generator, self.prefix_length = press, generator, prefix_length
        self.model = weakref.ref(model)
        self.source: ScoreSource | None = None
        self.next_try = 0  # length before which resealing is not tried again, after a budget that did not suffice

    def __deepcopy__(self, memo: dict) -> "Resealer":
        copied = copy.copy(self)
        copied.generator = torch.Generator()
        copied.generator.set_state(self.generator.get_state())
        return copied

    def __copy__(self) -> "Resealer":
        copied = object.__new__(Resealer)
        vars(copied).update(vars(self))
        return copied

    def __getstate__(self) -> dict:
        return {"prefix_length": self.prefix_length, "drawn": self.generator.get_state(), "next_try": self.next_try}

    def __setstate__(self, state: dict) -> None:
        self.press, self.source, self.model = None, None, lambda: None
        self.prefix_length, self.next_try = state["prefix_length"], state["next_try"]
        self.generator = torch.Generator()
        self.generator.set_state(state["drawn"])

    # --- sealing ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def run(self, cache, *, model=None, scores: Scores | None = None, attention_mask: Tensor | None = None) -> None:
        """What :func:`verkv.cache.reseal` does."""
        token = sealing_tail.set(True)
        try:
            self._seal(cache, self._model(model), scores, attention_mask)
        finally:
            sealing_tail.reset(token)

    def _seal(self, cache, model, scores: Scores | None, attention_mask: Tensor | None) -> None:
        """Check, score and seal."""
        layers = self.press.full_layers(model)
        adopt_layers(cache)
        cache.layers[0].refuse_half_a_forward(0)
        first, n_tail, n_new = self._extent(cache, layers)
        if n_new < 1:
            raise ValueError(
                f"the tail has {n_tail} tokens, and its last {n_tail - n_new} stay exact (n_local): there is nothing "
                f"to seal yet"
            )
        beams = first.context.beams if first.sealed else 1
        is_token = tail_mask(first, attention_mask)
        check_same_beams(first, is_token, beams)
        tail = Tail(layers, n_new, is_token, self._n_first(first))
        self._check_budget(model, cache, tail, attention_mask, beams)
        if scores is None:
            scores = self._scores(model, cache, tail, attention_mask)
        queries = {i: cache.layers[i].record and cache.layers[i].record.queries for i in layers}
        queries = {i: query for i, query in queries.items() if query is not None}
        if not first.sealed:
            self.press.seal(
                model,
                cache,
                scores,
                prefix_length=self.prefix_length,
                attention_mask=None if attention_mask is None else attention_mask[:, :n_tail],
                queries=queries,
                resealer=self,
            )
        else:
            self.press.seal_segment(model, cache, scores, tail, queries, self.generator)

    def is_due(self, cache) -> bool:
        """Whether ``reseal_every`` or ``max_tail`` says that the tail is to be sealed now."""
        first, n_tail, n_new = self._extent(cache, self.press.full_layers(self._model(None)))
        every, most = (x if x is not None else math.inf for x in (self.press.reseal_every, self.press.max_tail))
        n_free = n_new if first.sealed else n_new - self._n_first(first)
        return n_free >= 1 and (n_free >= every or n_tail > most) and first.get_seq_length() >= self.next_try

    def can_seal_first(self, cache) -> bool:
        """Whether a cache that is not sealed has more tokens than are protected."""
        first, _, n_new = self._extent(cache, self.press.full_layers(self._model(None)))
        return n_new > self._n_first(first)

    def run_if_due(self, cache, attention_mask: Tensor | None) -> None:
        """Seal the tail in the middle of a generation; what stands against it waits, and a note says so."""
        if not self.is_due(cache):
            return
        stats = cache.stats
        try:
            self.run(cache, attention_mask=attention_mask)
        except BeamsDiffer:
            note = "the tail was not sealed while beams that share a context differed"
        except BudgetTooSmall:
            self.next_try = cache.get_seq_length() + int(min(self.press.reseal_every or 64, 2**20))
            note = "the tail was not sealed while the budget did not pay for its fixed parts"
        else:
            return
        if note not in stats.notes:
            stats.notes.append(note)

    # --- internals --------------------------------------------------------------------------------------------------

    def _model(self, given):
        model = self.model() if given is None else given
        if model is None or self.press is None:
            raise ValueError(
                "the cache's press and model are not known any more (they are not pickled with it): use "
                "press.reseal(model, cache)"
            )
        return model

    def _extent(self, cache, layers: list[int]) -> tuple[VerKVLayer, int, int]:
        """First full-attention layer, tokens of the tail, and those of them that do not stay in it."""
        first = cache.layers[layers[0]]
        keys = first.unsealed()[0]
        n_tail = 0 if keys is None else keys.shape[2]
        return first, n_tail, n_tail - self.press.window(first.get_seq_length(), self.prefix_length)

    def _n_first(self, first: VerKVLayer) -> int:
        return self.press.n_protected_first(first.get_seq_length(), self.prefix_length)

    def _check_budget(self, model, cache, tail: Tail, attention_mask: Tensor | None, beams: int) -> None:
        """Raise BudgetTooSmall before anything is scored."""
        first = cache.layers[tail.layers[0]]
        if first.sealed:
            self.press.check_growth(first.context)
        prompt = self.press.segment(first.context, tail) if first.sealed else None
        if prompt is None:
            mask = None if attention_mask is None else attention_mask[:, : first.get_seq_length()]
            prompt = self.press.context(first.unsealed()[0], mask, self.prefix_length, beams)
        self.press.check_budget(first, prompt, model)

    def _scores(self, model, cache, tail: Tail, attention_mask: Tensor | None) -> Scores:
        if self.source is None:
            self.source = self.press.source()
            self.source.prepare(model)
        first = cache.layers[tail.layers[0]]
        if first.sealed or self.source.records != "ids":
            n_new = tail.n_new if first.sealed else tail.is_token.shape[1]
            return self.source.score_tail(model, cache, Tail(tail.layers, n_new, tail.is_token, tail.n_first))
        ids = self.source.known_ids(first, tail.is_token.shape[1])
        return self.source.after_prefill(model, cache, ids.to(first.device), attention_mask)


class BeamsDiffer(NotImplementedError):
    """Rows that share a context have different tails."""


def start_records(cache, layers: list[int]) -> None:
    """Begin to remember what sealing later needs."""
    adopt_layers(cache)
    for i in layers:
        if cache.layers[i].record is None:
            cache.layers[i].record = TailRecord()


def update_record(layer, change: Callable[[TailRecord], TailRecord]) -> None:
    """Replace a layer's record, where it has one."""
    if isinstance(layer, VerKVLayer) and layer.record is not None:
        layer.record = change(layer.record)


def tail_mask(layer: VerKVLayer, attention_mask: Tensor | None) -> Tensor:
    """Which tokens of the tail are not hidden, (B, t).

    Raises
    ------
    ValueError
        If the mask has another shape than all tokens, or hides sealed tokens differently than when they were sealed.
    """
    keys = layer.unsealed()[0]
    batch, n_tokens = keys.shape[0], layer.get_seq_length()
    if attention_mask is None:
        return torch.ones(batch, keys.shape[2], dtype=torch.bool, device=keys.device)
    if attention_mask.shape[0] != batch or attention_mask.dim() != 2 or attention_mask.shape[1] < n_tokens:
        raise ValueError(
            f"attention_mask must have shape {(batch, n_tokens)}, that of all tokens, got {tuple(attention_mask.shape)}"
        )
    seen = attention_mask[:, :n_tokens].to(keys.device).bool()
    if layer.sealed:
        context = layer.context.is_token().repeat_interleave(layer.context.beams, 0)
        if not torch.equal(seen[:, : layer.context.n_tokens], context):
            raise ValueError("attention_mask hides other sealed tokens than when they were sealed; hide the same")
    return seen[:, n_tokens - keys.shape[2] :]


def check_same_beams(layer: VerKVLayer, is_token: Tensor, beams: int) -> None:
    """Raise BeamsDiffer unless rows that share a context have the same tail: only then they can share a segment."""
    if beams == 1:
        return
    keys = layer.unsealed()[0].float()
    grouped, shown = keys.unflatten(0, (-1, beams)), is_token.unflatten(0, (-1, beams))
    atol = 1e-3 * float(keys.abs().amax())  # one token's keys in different rows of a batch may round differently
    if torch.allclose(grouped, grouped[:, :1].expand_as(grouped), rtol=0.0, atol=atol) and bool(
        (shown == shown[:, :1]).all()
    ):
        return
    raise BeamsDiffer(
        f"{beams} rows share each context, but their tails differ (beams in the middle of a search, or samples): keep "
        f"the rows to go on with by cache.batch_select_indices(rows), which gives each its own context, and reseal then"
    )
