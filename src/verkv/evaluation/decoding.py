"""Greedy answers on a prefilled cache, and how far a method's next-token distributions are from dense attention's."""

import time
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Question:
    """A question on top of a cache.

    Attributes
    ----------
    input_ids : Tensor, shape (1, Q), int64
    position : int
        Of the first token: how many the context has, whatever a press has left of them.
    max_new_tokens : int
    stop_ids : frozenset of int
        Tokens that end an answer.
    """

    input_ids: Tensor
    position: int
    max_new_tokens: int
    stop_ids: frozenset[int]


@dataclass(frozen=True)
class Answer:
    """What a method decodes.

    Attributes
    ----------
    tokens : list of int
        With the one that ends the answer, where there is one.
    logits : list of Tensor, shape (V,)
        Of every token.
    question_seconds, seconds_per_token : float
        Of the question's forward pass, and of a decode step.
    """

    tokens: list[int]
    logits: list[Tensor]
    question_seconds: float
    seconds_per_token: float


@dataclass(frozen=True)
class Reference:
    """Dense attention's answer.

    Attributes
    ----------
    tokens : list of int
    logits : Tensor, shape (n, V), float32
        Of each of them, on the CPU.
    """

    tokens: list[int]
    logits: Tensor

    @classmethod
    def of(cls, answer: Answer) -> "Reference":
        """From dense attention's own decoding."""
        return cls(answer.tokens, torch.stack(answer.logits).float().cpu())


@dataclass(frozen=True)
class Divergence:
    """How far a method is from dense attention on dense attention's own answer.

    Attributes
    ----------
    kl : float
        Mean of KL(dense || method) over the answer's tokens, in nats, >= 0.
    same_next : float
        Share of them where both find the same token most likely, in [0, 1].
    n_tokens : int
    """

    kl: float
    same_next: float
    n_tokens: int


@torch.inference_mode()
def decode(model, cache, question: Question) -> Answer:
    """Answer greedily; the cache takes in the question and all tokens of the answer but the last.

    Parameters
    ----------
    model : PreTrainedModel
    cache : transformers.Cache
        Of the context.
    question : Question

    Returns
    -------
    Answer
    """
    start = now(model)
    logits = [_forward(model, cache, question.input_ids, question.position)]
    tokens = [int(logits[0].argmax())]
    asked = now(model)
    position = question.position + question.input_ids.shape[1]
    while tokens[-1] not in question.stop_ids and len(tokens) < question.max_new_tokens:
        logits.append(_step(model, cache, tokens[-1], position + len(tokens) - 1))
        tokens.append(int(logits[-1].argmax()))
    n_steps = len(tokens) - 1
    return Answer(tokens, logits, asked - start, (now(model) - asked) / n_steps if n_steps else 0.0)


@torch.inference_mode()
def divergence(model, cache, question: Question, lengths: list[int], answer: Answer, dense: Reference) -> Divergence:
    """Compare next-token distributions along dense attention's answer.

    As far as the method has said the same, these are those of its own decoding. From there on dense attention's tokens
    are fed one at a time, as in decoding: a forward pass of several tokens would let each of them profit from what is
    fetched for the others.

    Parameters
    ----------
    model : PreTrainedModel
    cache : transformers.Cache
        As :func:`decode` has left it.
    question : Question
    lengths : list of int
        Of the cache's layers before the question.
    answer : Answer
        Of the method.
    dense : Reference

    Returns
    -------
    Divergence
    """
    n_same = common_prefix(answer.tokens, dense.tokens)
    logits = answer.logits[: n_same + 1][: len(dense.tokens)]
    if len(logits) < len(dense.tokens):
        n_question = question.input_ids.shape[1]
        if not _cut(cache, [length + n_question + n_same for length in lengths]):
            _cut(cache, lengths)  # a state that cannot go back so far starts from the context again
            logits, n_same = [_forward(model, cache, question.input_ids, question.position)], 0
        position = question.position + n_question
        for i in range(len(logits) - 1, len(dense.tokens) - 1):
            logits.append(_step(model, cache, dense.tokens[i], position + i))
    return compare(torch.stack(logits), dense.logits)


def compare(logits: Tensor, dense: Tensor) -> Divergence:
    """Of logits (n, V) from those of dense attention; in float64, where a KL divergence is not lost in rounding."""
    log_q, log_p = (t.to("cpu", torch.float64).log_softmax(-1) for t in (logits, dense))
    kl = (log_p.exp() * (log_p - log_q)).sum(-1)
    same = log_p.argmax(-1) == log_q.argmax(-1)
    return Divergence(float(kl.mean().clamp_min(0.0)), float(same.double().mean()), len(dense))


def common_prefix(first: list[int], second: list[int]) -> int:
    """How many leading tokens are equal."""
    n_equal = 0
    for a, b in zip(first, second, strict=False):
        if a != b:
            break
        n_equal += 1
    return n_equal


def roll_back(cache, lengths: list[int]) -> None:
    """Take a question and its answer out of a cache again.

    Parameters
    ----------
    cache : transformers.Cache
    lengths : list of int
        Of its layers before the question.
    """
    if not _cut(cache, lengths):
        raise AssertionError("a layer of the cache has forgotten the context's end")


def _cut(cache, lengths: list[int]) -> bool:
    """Bring layers back to these lengths, which presses may have made unequal; False if one has forgotten its state."""
    for layer, length in zip(cache.layers, lengths, strict=True):
        if layer.get_seq_length() <= length:
            continue
        try:
            if hasattr(layer, "roll_back_to"):
                layer.roll_back_to(length)
            else:
                layer.keys, layer.values = layer.keys[:, :, :length], layer.values[:, :, :length]
        except ValueError:
            return False
    return True


def _step(model, cache, token: int, position: int) -> Tensor:
    return _forward(model, cache, torch.tensor([[token]], device=model.device), position)


def _forward(model, cache, input_ids: Tensor, position: int) -> Tensor:
    """Logits (V,) of the token after ``input_ids`` (1, n), of which ``position`` is the first's."""
    positions = torch.arange(position, position + input_ids.shape[1], device=input_ids.device)[None]
    output = model(input_ids=input_ids, past_key_values=cache, position_ids=positions, logits_to_keep=1)
    return output.logits[0, -1]


def now(model) -> float:
    """The clock, in seconds, once the model's device has finished."""
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
    return time.perf_counter()
