"""Talks of several turns about long contexts: read, ask, go back, branch, keep; on top of a press and ``generate``."""

import contextlib
import copy
import dataclasses
import math
import threading
from collections.abc import Iterator

import torch
from torch import Tensor
from transformers import DynamicCache, StoppingCriteriaList

from verkv.branching import Moment, branch, held_tensors, recall, remember
from verkv.cache import layer_kinds, make_cache
from verkv.chat import BETWEEN_TEXTS, Turn, chat_pieces, streamed
from verkv.checks import check_count
from verkv.reading import active, forward, seal_tail, seals_by_itself
from verkv.stats import FetchStats, MemoryReport, memory_report

MAX_NEW_TOKENS = 256
_OWN_OPTIONS = ("inputs", "input_ids", "attention_mask", "past_key_values", "use_cache", "cache_implementation")
_OWN_OPTIONS += ("return_dict_in_generate", "max_length")


class Conversation:
    """A conversation of one user with a model, whose cache a press compresses while it grows.

    Of every turn only the new tokens are forwarded: those that the chat template adds, and the last of the answer
    before, which ``generate`` has not forwarded. A turn that fails, or is interrupted, leaves the conversation at the
    end of the turn before.

    Parameters
    ----------
    model : PreTrainedModel
    tokenizer : PreTrainedTokenizerBase
        Its chat template is used; without one, messages are separated by newlines.
    press : SealingPress, optional
        One of VerKV's. None keeps transformers' own cache: dense attention.
    system : str, optional
        The system's message; by default that of the template, if there is one.
    chunk_size : int, optional
        Read texts in chunks of that many tokens, see :func:`verkv.prefill`; by default at once.
    reseal : int, optional
        Least tokens beyond the window that are sealed between two turns, as one more segment. Not used where the press
        seals by itself (``reseal_every`` or ``max_tail``). None: only the press seals.
    keep_turns : int, optional
        How many turns it shall be possible to go back; all by default.
    **options
        Defaults for ``generate``; ``max_new_tokens`` is 256 otherwise.

    Attributes
    ----------
    cache : transformers.Cache
        Holds all tokens of :attr:`token_ids`, but for the last of the last answer.
    turns : tuple of Turn

    Examples
    --------
    >>> talk = Conversation(model, tokenizer, VerKVPress(KVzipPress(), 0.9375))  # doctest: +SKIP
    >>> talk.read(document)  # doctest: +SKIP
    >>> talk.ask("Who wrote this?")  # doctest: +SKIP
    """

    def __init__(
        self,
        model,
        tokenizer,
        press=None,
        *,
        system: str | None = None,
        chunk_size: int | None = None,
        reseal: int | None = 1024,
        keep_turns: int | None = None,
        **options,
    ):
        for name, value in (("chunk_size", chunk_size), ("reseal", reseal)):
            if value is not None:
                check_count(name, value, least=1)
        if keep_turns is not None:
            check_count("keep_turns", keep_turns)
        self.model, self.tokenizer, self.press = model, tokenizer, _prepared_press(press, reseal)
        self.system, self.chunk_size, self.reseal, self.keep_turns = system, chunk_size, reseal, keep_turns
        self.options = {"max_new_tokens": MAX_NEW_TOKENS} | options
        self._checked_options({})
        self._pieces = chat_pieces(tokenizer, system)
        is_plain = press is None and "linear_attention" not in layer_kinds(model.config)
        self.cache = DynamicCache(config=model.config) if is_plain else make_cache(model.config)
        self.turns: tuple[Turn, ...] = ()
        self._ids = torch.empty(0, dtype=torch.int64, device="cpu")
        self._n_cached = 0
        self._moments: list[Moment | None] = []  # before each turn; None where it is not known
        self._lock = threading.Lock()

    # --- turns ------------------------------------------------------------------------------------------------------

    def read(self, text: str) -> None:
        """Add a text that needs no answer: it opens a message of the user, which the next question ends.

        Parameters
        ----------
        text : str

        Raises
        ------
        ValueError
            If the text is empty, or the model's window does not hold it. Nothing is changed.
        """
        new = self._encoded(text, is_question=False)
        self._check_room(len(new), 0)
        with self._turn():
            start = len(self._ids)
            self._ids = torch.cat([self._ids, new])
            self._forward(self._ids[self._n_cached :])
            self._finish(Turn(text, None, start, len(self._ids), len(self._ids)))

    def ask(self, question: str, *, streamer=None, **options) -> str:
        """Ask, and append the answer.

        Parameters
        ----------
        question : str
        streamer : BaseStreamer, optional
            One of transformers', such as ``TextStreamer(tokenizer, skip_prompt=True)``.
        **options
            For ``generate``, instead of the conversation's defaults.

        Returns
        -------
        str
            The answer, without special tokens.

        Raises
        ------
        ValueError
            If the question is empty, an option is the conversation's own, or the model's window does not hold question
            and answer. Nothing is changed.
        NotImplementedError
            For beams and several answers at once, or if the press cannot score what is to be sealed.
        """
        new, options = self._encoded(question), self._checked_options(options)
        self._check_room(len(new), options["max_new_tokens"])
        with self._turn():
            start, prompt = len(self._ids), torch.cat([self._ids, new])
            if self._reads_first(len(new)):
                self._forward(prompt[self._n_cached : -1])
            answer = self._generated(prompt, streamer, options)
            self._ids = torch.cat([prompt, answer])
            text = self.tokenizer.decode(answer, skip_special_tokens=True)
            self._finish(Turn(question, text, start, len(prompt), len(self._ids)))
        return text

    def stream(self, question: str, **options) -> Iterator[str]:
        """Ask, and yield the answer piece by piece, while a thread generates it.

        The turn is complete when the last piece has been taken. Breaking off before discards it.

        Parameters
        ----------
        question, **options
            As in :meth:`ask`.
        """
        new, checked = self._encoded(question), self._checked_options(options)
        self._check_room(len(new), checked["max_new_tokens"])  # now, not when the first piece is asked for
        return self._stream(question, options)

    def undo(self) -> None:
        """Forget the last turn."""
        if not self.turns:
            raise ValueError("there is no turn to undo")
        self.roll_back(len(self.turns) - 1)

    def roll_back(self, turn: int) -> None:
        """Return to the end of a turn, bit by bit: sample, draws, statistics; with 0, to the start.

        Parameters
        ----------
        turn : int
            How many of :attr:`turns` are kept.

        Raises
        ------
        ValueError
            If there are not so many turns, or that turn is further back than ``keep_turns`` or the file that the
            conversation was loaded from.
        """
        with self._alone():
            if check_count("turn", turn, least=0) > len(self.turns):
                raise ValueError(f"turn={turn}, but there are {len(self.turns)} turns")
            if turn == len(self.turns):
                return
            moment = self._moments[turn]
            if moment is None:
                raise ValueError(
                    f"the end of turn {turn} is not known: it is further back than keep_turns={self.keep_turns}, or "
                    f"the conversation was loaded after it"
                )
            self.cache = recall(moment, self.cache)
            self._n_cached = self.cache.get_seq_length()
            self._moments, self.turns = self._moments[:turn], self.turns[:turn]
            self._ids = self._ids[: self.turns[-1].end if self.turns else 0]

    def branch(self) -> "Conversation":
        """A conversation that goes on from here by itself; nothing is copied, see :func:`verkv.branching.branch`."""
        with self._alone():
            twin = copy.copy(self)
            twin.cache, twin._moments, twin._lock = branch(self.cache), list(self._moments), threading.Lock()
        return twin

    # --- what there is ----------------------------------------------------------------------------------------------

    @property
    def token_ids(self) -> Tensor:
        """All tokens, (T,), int64, on the CPU."""
        return self._ids.clone()

    @property
    def stats(self) -> FetchStats | None:
        """Of the cache, since it was sealed; None before."""
        return getattr(self.cache, "stats", None)

    @property
    def memory(self) -> MemoryReport:
        """Bytes of the cache; ``host["earlier_turns"]`` is what :meth:`roll_back` needs besides."""
        report, counted = memory_report(self.cache), _storages(self.cache)
        kept = {}
        for moment in self._moments:
            kept |= _storages(moment.cache) if moment is not None else {}
        n_bytes = sum(size for address, size in kept.items() if address not in counted)
        return dataclasses.replace(report, host=report.host | {"earlier_turns": n_bytes})

    def __repr__(self) -> str:
        name = "dense" if self.press is None else type(self.press).__name__
        return f"Conversation({len(self.turns)} turns, {len(self._ids):,} tokens, {name})"

    # --- files ------------------------------------------------------------------------------------------------------

    def save(self, path, codec=None) -> None:
        """Keep the conversation in a folder; see :func:`verkv.conversation_file.save_conversation`."""
        from verkv.conversation_file import save_conversation

        with self._alone():
            save_conversation(path, self, codec)

    @classmethod
    def load(cls, path, model, tokenizer, press=None, calibration=None, **options) -> "Conversation":
        """The conversation that :meth:`save` kept; see :func:`verkv.conversation_file.load_conversation`."""
        from verkv.conversation_file import load_conversation

        return load_conversation(cls, path, model, tokenizer, press, calibration, options)

    # --- checks -----------------------------------------------------------------------------------------------------

    def _checked_options(self, options: dict) -> dict:
        """Those of ``generate``, with defaults."""
        options = self.options | options
        own = [name for name in _OWN_OPTIONS if name in options]
        if own:
            raise ValueError(f"{own[0]} is the conversation's own; lengths are limited by max_new_tokens")
        if options["max_new_tokens"] == 0:
            raise ValueError("max_new_tokens must be at least 1; read(text) adds a text without an answer")
        check_count("max_new_tokens", options["max_new_tokens"], least=1)
        defaults = options.get("generation_config", self.model.generation_config)
        for name in ("num_beams", "num_return_sequences"):
            if options.get(name, getattr(defaults, name, None)) not in (None, 1):
                raise NotImplementedError(f"{name} must be 1: a conversation goes on from one answer")
        return options

    def _encoded(self, text: str, is_question: bool = True) -> Tensor:
        """The tokens (n,) that a message adds."""
        if not isinstance(text, str) or not text.strip():
            raise ValueError(
                f"a turn needs a text that is not empty, got {text!r} (several conversations at once are not "
                f"supported: make one object for each)"
            )
        if not self.turns:
            before = self._pieces.opening
        else:
            before = BETWEEN_TEXTS if self.turns[-1].answer is None else self._pieces.following
        whole = before + text + (self._pieces.answering if is_question else "")
        return self.tokenizer.encode(whole, add_special_tokens=False, return_tensors="pt")[0]

    def _check_room(self, n_new: int, max_new_tokens: int) -> None:
        """Raise ValueError if tokens would lie beyond the model's window."""
        config = self.model.config.get_text_config(decoder=True)
        longest = getattr(config, "max_position_embeddings", None)
        if longest is not None and len(self._ids) + n_new + max_new_tokens > longest:
            answer = f" and max_new_tokens={max_new_tokens}" if max_new_tokens else ""
            raise ValueError(
                f"the model's window of {longest} tokens does not hold {n_new} more{answer} beside {len(self._ids)} "
                f"that are there; shorten them, or roll back"
            )

    def _check_cache(self) -> None:
        """The cache must hold the conversation's tokens and no others."""
        if self.cache.get_seq_length() != self._n_cached:
            raise ValueError(
                f"the cache holds {self.cache.get_seq_length()} tokens, {self._n_cached} of them this conversation's: "
                f"it was used otherwise. Call undo(), and use branch().cache for that"
            )

    # --- running ----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Refuse to do two things at once."""
        if not self._lock.acquire(blocking=False):
            raise RuntimeError("the conversation is in the middle of a turn: take all pieces of its stream first")
        try:
            yield
        finally:
            self._lock.release()

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        """All of a turn or nothing."""
        with self._alone():
            self._check_cache()
            is_sealed_later = self.press is not None and not self.press.keeps_everything
            moment, before = remember(self.cache, is_sealed_later), (self._ids, self.turns)
            try:
                yield
            except BaseException:
                self.cache, (self._ids, self.turns) = recall(moment, self.cache), before
                raise
            self._moments.append(moment)
            n_lost = 0 if self.keep_turns is None else max(0, len(self._moments) - self.keep_turns)
            self._moments[:n_lost] = [None] * n_lost
            self._n_cached = self.cache.get_seq_length()

    def _finish(self, turn: Turn) -> None:
        """Append a turn, and seal what is due."""
        if self.cache.get_seq_length() > len(self._ids):  # tokens that were tried behind the answer's end
            self.cache.crop(len(self._ids))
        self.turns += (turn,)
        if not seals_by_itself(self.press) and self.reseal is not None:
            seal_tail(self.model, self.press, self.cache, self.reseal)

    def _generated(self, prompt: Tensor, streamer, options: dict) -> Tensor:
        """The answer (n,) to all tokens there are, without the token that ends it: the next turn begins with that."""
        ids = prompt[None].to(self.model.device)
        with active(self.press, self.model, self.cache):
            output = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                past_key_values=self.cache,
                streamer=streamer,
                **options,
            )
        answer = output[0, len(prompt) :].to("cpu")
        defaults = options.get("generation_config", self.model.generation_config)
        stops = options.get("eos_token_id", getattr(defaults, "eos_token_id", None))
        stops = stops if isinstance(stops, (list, tuple)) else [stops]
        return answer[:-1] if int(answer[-1]) in stops else answer

    def _reads_first(self, n_new: int) -> bool:
        """Whether a question is forwarded before ``generate`` is called, which then begins with its last token."""
        is_first = self.press is not None and not self.cache.get_seq_length()
        return n_new > 1 and (is_first or (self.chunk_size is not None and n_new > self.chunk_size))

    def _forward(self, ids: Tensor) -> None:
        self.cache = forward(self.model, self.press, self.cache, ids[None].to(self.model.device), self.chunk_size)

    def _stream(self, question: str, options: dict) -> Iterator[str]:
        n_turns = len(self.turns)

        def ask(streamer, check) -> None:
            criteria = StoppingCriteriaList([*(options.get("stopping_criteria") or []), check])
            self.ask(question, streamer=streamer, **options | {"stopping_criteria": criteria})

        is_taken = False
        try:
            yield from streamed(self.tokenizer, ask)
            is_taken = True
        finally:
            if not is_taken and len(self.turns) > n_turns:  # the answer was complete before its pieces were taken
                self.undo()


def _prepared_press(press, reseal: int | None):
    """The press, or a copy that remembers what sealing between turns needs."""
    if press is None:
        return None
    from verkv.presses.sealing_press import SealingPress

    if not isinstance(press, SealingPress):
        raise ValueError(
            f"press must be one of VerKV's or None, got {type(press).__name__}: a cache that another press prunes does "
            f"not know how many tokens it has seen. Scorers can be wrapped: VerKVPress(SnapKVPress(), ...)"
        )
    if reseal is None or press.seals_tails:
        return press
    press = copy.copy(press)
    press.max_tail = math.inf
    return press


def _storages(cache) -> dict[int, int]:
    """Bytes of the memory that a cache refers to, by address."""
    storages = [tensor.untyped_storage() for tensor in held_tensors(cache).values()]
    return {storage.data_ptr(): storage.nbytes() for storage in storages}
