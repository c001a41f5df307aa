"""One setting on one context: a cache that is compressed once, and questions asked on it one after the other."""

import copy
import dataclasses
from dataclasses import dataclass

import torch
from kvpress import FinchPress, KeyRerotationPress, RestoreKVPress
from torch import Tensor

from verkv.evaluation import prefix
from verkv.evaluation.decoding import Divergence, Question, Reference, decode, divergence, now, roll_back
from verkv.evaluation.methods import Setting
from verkv.presses import VerKVPress
from verkv.stats import FetchStats, memory_report

MAX_PAIRS = 256  # of bound and true error in an audited line


@dataclass(frozen=True)
class Outcome:
    """A method's answer, and what it took.

    Attributes
    ----------
    tokens : list of int
        Of the answer.
    reference : Reference
        Dense attention's answer that it was compared with.
    divergence : Divergence
    fields : dict
        Further fields of the answer's line, plain JSON: stats, notes, memory, timing, and by_head and audit where there
        are such.
    """

    tokens: list[int]
    reference: Reference
    divergence: Divergence
    fields: dict


class Trial:
    """A compressed cache that answers questions.

    Parameters
    ----------
    model : PreTrainedModel
    cache : transformers.Cache
        Of the context.
    full_bytes : int
        That the context takes uncompressed.
    timing : dict
        Seconds of what was done once.
    press : SealingPress, optional
        Ours, with its statistics.
    position : int, optional
        Of a question's first token, where it is not the context's length.
    """

    def __init__(self, model, cache, full_bytes: int, timing: dict, press=None, position: int | None = None):
        self.model, self.cache, self.timing = model, cache, timing
        self.press, self.position, self.notes = press, position, []
        self.lengths = [layer.get_seq_length() for layer in cache.layers]
        self.blank_stats = press and copy.deepcopy(press.stats)  # nothing is counted yet
        report = memory_report(cache)
        tiers = {name: sum(getattr(report, name).values()) for name in ("device", "device_uncharged", "host")}
        self.memory = tiers | {"full": full_bytes}

    def ask(self, question: Question, reference: Reference | None = None) -> Outcome:
        """Answer, compare with dense attention, and take everything out of the cache again.

        Parameters
        ----------
        question : Question
        reference : Reference, optional
            Not given for dense attention itself.
        """
        if self.position is not None:
            question = dataclasses.replace(question, position=self.position)
        answer = decode(self.model, self.cache, question)
        fields = self._statistics() | {"memory": self.memory}  # before anything else runs on the cache
        reference = reference or Reference.of(answer)
        found = divergence(self.model, self.cache, question, self.lengths, answer, reference)
        roll_back(self.cache, self.lengths)
        if self.press is not None:
            prefix.replace_statistics(self.press, self.cache, copy.deepcopy(self.blank_stats))
        of_answer = {"question_s": answer.question_seconds, "decode_s_per_token": answer.seconds_per_token}
        return Outcome(answer.tokens, reference, found, fields | {"timing": self.timing | of_answer})

    def _statistics(self) -> dict:
        if self.press is None:
            return {"stats": {}, "notes": self.notes}
        stats = self.press.stats
        summary = stats.summary()
        fields = {"notes": self.notes + summary.pop("notes"), "stats": summary}
        if stats.sealed_layers and isinstance(self.press, VerKVPress):
            fields["by_head"] = {"fetch_rate": rounded(stats.by_head()["fetch_rate"])}
        if stats.sealed_layers and self.press.audit:
            fields["audit"] = audit_of(stats)
        return fields


def open_trial(model, context_ids: Tensor, scored: prefix.ScoredContext, setting: Setting, press=None) -> Trial:
    """Compress a context as a setting says.

    Parameters
    ----------
    model : PreTrainedModel
    context_ids : Tensor, shape (1, T)
    scored : ScoredContext
    setting : Setting
    press : object, optional
        Of the setting; none for dense attention.

    Returns
    -------
    Trial

    Raises
    ------
    ValueError
        If the budget is impossible.
    """
    full_bytes, source = memory_report(scored.cache).full_bytes, setting.method.source
    if press is not None and setting.method.is_foreign:
        cache, seconds = prefix.prefill_with(model, context_ids, press)
        position = cache.get_seq_length() if _closes_gaps(press) else None
        trial = Trial(model, cache, full_bytes, {"prefill_s": seconds, "score_s": 0.0}, position=position)
        if trial.memory["device"] == full_bytes and setting.compression not in (None, 1.0):
            trial.notes.append("the press hides tokens and leaves them in memory: device is the full cache")
        return trial
    timing = {"prefill_s": scored.prefill_seconds, "score_s": scored.score_seconds.get(source, 0.0)}
    if press is None:
        cache = scored.offloaded() if setting.method.name == "dense_offloaded" else scored.fork()
        return Trial(model, cache, full_bytes, timing)
    start = now(model)
    cache = scored.sealed(model, press, source)
    return Trial(model, cache, full_bytes, timing | {"seal_s": now(model) - start}, press)


def _closes_gaps(press) -> bool:
    """Whether a press of KVPress gives what it leaves consecutive positions."""
    closes = isinstance(press, (KeyRerotationPress, RestoreKVPress))
    return closes or (isinstance(press, FinchPress) and press.rerotate_keys)


def audit_of(stats: FetchStats) -> dict:
    """Errors of an audited answer.

    Returns
    -------
    dict
        violation_rate (None without a tolerance), n_decisions, output_error_q50 and output_error_q90, and for methods
        with bounds ``pairs``: up to ``MAX_PAIRS`` of [bound before fetching, true error after it].
    """
    outputs = stats.output_errors()
    found = {
        "violation_rate": None if stats.epsilon is None else stats.violation_rate(),
        "n_decisions": stats.decisions(),
        "output_error_q50": float(outputs.quantile(0.5)),
        "output_error_q90": float(outputs.quantile(0.9)),
    }
    if stats.record_bounds:
        pairs = torch.stack([stats.bounds(), stats.relative_errors()], dim=-1)  # the same records in the same order
        every = max(1, -(-len(pairs) // MAX_PAIRS))
        found["pairs"] = [[float(f"{x:.4g}") for x in pair] for pair in pairs[::every].tolist()]
    return found


def rounded(rates: Tensor) -> list[list[float]]:
    """Rates to four digits."""
    return [[round(rate, 4) for rate in row] for row in rates.tolist()]
