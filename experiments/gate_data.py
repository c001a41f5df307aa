"""What Fast KVzip's gates learn from: texts, and on them a model's hidden states and KVzip scores."""

import hashlib
import json
import os
import random
import re
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from verkv import make_cache

# --- texts ------------------------------------------------------------------------------------------------------------


def pydoc_texts() -> dict[str, str]:
    """The language reference that every Python carries, by topic."""
    from pydoc_data.topics import topics

    return dict(topics)


def read_texts(paths: Iterable[Path]) -> dict[str, str]:
    """Text files by their names.

    Raises
    ------
    ValueError
        If one cannot be read as UTF-8.
    """
    texts = {}
    for path in paths:
        try:
            texts[str(path)] = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"--text {str(path)!r} cannot be read: {error}") from error
    return texts


def tokenise(texts: dict[str, str], tokenizer) -> dict[str, list[int]]:
    """Ids of every text without the paragraphs that an earlier one had: no passage comes twice."""
    seen: set[str] = set()
    ids = {}
    for name, text in texts.items():
        blocks = []
        for block in re.split(r"\n\s*\n", text):
            if block not in seen:
                blocks.append(block)
                seen.add(block)
        if any(block.strip() for block in blocks):
            ids[name] = tokenizer.encode("\n\n".join(blocks) + "\n\n", add_special_tokens=False)
    return ids


def split_documents(
    ids: dict[str, list[int]], n_train: int, n_held_out: int, n_tokens: int, seed: int
) -> tuple[list[list[int]], list[list[int]]]:
    """Documents of ``n_tokens`` ids for training and for testing, which share no text.

    A held-out document takes texts of its own, so that the documents are independent; the training documents are cut
    one after the other out of what remains.

    Parameters
    ----------
    ids : dict of str to list of int
        Of :func:`tokenise`.
    n_train, n_held_out, n_tokens, seed : int

    Raises
    ------
    ValueError
        If there is not enough text.
    """
    names = sorted(ids)
    random.Random(seed).shuffle(names)
    names.sort(key=lambda name: len(ids[name]) > 2 * n_tokens)  # a long text would mostly be wasted on one document
    held_out: list[list[int]] = []
    document: list[int] = []
    while len(held_out) < n_held_out and names:
        document = document + ids[names.pop(0)]
        if len(document) >= n_tokens:
            held_out.append(document[:n_tokens])
            document = []
    random.Random(seed).shuffle(names)
    rest = [token for name in names for token in ids[name]]
    train = [rest[i * n_tokens : (i + 1) * n_tokens] for i in range(min(n_train, len(rest) // n_tokens))]
    if len(held_out) < n_held_out or len(train) < n_train:
        raise ValueError(
            f"the text gives {len(train)} documents of {n_tokens} tokens for training and {len(held_out)} others, "
            f"{n_train} and {n_held_out} are wanted: lower --documents, --held-out or --tokens, or pass more --text"
        )
    return train, held_out


# --- a model's hidden states and KVzip scores -------------------------------------------------------------------------


def attention_modules(model) -> dict[int, nn.Module]:
    """Attention modules of the layers that attend to the whole context, by layer."""
    text = model.config.get_text_config(decoder=True)
    kinds = getattr(text, "layer_types", None) or ["full_attention"] * text.num_hidden_layers
    backbone = getattr(model, "model", None) or model.base_model
    layers = getattr(backbone, "language_model", backbone).layers
    return {i: layers[i].self_attn for i, kind in enumerate(kinds) if kind == "full_attention"}


class Recorder:
    """Forward hooks that keep what enters each attention layer, and the scores that baselines give."""

    def __init__(self, model, scorers: dict):
        backbone = getattr(model, "model", None) or model.base_model
        self.rotary = getattr(backbone, "language_model", backbone).rotary_emb
        self.modules, self.scorers = attention_modules(model), scorers
        self.tensors: dict[str, Tensor] = {}

    def __enter__(self) -> "Recorder":
        self.handles = [m.register_forward_hook(self._observe, with_kwargs=True) for m in self.modules.values()]
        self.lent = [m for m in self.modules.values() if self.scorers and not hasattr(m, "rotary_emb")]
        for module in self.lent:  # where KVPress' scorers look for it
            module.rotary_emb = self.rotary
        return self

    def __exit__(self, *error) -> None:
        for handle in self.handles:
            handle.remove()
        for module in self.lent:
            del module.rotary_emb

    def _observe(self, module, args, kwargs, output) -> None:
        hidden, i = kwargs["hidden_states"], module.layer_idx
        self.tensors[f"hidden.{i}"] = hidden[0].half()
        layer = kwargs["past_key_values"].layers[i]
        for name, scorer in self.scorers.items():
            score = scorer.score(module, hidden, layer.keys, layer.values, None, kwargs)
            self.tensors[f"{name}.{i}"] = score[0].float()


@torch.inference_mode()
def observe(model, source, ids: Tensor, scorers: dict) -> dict[str, Tensor]:
    """Prefill a document, replay it, and keep what gates learn from.

    Parameters
    ----------
    model
    source : verkv's KVzip score source, prepared
    ids : Tensor, shape (1, T), int64
    scorers : dict of str to kvpress.ScorerPress
        Baselines.

    Returns
    -------
    dict of str to Tensor
        ``ids`` (T,), and per layer i ``hidden.i`` (T, D) in float16, ``kvzip.i`` (Hkv, T) in [0, 1] and
        ``<baseline>.i`` (Hkv, T).

    Raises
    ------
    ValueError
        If hidden states do not fit into float16.
    """
    cache = make_cache(model.config)
    with Recorder(model, scorers) as recorder:
        (getattr(model, "model", None) or model.base_model)(input_ids=ids, past_key_values=cache)
    tensors = recorder.tensors
    if not all(bool(torch.isfinite(t).all()) for name, t in tensors.items() if name.startswith("hidden.")):
        raise ValueError("this model's hidden states leave the range of float16, in which they are stored")
    scores = source.after_prefill(model, cache, ids, None)
    tensors |= {f"kvzip.{i}": scores[i][0].float() for i in recorder.modules}
    return {name: tensor.cpu().contiguous() for name, tensor in (tensors | {"ids": ids[0]}).items()}


def fingerprint(model, ids: Tensor, scorers: dict) -> str:
    """What a stored document depends on."""
    weights = model.get_input_embeddings().weight.double().sum().item()
    text = model.config.get_text_config(decoder=True)
    sizes = [text.num_hidden_layers, text.hidden_size, text.num_attention_heads, text.num_key_value_heads]
    stated = json.dumps([weights, sizes, sorted(scorers), ids.flatten().tolist()])
    return hashlib.sha256(stated.encode()).hexdigest()


def store(path: Path, make: Callable[[], dict[str, Tensor]], mark: str) -> bool:
    """Write what ``make()`` returns, unless the file has it already. True if it was made.

    Raises
    ------
    ValueError
        If the file holds something else.
    """
    if path.exists():
        with safe_open(path, "pt") as file:
            found = (file.metadata() or {}).get("fingerprint")
        if found != mark:
            raise ValueError(f"--data-dir has {path.name!r} of another run: name another folder, or empty this one")
        return False
    unfinished = path.with_suffix(".part")
    save_file(make(), unfinished, metadata={"fingerprint": mark})
    os.replace(unfinished, path)  # a run that is killed leaves no half document behind
    return True


def load_tensors(paths: list[Path], name: str) -> list[Tensor]:
    """One tensor of every document, float32."""
    loaded = []
    for path in paths:
        with safe_open(path, "pt") as file:
            loaded.append(file.get_tensor(name).float())
    return loaded
