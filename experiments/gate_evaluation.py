"""How well gates guess KVzip's scores of texts they have not seen, against what needs no training."""

import copy
import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from gate_data import load_tensors
from scipy import stats
from torch import Tensor

from verkv import FastKVzipPress, KVzipPress, VerKVPress, make_cache
from verkv.demo import ANSWER_PREFIX, INTRODUCTION, KEYS, NEEDLE, QUESTION, Task, encode_task

GUESSES = {
    "gate": "trained gate",
    "token": "mean training score of the same token",
    "position": "mean training score at the same place",
    "expected": "KVPress' ExpectedAttentionPress",
    "knorm": "KVPress' KnormPress (small key norm)",
}
TOP_SHARE = 0.1
SMOOTHING = 33  # tokens that a place's mean is taken over: a single place has one score per training document
N_BEFORE_ANSWER = 2  # tokens that an answer may begin with, as a colon and a space
N_ENDS = 16  # sinks, and as many local tokens, of VerKV on the short contexts of the check

# --- measures ---------------------------------------------------------------------------------------------------------


def rank_correlation(guess: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """Spearman's rank correlation along the last axis; ties share their mean rank. NaN where one side is constant."""
    ranks = [stats.rankdata(x, axis=-1) for x in (guess, truth)]
    a, b = (r - r.mean(-1, keepdims=True) for r in ranks)
    with np.errstate(invalid="ignore"):
        return (a * b).sum(-1) / np.sqrt((a * a).sum(-1) * (b * b).sum(-1))


def top_overlap(guess: np.ndarray, truth: np.ndarray, share: float = TOP_SHARE) -> np.ndarray:
    """Which part of the ``share`` of tokens with the largest truth is among as many with the largest guess."""
    n_top = max(1, round(share * truth.shape[-1]))
    chosen = [np.argsort(-x, axis=-1, kind="stable")[..., :n_top] for x in (guess, truth)]
    masks = [np.zeros(truth.shape, bool) for _ in chosen]
    for mask, index in zip(masks, chosen, strict=True):
        np.put_along_axis(mask, index, True, axis=-1)
    return (masks[0] & masks[1]).sum(-1) / n_top


@dataclass(frozen=True)
class Mean:
    """A mean over documents with its 95 % interval (Student's t), which is None for a single document."""

    mean: float
    low: float | None
    high: float | None

    @classmethod
    def over(cls, values: np.ndarray) -> "Mean":
        """Of one value per document."""
        mean = float(np.mean(values))
        if len(values) < 2:
            return cls(mean, None, None)
        half = float(stats.t.ppf(0.975, len(values) - 1) * np.std(values, ddof=1) / np.sqrt(len(values)))
        return cls(mean, mean - half, mean + half)


# --- guesses ----------------------------------------------------------------------------------------------------------


def token_means(ids: Tensor, scores: Tensor, n_ids: int) -> Tensor:
    """Mean score (Hkv, n_ids) of each token id over ``ids`` (N,) and ``scores`` (Hkv, N); the mean of all if unseen."""
    sums = torch.zeros(len(scores), n_ids).index_add_(1, ids, scores)
    counts = torch.zeros(n_ids).index_add_(0, ids, torch.ones(len(ids)))
    return torch.where(counts > 0, sums / counts.clamp_min(1), scores.mean(1, keepdim=True))


def position_means(scores: list[Tensor]) -> Tensor:
    """Mean score (Hkv, T) at each place of documents of the same length, smoothed along it."""
    mean = torch.stack(scores).mean(0)
    width = min(SMOOTHING, mean.shape[1] - 1 + mean.shape[1] % 2)  # odd, and no wider than the document
    padded = torch.nn.functional.pad(mean[None], (width // 2, width // 2), mode="replicate")
    return torch.nn.functional.avg_pool1d(padded, width, stride=1)[0]


@torch.inference_mode()
def layer_guesses(gate, layer: int, train: list[Path], held_out: list[Path], prefix: int) -> dict[str, list[Tensor]]:
    """Every guess, and KVzip's scores, of one layer of each held-out document, (Hkv, T) without the prefix."""
    content = lambda name, paths: [t[..., prefix:] for t in load_tensors(paths, name)]  # noqa: E731
    ids = {name: [t.long() for t in content("ids", paths)] for name, paths in (("train", train), ("test", held_out))}
    known = content(f"kvzip.{layer}", train)
    n_ids = 1 + max(int(t.max()) for t in ids["train"] + ids["test"])
    by_token = token_means(torch.cat(ids["train"]), torch.cat(known, 1), n_ids)
    by_place = position_means(known)
    return {
        "kvzip": content(f"kvzip.{layer}", held_out),
        "gate": [gate(hidden[prefix:][None])[0] for hidden in load_tensors(held_out, f"hidden.{layer}")],
        "token": [by_token[:, t] for t in ids["test"]],
        "position": [by_place for _ in held_out],
        "expected": content(f"expected.{layer}", held_out),
        "knorm": content(f"knorm.{layer}", held_out),
    }


def evaluate(gates: list, train: list[Path], held_out: list[Path], prefix: int) -> dict:
    """Rank correlation and overlap of the top tenth on the held-out documents.

    Parameters
    ----------
    gates : list of FastKVzipGate or None
        By layer.
    train, held_out : list of path
        Stored documents, all of the same length.
    prefix : int
        Leading tokens of the chat template, which are left out.

    Returns
    -------
    dict
        ``rank_correlation`` and ``top_overlap`` of every guess: the mean over layers and KV heads of what one head's
        tokens give; ``pooled_rank_correlation``: all tokens, heads and layers of a document ranked together, as when
        they compete for one budget; ``layers``: the gates' figures by layer. Intervals are over documents.
    """
    correlations, overlaps = ({name: [] for name in GUESSES} for _ in range(2))
    pooled: dict[str, list[list[np.ndarray]]] = {name: [] for name in ["kvzip", *GUESSES]}
    layers = [i for i, gate in enumerate(gates) if gate is not None]
    for i in layers:
        found = layer_guesses(gates[i], i, train, held_out, prefix)
        arrays = {name: np.stack([t.numpy() for t in tensors]) for name, tensors in found.items()}  # (docs, Hkv, T)
        for name in GUESSES:
            correlations[name].append(rank_correlation(arrays[name], arrays["kvzip"]).mean(1))
            overlaps[name].append(top_overlap(arrays[name], arrays["kvzip"]).mean(1))
        for name, array in arrays.items():
            pooled[name].append(array.reshape(len(array), -1))
    joined = {name: np.concatenate(parts, 1) for name, parts in pooled.items()}
    return {
        "rank_correlation": {name: vars(Mean.over(np.mean(rows, 0))) for name, rows in correlations.items()},
        "top_overlap": {name: vars(Mean.over(np.mean(rows, 0))) for name, rows in overlaps.items()},
        "pooled_rank_correlation": {
            name: vars(Mean.over(rank_correlation(joined[name], joined["kvzip"]))) for name in GUESSES
        },
        "layers": [
            {"layer": i, "rank_correlation": vars(Mean.over(c)), "top_overlap": vars(Mean.over(o))}
            for i, c, o in zip(layers, correlations["gate"], overlaps["gate"], strict=True)
        ],
    }


# --- in a press -------------------------------------------------------------------------------------------------------


def needle_task(text: str, seed: int) -> Task:
    """A text with a needle in it and a question about it."""
    rng = random.Random(seed)
    key, number = rng.choice(KEYS), str(rng.randrange(10**6, 10**7))
    blocks = text.split("\n\n")
    blocks.insert(rng.randrange(len(blocks) + 1), NEEDLE.format(key=key, number=number))
    context = INTRODUCTION + "\n\n".join(blocks)
    return Task(context, QUESTION.format(key=key), ANSWER_PREFIX.format(key=key), number)


def presses(gates: list, ratio: float, seed: int) -> dict:
    """What the gates are compared in: alone and under VerKV, with KVzip's own scores and with the gates'."""
    sampled = {"compression_ratio": ratio, "n_sink": N_ENDS, "n_local": N_ENDS, "seed": seed}
    return {
        "KVzip": KVzipPress(ratio),
        "Fast KVzip": FastKVzipPress(ratio, gates=gates),
        "VerKV(KVzip)": VerKVPress(KVzipPress(), **sampled),
        "VerKV(Fast KVzip)": VerKVPress(FastKVzipPress(gates=gates), **sampled),
    }


@torch.inference_mode()
def answer_logprobs(model, cache, question: Tensor, answer: Tensor | None, n_tokens: int) -> tuple[Tensor, Tensor]:
    """Log-probabilities (n, vocabulary) at each token of an answer, and the answer (n,): greedy if none is given."""
    step, rows, taken = question, [], []
    for i in range(n_tokens):
        logits = model(input_ids=step, past_key_values=cache, logits_to_keep=1).logits[0, -1].float()
        rows.append(logits.log_softmax(-1))
        taken.append(logits.argmax() if answer is None else answer[i])
        step = taken[-1].view(1, 1)
    return torch.stack(rows), torch.stack(taken)


@torch.inference_mode()
def check_task(model, tokenizer, task: Task, named_presses: dict) -> list[dict]:
    """Answer one task with every press, teacher-forced on dense attention's own greedy answer.

    ``same_answer`` is True where each next token is dense's: then greedy decoding gives dense's answer.
    """
    context, question = encode_task(tokenizer, task, model.device)
    n_tokens = len(tokenizer.encode(task.answer, add_special_tokens=False)) + N_BEFORE_ANSWER
    backbone = getattr(model, "model", None) or model.base_model
    plain = make_cache(model.config)
    backbone(input_ids=context, past_key_values=plain)
    source = KVzipPress(tokenizer=tokenizer).source()
    source.prepare(model)
    scores = source.after_prefill(model, plain, context, None)
    dense, answer = answer_logprobs(model, copy.deepcopy(plain), question, None, n_tokens)
    right = task.answer in tokenizer.decode(answer)
    rows = []
    for name, press in named_presses.items():
        if "Fast" in name:
            cache = make_cache(model.config)
            with press(model):
                backbone(input_ids=context, past_key_values=cache)
        else:  # KVzip's scores are those of the replay above
            cache = copy.deepcopy(plain)
            press.seal(model, cache, scores, prefix_length=source.prefix_length)
        logprobs, _ = answer_logprobs(model, cache, question, answer, n_tokens)
        same = logprobs.argmax(-1) == answer
        rows.append(
            {
                "press": name,
                "n_tokens": context.shape[1],
                "dense_is_right": right,
                "same_answer": bool(same.all()),
                "same_next_token": float(same.float().mean()),
                "kl": float((dense.exp() * (dense - logprobs)).sum(-1).mean()),
            }
        )
    return rows
