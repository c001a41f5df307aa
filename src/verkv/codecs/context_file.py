"""Keep a cache between turns: to a file, and back in another process. With a codec or as it is, plain or sealed.

The file holds a list of segments: stretches of one sequence, each coded or raw. Today there is one.
"""

import dataclasses
import os

import torch
from torch import Tensor

from verkv import __version__
from verkv.attention import wrap_attention_functions
from verkv.cache import VerKVLayer
from verkv.codecs.artefact import Artefact
from verkv.codecs.cache_access import coded_layers, dense_cache
from verkv.codecs.compressed import CompressedCache
from verkv.codecs.config import KvtcConfig
from verkv.codecs.container import POSITIONS, Container, Section, SectionKey, write_container
from verkv.codecs.errors import CodecError, CorruptFileError, FormatError, MismatchError
from verkv.codecs.kvtc import KVTC
from verkv.codecs.layout import check_positions
from verkv.codecs.model_binding import config_hash, hash_tokens, weights_hash
from verkv.codecs.object_state import dump_state, load_state
from verkv.codecs.raw_layers import check_complete, fill_layers, put_layers, set_states
from verkv.codecs.tensor_store import TensorReader, TensorWriter, tensor_bytes
from verkv.members import join_layers
from verkv.stats import FetchStats
from verkv.tiers import HostTier, ResidentRows
from verkv.values import ValueNorms

FORMAT = "verkv.context"
_SEALING = 1  # group number of the sections that hold what sealing has added
_STATS_FIELDS = ("method", "epsilon", "delta", "sketch", "notes", "record_bounds")


def save_context(
    path: str | os.PathLike,
    cache,
    model,
    codec: KVTC | None = None,
    positions: Tensor | None = None,
    token_ids: Tensor | None = None,
    press=None,
) -> int:
    """Write a cache to a file, in one step: a crash leaves the file that was there before.

    Parameters
    ----------
    path : path-like
    cache : transformers.Cache
        Prefilled: plain, or sealed by one of VerKV's presses. Of a sealed one everything that later answers depend on
        is kept: sample, probabilities, sketch, tolerances, the tail of new tokens, the host tier.
    model : PreTrainedModel or PreTrainedConfig
        That it is of. With a model, a hash of its weights is stored and compared when the file is loaded.
    codec : KVTC, optional
        Codes the full-attention layers, with loss. Of a sealed cache it codes the host tier; on loading, host tier and
        resident rows are both restored from it, so what a press guarantees then refers to the restored cache. Give the
        codec at least the press' sinks and window. Without a codec everything comes back bit by bit.
    positions : Tensor, shape (T,), optional
        RoPE positions, for the codec; by default 0 .. T - 1 behind the left padding.
    token_ids : Tensor, shape (T,), optional
        Of the context (of a sealed cache: of what was sealed). Their hash is stored, see :func:`is_prefix`.
    press : optional
        The press that sealed the cache: its settings, with the seed, are recorded in the header.

    Returns
    -------
    int
        Bytes of the file.

    Raises
    ------
    CodecError
        If the cache is empty or cannot be coded.
    """
    config = getattr(model, "config", model)
    sealed = [i for i, layer in enumerate(cache.layers) if isinstance(layer, VerKVLayer) and layer.sealed]
    header = {
        "format": FORMAT,
        "kind": "sealed" if sealed else "cache",
        "config_sha256": config_hash(config),
        "weights_sha256": weights_hash(model) if hasattr(model, "named_parameters") else None,
        "verkv": __version__,
        "press": _press_settings(press),
    }
    sections: list[tuple[SectionKey, Section]] = []
    if codec is not None:
        if sealed:
            positions = _padded_positions(cache.layers[sealed[0]], positions)
        compressed = codec.compress(cache, positions, token_ids)
        header["segments"] = [compressed.segment]
        sections += [(key, compressed.sections.stored(key)) for key in compressed.sections]
    else:
        segment, raw = _raw_segment(cache, config, sealed, positions, token_ids)
        header["segments"] = [segment]
        sections += raw
    if sealed:
        writer = TensorWriter(group=_SEALING)
        header["sealed"] = _describe_sealing(cache, sealed, writer, is_coded=codec is not None)
        header["sealed"]["tensors"] = writer.table
        sections += writer.sections
    return write_container(path, header, sections)


@torch.no_grad()
def load_context(
    path: str | os.PathLike,
    model,
    artefact: Artefact | str | os.PathLike | None = None,
    device: torch.device | str | None = None,
):
    """The cache that :func:`save_context` wrote, ready for the next question.

    Parameters
    ----------
    path : path-like
    model : PreTrainedModel or PreTrainedConfig
        That the context was saved for.
    artefact : Artefact or path-like, optional
        The calibration, where the context was coded.
    device : device, optional
        Where the cache shall be; the model's by default.

    Returns
    -------
    VerKVCache
        Sealed if the saved one was; its statistics start anew.

    Raises
    ------
    CodecError
        If the file is damaged, no stored context, or of another model or calibration. Nothing is returned then.
    """
    config = getattr(model, "config", model)
    device = torch.device(device or getattr(model, "device", "cpu"))
    with Container(path) as file:
        header = _checked_header(file, config, model)
        segment = _only_segment(header)
        cache = dense_cache(config)
        sealing = header.get("sealed") if header["kind"] == "sealed" else None
        try:
            if segment["kind"] == "kvtc":
                compressed = _open_segment(file, segment, artefact, model)
                for layer, keys, values in compressed.iter_layers(device=device):
                    set_states(cache.layers[layer], keys, values)
                described, number = segment["raw_layers"], compressed.number
            elif segment["kind"] == "raw":
                described, number = segment["layers"], 0
            else:
                raise CorruptFileError(f"the file has a segment of unknown kind {segment['kind']!r}")
            reader = TensorReader(segment["tensors"], file, number)
            full = set(coded_layers(config))
            fill_layers(cache, described, reader, full, device)
            if sealing is not None:
                sealed_reader = TensorReader(sealing["tensors"], file, group=_SEALING)
                _seal(cache, sealing, sealed_reader, device, is_coded=segment["kind"] == "kvtc")
            fill_layers(cache, described, reader, set(range(len(cache.layers))) - full, device)
            check_complete(cache, int(segment["n_tokens"]))
            file.verify_unread()
        except (KeyError, TypeError, ValueError, IndexError, AttributeError, RuntimeError) as error:
            if isinstance(error, (CodecError, NotImplementedError)):
                raise
            raise CorruptFileError(f"{file.path.name}: its header makes no sense ({error!r})") from error
    return cache


def open_context(path: str | os.PathLike, model, artefact: Artefact | str | os.PathLike) -> CompressedCache:
    """A coded context in a file, to read single layers or tokens of it. The file stays open as long as the object.

    Raises
    ------
    CodecError
        If the file is damaged or of another kind, model or calibration.
    """
    file = Container(path)
    try:
        header = _checked_header(file, getattr(model, "config", model), model)
        segment = _only_segment(header)
        if segment.get("kind") != "kvtc":
            raise FormatError(f"{file.path.name} holds a cache that is not coded; use load_context")
        return _open_segment(file, segment, artefact, model)
    except BaseException:
        file.close()
        raise


def is_prefix(path: str | os.PathLike, token_ids: Tensor) -> bool:
    """Whether a prompt (T',) begins with the tokens of a stored context, as far as their hash was stored with it."""
    with Container(path) as file:
        segment = _only_segment(_checked_format(file))
        ids = torch.as_tensor(token_ids).reshape(-1)
        n_tokens, stored = int(segment["n_tokens"]), segment.get("token_ids_sha256")
        return stored is not None and len(ids) >= n_tokens and hash_tokens(ids[:n_tokens], n_tokens) == stored


# --- writing ------------------------------------------------------------------------------------------------------


def _raw_segment(cache, config, sealed: list[int], positions, token_ids) -> tuple[dict, list]:
    """All layers as they are, but those that are sealed and keep no full copy."""
    without_copy = {i for i in sealed if cache.layers[i].context.host is None}
    writer = TensorWriter()
    layers = put_layers(writer, cache, [i for i in range(len(cache.layers)) if i not in without_copy])
    n_tokens = cache.layers[sealed[0]].context.n_tokens if sealed else cache.get_seq_length()
    if not n_tokens:
        raise CodecError("the cache holds no tokens; prefill it before it is saved")
    positions = tensor_bytes(check_positions(positions, n_tokens))
    segment = {
        "kind": "raw",
        "n_tokens": n_tokens,
        "token_ids_sha256": hash_tokens(token_ids, n_tokens),
        "layers": layers,
        "tensors": writer.table,
    }
    return segment, [(SectionKey(POSITIONS), Section(positions, len(positions))), *writer.sections]


def _padded_positions(layer: VerKVLayer, positions: Tensor | None) -> Tensor | None:
    """Positions of a sealed context behind its left padding."""
    context = layer.context
    if positions is not None or len(context.n_padding) != 1:
        return positions
    return (torch.arange(context.n_tokens) - int(context.n_padding[0])).clamp_min(0)


def _describe_sealing(cache, sealed: list[int], writer: TensorWriter, is_coded: bool) -> dict:
    stats = getattr(cache, "stats", None) or FetchStats("unknown")
    layers = {}
    for index in sealed:
        layer = cache.layers[index]
        if is_coded and layer.context.codes is None:
            raise CodecError(
                "the cache was sealed without fetching, so its rows are kept without their positions and cannot be "
                "restored from coded keys and values; save it without a codec"
            )
        name = f"layer.{index}"
        layers[str(index)] = {
            "context": dump_state(_storable_context(layer.context), writer, f"{name}.context"),
            "tail": dump_state([layer.tail_keys, layer.tail_values], writer, f"{name}.tail"),
        }
    facts = {field: getattr(stats, field) for field in _STATS_FIELDS}
    return {"layers": layers, "stats": facts | {"sealed_layers": list(sealed), "full_bytes": stats.full_bytes}}


def _storable_context(context):
    """A copy of a sealed context without what is stored elsewhere, can be made again, or belongs to this process."""
    stored = object.__new__(type(context))
    vars(stored).update(vars(context))
    stored.stats = None
    stored.host = context.host is not None
    if context.codes is not None:
        stored.surplus = context.rows.surplus
        stored.rows = None  # gathered again, from the same keys and values
    if context.sketch is not None and context.sketch.is_oracle:
        stored.sketch = dataclasses.replace(context.sketch)  # the recipe: its keys are the host tier's
    return stored


def _press_settings(press) -> dict | None:
    if press is None:
        return None
    plain = (bool, int, float, str, type(None))
    fields = {f.name: getattr(press, f.name) for f in dataclasses.fields(press)}
    return {"press": type(press).__name__} | {name: v for name, v in fields.items() if isinstance(v, plain)}


# --- reading ------------------------------------------------------------------------------------------------------


def _checked_format(file: Container) -> dict:
    if file.header.get("format") != FORMAT or file.header.get("kind") not in ("cache", "sealed"):
        raise FormatError(f"{file.path.name} is no stored context of this library")
    return file.header


def _checked_header(file: Container, config, model) -> dict:
    header = _checked_format(file)
    if header.get("config_sha256") != config_hash(config):
        raise MismatchError(f"{file.path.name} was saved for a model with other layers, heads or RoPE than this one")
    stored = header.get("weights_sha256")
    if stored is not None and hasattr(model, "named_parameters") and weights_hash(model) != stored:
        raise MismatchError(f"{file.path.name} was saved for a model with other weights than this one")
    return header


def _only_segment(header: dict) -> dict:
    segments = header.get("segments")
    if not isinstance(segments, list) or not all(isinstance(segment, dict) for segment in segments):
        raise CorruptFileError("the file's header has no list of segments")
    if len(segments) != 1:
        raise CodecError(f"the file holds {len(segments)} segments; this version reads contexts of one")
    return segments[0]


def _open_segment(file: Container, segment: dict, artefact, model) -> CompressedCache:
    if artefact is None:
        raise MismatchError(f"{file.path.name} holds a coded context; pass the calibration it was coded with")
    artefact = artefact if isinstance(artefact, Artefact) else Artefact(artefact)
    if segment.get("artefact_sha256") != artefact.content_hash or segment.get("layout") != artefact.layout.to_json():
        raise MismatchError(f"{file.path.name} was coded with another calibration than {artefact.path.name}")
    try:
        config = KvtcConfig(**segment["config"])
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptFileError(f"{file.path.name}: its codec's configuration makes no sense ({error})") from None
    return CompressedCache(KVTC(artefact, model, config), segment, file)


def _seal(cache, sealing: dict, reader: TensorReader, device: torch.device, is_coded: bool) -> None:
    """Put sealed contexts in the place of the full keys and values, as the press had left them."""
    wrap_attention_functions()
    facts = dict(sealing["stats"])
    sealed_layers, full_bytes = tuple(facts.pop("sealed_layers")), facts.pop("full_bytes")
    stats = FetchStats(**facts)
    stats.sealed_layers, stats.full_bytes = sealed_layers, full_bytes
    stats.notes = [*stats.notes, "loaded from a file: counts start there"]
    join_layers(cache.layers)
    for index in sealed_layers:
        layer, stored = cache.layers[index], sealing["layers"][str(index)]
        context = load_state(stored["context"], reader, device)
        context.stats = stats
        context.segments = tuple(segment.with_counts_on_cpu() for segment in context.segments)
        context.host = HostTier.copy_from(layer.keys, layer.values) if context.host else None
        if context.codes is not None:
            codes = context.codes.unflatten(0, (context.n_contexts, context.n_kv_heads))
            rows = ResidentRows.gather(layer.keys, layer.values, codes)
            context.rows = dataclasses.replace(rows, surplus=vars(context).pop("surplus", None))
        if context.sketch is not None and context.sketch.is_oracle:
            context.sketch = context.sketch.build(context.host.keys)
        if is_coded and context.value_norms is not None:  # bounds must hold for the values that are read
            is_token = torch.arange(context.n_tokens, device=device) >= context.n_padding[:, None]
            context.value_norms = ValueNorms.measure(layer.values, is_token)
        tail_keys, tail_values = load_state(stored["tail"], reader, device)
        layer.lazy_initialization(tail_keys, tail_values)
        layer.keys = layer.values = None
        layer.tail_keys, layer.tail_values, layer.context = tail_keys, tail_values, context
    cache.stats = stats
