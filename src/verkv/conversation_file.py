"""A conversation in a folder: its cache as a stored context, and one more file with what else there is to know."""

import contextlib
import dataclasses
import uuid
from pathlib import Path

import torch

from verkv.cache import VerKVLayer, unsealed_keys
from verkv.chat import Turn
from verkv.codecs.container import Container, write_container
from verkv.codecs.context_file import load_context, save_context
from verkv.codecs.errors import CodecError, CorruptFileError, FormatError, MismatchError
from verkv.codecs.tensor_store import TensorReader, TensorWriter
from verkv.segments import oracle
from verkv.tail import TailRecord
from verkv.tiers import HostParts, HostTier

FORMAT = "verkv.conversation"
FILE_NAME = "conversation.vkvc"
_RECORD_TENSORS = ("scores", "hidden", "queries", "ids")


def save_conversation(path, talk, codec=None) -> None:
    """Write a conversation to a folder, in one step: a crash leaves the one that was there before.

    Earlier turns cannot be rolled back to after loading: only the present state is kept.

    Parameters
    ----------
    path : path-like
        The folder; made if it is not there.
    talk : Conversation
    codec : KVTC, optional
        Codes the cache with loss, see :func:`verkv.codecs.save_context`. Bit by bit by default.

    Raises
    ------
    CodecError
        If the cache cannot be stored.
    """
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    writer, ids = TensorWriter(), talk.token_ids
    writer.put("token_ids", ids)
    header = {
        "format": FORMAT,
        "turns": [dataclasses.asdict(turn) for turn in talk.turns],
        "settings": _settings(talk),
        "pieces": _encoded_pieces(talk),
        "context": None,
        "records": _put_records(writer, talk.cache),
        "resealer": _put_resealer(writer, talk.cache),
        "tensors": writer.table,
    }
    if talk.turns:
        # A new name each time: until the other file is replaced, the old context goes with the old conversation.
        header["context"] = f"context-{uuid.uuid4().hex[:16]}.kvtc"
        n_sealed = [layer.context.n_tokens for layer in talk.cache.layers if getattr(layer, "sealed", False)]
        n_stored = n_sealed[0] if n_sealed else talk.cache.get_seq_length()
        save_context(
            folder / header["context"], talk.cache, talk.model, codec, token_ids=ids[:n_stored], press=talk.press
        )
    write_container(folder / FILE_NAME, header, writer.sections)
    for other in folder.glob("context-*.kvtc"):
        if other.name != header["context"]:
            with contextlib.suppress(OSError):
                other.unlink()


def load_conversation(kind, path, model, tokenizer, press, calibration, options: dict):
    """The conversation that :func:`save_conversation` wrote, at the end of its last turn.

    Parameters
    ----------
    kind : type
        Conversation, or a subclass.
    path : path-like
        The folder.
    model, tokenizer
        Those of the conversation.
    press : SealingPress, optional
        Seals what comes next: that of the conversation, or another. Its draws go on where they were.
    calibration : Artefact or path-like, optional
        Where the cache was coded.
    options : dict
        Instead of the settings that were saved.

    Raises
    ------
    CodecError
        If the files are damaged, no conversation, or of another model or tokenizer.
    """
    folder = Path(path)
    with Container(folder / FILE_NAME) as file:
        header = file.header
        if header.get("format") != FORMAT:
            raise FormatError(f"{file.path.name} is no stored conversation of this library")
        if not isinstance(header.get("settings"), dict):
            raise CorruptFileError(f"{file.path.name}: its header has no settings")
        talk = kind(model, tokenizer, press, **header["settings"] | options)
        try:
            reader = TensorReader(header["tensors"], file)
            talk.turns = tuple(Turn(**facts) for facts in header["turns"])
            talk._ids = reader.get("token_ids")
            if _encoded_pieces(talk) != header["pieces"]:
                raise MismatchError(f"{file.path.name} was saved with another tokenizer, chat template or system text")
            if header["context"] is not None:
                talk.cache = load_context(folder / header["context"], model, calibration)
                _restore(talk, header, reader)
            file.verify_unread()
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            if isinstance(error, CodecError):
                raise
            raise CorruptFileError(f"{file.path.name}: its header makes no sense ({error!r})") from error
    talk._n_cached = talk.cache.get_seq_length()
    if not len(talk._ids) - 1 <= talk._n_cached <= len(talk._ids):
        raise CorruptFileError(f"{folder.name}: the cache holds {talk._n_cached} of {len(talk._ids)} tokens")
    talk._moments = [None] * len(talk.turns)
    return talk


# --- writing ----------------------------------------------------------------------------------------------------------


def _settings(talk) -> dict:
    """Arguments of the conversation, as far as they are plain values."""
    plain = {name: v for name, v in talk.options.items() if isinstance(v, (bool, int, float, str, type(None)))}
    return {name: getattr(talk, name) for name in ("system", "chunk_size", "reseal", "keep_turns")} | plain


def _encoded_pieces(talk) -> list[list[int]]:
    """The template's pieces as tokens: what another tokenizer or template would change."""
    return [talk.tokenizer.encode(piece, add_special_tokens=False) for piece in vars(talk._pieces).values()]


def _put_records(writer: TensorWriter, cache) -> dict[str, int]:
    """What is remembered of the tails: by layer, where its queries end."""
    ends = {}
    for i, layer in enumerate(cache.layers):
        record = getattr(layer, "record", None)
        if record is not None:
            tensors = {name: getattr(record, name) for name in _RECORD_TENSORS}
            writer.put_all(f"record.{i}", {name: t for name, t in tensors.items() if t is not None})
            ends[str(i)] = record.queries_end
    return ends


def _put_resealer(writer: TensorWriter, cache) -> dict | None:
    resealer = getattr(cache, "resealer", None)
    if resealer is None:
        return None
    writer.put("drawn", resealer.generator.get_state())
    return {"prefix_length": resealer.prefix_length, "next_try": resealer.next_try}


# --- reading ----------------------------------------------------------------------------------------------------------


def _restore(talk, header: dict, reader: TensorReader) -> None:
    """What sealing the tail needs."""
    for name, queries_end in header["records"].items():
        layer = talk.cache.layers[int(name)]
        if not isinstance(layer, VerKVLayer):
            raise CorruptFileError(f"the header has a record of layer {name}, which keeps none")
        tensors = reader.get_all(f"record.{name}")
        device = unsealed_keys(layer).device
        tensors = {key: t if key == "ids" else t.to(device) for key, t in tensors.items()}
        layer.record = TailRecord(**tensors, queries_end=int(queries_end))
    for layer in talk.cache.layers:
        if getattr(layer, "sealed", False):
            _split_host(layer.context)
    facts = header["resealer"]
    if facts is not None:
        drawn = reader.get("drawn")
        if talk.press is not None:
            from verkv.presses.resealing import Resealer

            generator = torch.Generator()
            generator.set_state(drawn)
            resealer = Resealer(talk.press, talk.model, generator, int(facts["prefix_length"]))
            resealer.next_try = int(facts["next_try"])
            talk.cache.resealer = resealer


def _split_host(context) -> None:
    """Part the host tier by segments again: chunks read it block by block, and sums of other blocks round otherwise."""
    lengths = tuple(segment.n_tokens for segment in context.segments)
    if isinstance(context.host, HostTier) and len(lengths) > 1:
        sides = [side.split(lengths, 2) for side in (context.host.keys, context.host.values)]
        context.host = HostParts(tuple(HostTier(*pair) for pair in zip(*sides, strict=True)), lengths)
        if context.sketch is not None and context.sketch.is_oracle:
            context.sketch = oracle(context.sketch, context.host)
