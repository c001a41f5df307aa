"""The cache: a layer that is transformers' own until it is sealed, and helpers to make and seal whole caches."""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from verkv.attention import SealedHandle, wrap_attention_functions
from verkv.context import SealedContext, SealPlan
from verkv.hybrid import HybridStates, LinearLayer, repair_linear_attention
from verkv.members import Member, join_layers, kept_length
from verkv.segments import last_probs
from verkv.stats import FetchStats, MemoryReport, memory_report
from verkv.tail import TailRecord
from verkv.window import WindowLayer


class SealedKV:
    """Stands for ``layer.keys`` or ``layer.values`` of a sealed layer: shape, dtype and prefix slices, no data.

    KVPress rolls a cache back with ``layer.keys = layer.keys[:, :, :n]``; copying the host tier for that would defeat
    the purpose.
    """

    def __init__(self, layer: "VerKVLayer", head_dim: int, length: int):
        self.layer, self.head_dim, self.length = layer, head_dim, length

    @property
    def shape(self) -> torch.Size:
        """(B, Hkv, length, d)."""
        context = self.layer.context
        return torch.Size((context.n_contexts * context.beams, context.n_kv_heads, self.length, self.head_dim))

    @property
    def dtype(self) -> torch.dtype:
        """Of the cache."""
        return self.layer.context.dtype

    @property
    def device(self) -> torch.device:
        """Where the layer computes."""
        return self.layer.context.device

    def numel(self) -> int:
        """Elements of the full cache this stands for."""
        return self.shape.numel()

    def __getitem__(self, index) -> "SealedKV":
        if isinstance(index, tuple) and index and index[0] is Ellipsis and len(index) == 3:
            index = (slice(None), slice(None), *index[1:])
        is_prefix = (
            isinstance(index, tuple)
            and len(index) in (3, 4)
            and all(i == slice(None) for i in (*index[:2], *index[3:]))
            and isinstance(index[2], slice)
        )
        if is_prefix:
            start, stop, step = index[2].indices(self.length)
            if start == 0 and step == 1:
                return SealedKV(self.layer, self.head_dim, stop)
        raise NotImplementedError(
            "keys and values of a sealed layer can only be sliced as [:, :, :n]; the rest is offloaded"
        )


class VerKVLayer(Member, DynamicLayer):
    """A cache layer that behaves as transformers' ``DynamicLayer`` until :meth:`seal`.

    Sealed, the context lives in a :class:`~verkv.context.SealedContext` and new tokens in a tail that is always exact,
    until they are sealed as a further segment. Lengths stay logical: positions, masks and ``generate`` see the full
    context.
    """

    is_sliding = False

    def __init__(self):
        self.context: SealedContext | None = None
        self.record: TailRecord | None = None  # what sealing the tail will need, where it is to be sealed
        self._length_before = 0
        super().__init__()

    @classmethod
    def adopt(cls, layer: DynamicLayer) -> "VerKVLayer":
        """A VerKV layer with the state of a plain one, to take its place in ``cache.layers``."""
        adopted = cls()
        adopted._keys, adopted._values = layer.keys, layer.values
        for name in ("dtype", "device", "is_initialized"):
            if hasattr(layer, name):
                setattr(adopted, name, getattr(layer, name))
        return adopted

    # --- sealing ----------------------------------------------------------------------------------------------------

    @property
    def sealed(self) -> bool:
        """Whether the context has been split over device and host."""
        return self.context is not None

    def seal(self, plan: SealPlan, stats: FetchStats) -> None:
        """Split the first unsealed tokens as planned, as many as there are codes; the device's full copy is freed.

        Parameters
        ----------
        plan : SealPlan
            Of a context, or of its next segment.
        stats : FetchStats
            Shared by the cache's layers.
        """
        wrap_attention_functions()
        n_sealed, (all_keys, all_values) = plan.codes.shape[2], self.unsealed()
        keys, values = (t[:: plan.beams, :, :n_sealed] for t in (all_keys, all_values))
        if self.context is None:
            self.context = SealedContext(keys, values, plan, self._index, stats)
        else:
            self.context.append(keys, values, plan)
        # Copied, so that the memory of what is sealed is freed.
        self.tail_keys, self.tail_values = (t[:, :, n_sealed:].clone() for t in (all_keys, all_values))
        self._keys = self._values = None
        if self.record is not None:
            self.record = self.record.drop_first(n_sealed)

    def unsealed(self) -> tuple[Tensor, Tensor]:
        """Keys and values (B, Hkv, t, d) of the tokens that are not sealed."""
        return (self.tail_keys, self.tail_values) if self.sealed else (self._keys, self._values)

    def unseal(self) -> None:
        """Bring the full context back to the device (undoes every :meth:`seal`; needs the host tier)."""
        if self.context.host is None:
            raise RuntimeError("the layer keeps no host copy of the context, so it cannot be unsealed")
        keys, values = self.context.host.keys, self.context.host.values
        repeat = lambda t: t.to(self.context.device).repeat_interleave(self.context.beams, 0)  # noqa: E731
        self._keys = torch.cat([repeat(keys), self.tail_keys], 2)
        self._values = torch.cat([repeat(values), self.tail_values], 2)
        self.context = None

    def memory(self) -> dict[str, dict[str, int]]:
        """Bytes by tier and part of a sealed layer."""
        parts = self.context.memory()
        parts["device_uncharged"]["tail"] = self.tail_keys.nbytes + self.tail_values.nbytes
        if self.record is not None:
            parts["device_uncharged"] |= self.record.device_bytes()
            parts["host"] |= self.record.host_bytes()
        return parts

    @property
    def full_bytes(self) -> int:
        """Bytes of the context uncompressed."""
        return self.context.full_bytes

    @torch.compiler.disable  # ragged shapes and reads from the host: tracing them takes long and gains nothing
    def attend(self, query: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
        """Attention of the tokens just added; (B, Hq, Tq, d) -> (B, Tq, Hq, d), as attention functions return it."""
        output = self.context.attend(query, self.tail_keys, self.tail_values, mask, scaling)
        return output.transpose(1, 2).contiguous()

    def undo_update(self) -> None:
        """Take back what a failed forward pass has appended to this and the layers before it."""
        for _, layer in self._siblings:
            if layer.get_seq_length() > self._length_before:
                layer.roll_back_to(self._length_before)
        self.context.stats.drop_pass_until(self._index)

    def roll_back_to(self, length: int) -> None:
        """Keep the first ``length`` tokens, whatever transformers' convention for :meth:`crop` is."""
        self._crop_to(length)

    # --- what transformers calls ------------------------------------------------------------------------------------

    @property
    def keys(self) -> Tensor | SealedKV | None:
        """The keys; of a sealed layer a stand-in that can be sliced to a prefix."""
        return SealedKV(self, self.context.key_dim, self.get_seq_length()) if self.sealed else self._keys

    @keys.setter
    def keys(self, value):
        self._assign("_keys", value)

    @property
    def values(self) -> Tensor | SealedKV | None:
        """The values; see :attr:`keys`."""
        return SealedKV(self, self.context.value_dim, self.get_seq_length()) if self.sealed else self._values

    @values.setter
    def values(self, value):
        self._assign("_values", value)

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs):
        """Append tokens; returns what the attention function gets as keys and values."""
        self.refuse_half_a_forward(key_states.shape[2])
        if not self.sealed:
            return super().update(key_states, value_states, *args, **kwargs)
        self._check_states(key_states, value_states)
        self._length_before = self.get_seq_length()
        # Detached: no gradient flows through a sealed layer, and the tail would keep the graph of every pass alive.
        self.tail_keys = torch.cat([self.tail_keys, key_states.detach()], dim=2)
        self.tail_values = torch.cat([self.tail_values, value_states.detach()], dim=2)
        return SealedHandle.wrap(self.tail_keys, self), SealedHandle.wrap(self.tail_values, self)

    def get_seq_length(self) -> int:
        """Logical length: context and tail, whatever is resident."""
        if self.sealed:
            return self.context.n_tokens + self.tail_keys.shape[2]
        if not self.is_initialized or self._keys is None or self._keys.numel() == 0:
            return 0
        return self._keys.shape[2]

    def get_mask_sizes(self, query) -> tuple[int, int]:
        """Length and offset of the mask; ``query`` is a count, or positions before transformers 5.4.

        While the context is streamed the mask covers the tail only, so that it does not grow with the context.
        """
        n_new = query if isinstance(query, int) else query.shape[0]
        if self.sealed and self.context.is_streaming:
            return self.tail_keys.shape[2] + n_new, self.context.n_tokens
        return self.get_seq_length() + n_new, 0

    def crop(self, max_length: int) -> None:
        """Keep a prefix, see :func:`~verkv.members.kept_length`. The first sealed segment cannot be cut."""
        self._crop_to(kept_length(max_length, self.get_seq_length()))

    def reset(self) -> None:
        """Forget everything; the layer is an empty plain one again."""
        self.context, self._keys, self._values, self.is_initialized = None, None, None, False
        self.tail_keys = self.tail_values = self.record = None
        self.leave()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Permute the batch. Beams of one context share it, so only their tails move."""
        if not self.sealed:
            self._map_record(lambda t: t[beam_idx.to(t.device)])
            return super().reorder_cache(beam_idx)
        contexts = beam_idx.to("cpu") // self.context.beams
        if not torch.equal(contexts, torch.arange(len(beam_idx), device="cpu") // self.context.beams):
            self.context = self.context.select(beam_idx)
        self._index_tail(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every batch row; repeats share their context."""
        self._map_record(lambda t: t.repeat_interleave(repeats, dim=0))
        if not self.sealed:
            return super().batch_repeat_interleave(repeats)
        self.context.beams *= repeats
        self.tail_keys = self.tail_keys.repeat_interleave(repeats, dim=0)
        self.tail_values = self.tail_values.repeat_interleave(repeats, dim=0)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep some batch rows."""
        if not self.sealed:
            self._map_record(lambda t: t[indices.to(t.device)])
            return super().batch_select_indices(indices)
        self.context = self.context.select(indices)
        self._index_tail(indices)

    def offload(self) -> None:
        """Nothing: what is offloaded is decided when sealing."""

    def prefetch(self) -> None:
        """Nothing: rows are read when a plan asks for them."""

    # --- internals --------------------------------------------------------------------------------------------------

    def _assign(self, name: str, value) -> None:
        if not self.sealed:
            setattr(self, name, value)
        elif isinstance(value, SealedKV) and value.layer is self:
            self._crop_to(value.length)
        else:
            raise NotImplementedError(
                "keys and values of a sealed layer cannot be replaced (is a second press pruning the cache?); "
                "reset the cache"
            )

    def _check_states(self, key_states: Tensor, value_states: Tensor) -> None:
        """New tokens must come from the batch and the model that the context was sealed for."""
        for new, tail in ((key_states, self.tail_keys), (value_states, self.tail_values)):
            given, expected = (*new.shape[:2], new.shape[3]), (*tail.shape[:2], tail.shape[3])
            if given != expected:
                raise ValueError(
                    f"past_key_values was sealed for {expected[0]} rows, {expected[1]} KV heads and head dim "
                    f"{expected[2]}, but the new tokens have {given[0]}, {given[1]} and {given[2]}; use the cache with "
                    f"its own model and batch, or repeat it with cache.batch_repeat_interleave"
                )

    def _crop_to(self, length: int) -> None:
        if length >= self.get_seq_length():
            return
        if not self.sealed:
            if self.record is not None:
                self.record = self.record.cut(length, length)
            self._keys, self._values = self._keys[:, :, :length], self._values[:, :, :length]
            return
        self.check_crop(length)
        self._cut_tail(length)
        while length < self.context.n_tokens:
            self._bring_back_segment()
            self._cut_tail(length)
        count_sealed([layer for _, layer in self._siblings], self.context.stats)

    def _cut_tail(self, length: int) -> None:
        """Leave as much of the tail as makes ``length`` tokens with the context, or nothing."""
        n_kept = max(0, length - self.context.n_tokens)
        self.tail_keys, self.tail_values = self.tail_keys[:, :, :n_kept], self.tail_values[:, :, :n_kept]
        if self.record is not None:
            self.record = self.record.cut(n_kept, length)

    def check_crop(self, length: int) -> None:
        """Raise ValueError unless the tokens behind ``length`` can be taken out."""
        if not self.sealed:
            return
        lengths = [segment.n_tokens for segment in self.context.segments]
        if length < lengths[0]:
            raise ValueError(
                f"max_length={length} cuts into the sealed context of {lengths[0]} tokens; reset the cache and prefill "
                f"the shorter context"
            )
        ends = {sum(lengths[: number + 1]) for number in range(len(lengths))}
        if length < self.context.n_tokens and length not in ends and self.context.host is None:
            raise ValueError(
                f"max_length={length} cuts into a sealed segment whose tokens are on no host: this cache can go back "
                f"to {sorted(ends)} tokens; audit=True keeps a host copy"
            )

    def _bring_back_segment(self) -> None:
        """Take the last segment out of the context; its tokens, where the host has them, are the tail then."""
        probs, n_tokens = last_probs(self.context), self.context.segments[-1].n_tokens
        states = self.context.drop_last()
        if states is not None:
            self.tail_keys, self.tail_values = (t.repeat_interleave(self.context.beams, 0) for t in states)
        if self.record is not None and states is not None:
            self.record = self.record.bring_back(n_tokens, probs, self.context.beams)

    def _index_tail(self, indices: Tensor) -> None:
        indices = indices.to(self.tail_keys.device)
        self.tail_keys, self.tail_values = self.tail_keys[indices], self.tail_values[indices]
        self._map_record(lambda t: t[indices.to(t.device)])

    def _map_record(self, function) -> None:
        if self.record is not None:
            self.record = self.record.map(function)


class VerKVCache(Cache):
    """A cache whose full-attention layers can be sealed. See :func:`make_cache`."""

    stats: FetchStats | None = None
    resealer = None  # what seals the tail, bound by the press that sealed the context

    def reseal(self, **options) -> None:
        """Seal the tail as a further segment; see :func:`reseal`."""
        reseal(self, **options)

    def memory_report(self) -> MemoryReport:
        """Bytes on the device by part, and on the host."""
        return memory_report(self)

    def crop(self, max_length: int) -> None:
        """Keep a prefix; nothing is changed where a layer cannot.

        Sealed layers bring the tokens of later segments back from the host. They cannot go below the end of the first
        segment, and without a host copy only to the end of one.

        Raises
        ------
        ValueError
            If a layer cannot go back so far.
        """
        for layer in self.layers:
            if not isinstance(layer, LinearLayer):
                layer.check_crop(kept_length(max_length, layer.get_seq_length()))
        super().crop(max_length)

    def reset(self) -> None:
        """Forget everything, statistics included."""
        super().reset()
        self.stats = self.resealer = None


class VerKVHybridCache(HybridStates, VerKVCache):
    """The cache of models with linear-attention layers. See :func:`make_cache`."""

    def __init__(self, layers: list):
        super().__init__(layers=layers)
        join_layers(self.layers)


def make_cache(config) -> VerKVCache:
    """An empty cache for a model, ready to be sealed by a press.

    A plain ``DynamicCache()`` works as well: a press then swaps its layers in place. This one keeps sliding-window
    layers at their window's size. Models with linear-attention layers (Qwen3.5, Qwen3-Next) need this one, uncompressed
    too: with transformers' own, 5.2 forgets the context at every forward pass of several tokens. The cache is a
    :class:`VerKVHybridCache` then, and the class of those layers is repaired.

    Parameters
    ----------
    config : transformers.PreTrainedConfig
        Of the model.

    Returns
    -------
    VerKVCache

    Raises
    ------
    NotImplementedError
        For models with linear-attention layers of another kind, or another transformers than 5.2 to 5.4.
    """
    kinds = layer_kinds(config)
    text = config.get_text_config(decoder=True)
    window = getattr(text, "sliding_window", None) or getattr(text, "attention_chunk_size", None)
    make_layer = {"full_attention": VerKVLayer, "linear_attention": LinearLayer}
    layers = [make_layer[kind]() if kind in make_layer else WindowLayer(sliding_window=window) for kind in kinds]
    if "linear_attention" not in kinds:
        return VerKVCache(layers=layers)
    repair_linear_attention(config)
    return VerKVHybridCache(layers)


def layer_kinds(config) -> list[str]:
    """Kind of every decoder layer: "full_attention", "sliding_attention", "chunked_attention" or "linear_attention".

    Raises
    ------
    NotImplementedError
        For kinds that VerKV can neither seal nor leave alone.
    """
    text = config.get_text_config(decoder=True)
    if getattr(text, "num_kv_shared_layers", 0):
        raise NotImplementedError(
            f"the model shares keys and values between layers (num_kv_shared_layers={text.num_kv_shared_layers}), "
            f"which is not supported; use the model without VerKV"
        )
    kinds = getattr(text, "layer_types", None)
    if kinds is None:  # Mistral, Ministral3: one window for all layers, or none
        windowed = getattr(text, "sliding_window", None) or getattr(text, "attention_chunk_size", None)
        kinds = ["sliding_attention" if windowed else "full_attention"] * text.num_hidden_layers
    unknown = set(kinds) - {"full_attention", "sliding_attention", "chunked_attention", "linear_attention"}
    if unknown:
        raise NotImplementedError(
            f"the model has layers of type {sorted(unknown)}, whose state VerKV cannot roll back; use a model with "
            f"full, sliding and linear attention only"
        )
    return list(kinds)


def check_cache(cache, kinds: list[str]) -> None:
    """Raise unless every full-attention layer of the cache could be sealed.

    Raises
    ------
    NotImplementedError
        For quantised, static and offloading caches; with linear-attention layers for all but ``make_cache``'s.
    """
    if "linear_attention" in kinds and not isinstance(cache, HybridStates):
        given = "is missing" if cache is None else f"is a {type(cache).__name__}"
        raise NotImplementedError(
            f"past_key_values {given}, but the model has linear-attention layers, whose state only VerKV's cache can "
            f"roll back; pass verkv.make_cache(model.config)"
        )
    if not hasattr(cache, "layers"):
        raise NotImplementedError(f"past_key_values of type {type(cache).__name__} has no layers; pass DynamicCache()")
    if getattr(cache, "offloading", False):
        raise NotImplementedError("past_key_values with offloading=True moves layers by itself; pass DynamicCache()")
    for kind, layer in zip(kinds, cache.layers, strict=False):
        if kind == "full_attention" and type(layer) not in (DynamicLayer, VerKVLayer):
            raise NotImplementedError(
                f"past_key_values has a layer of type {type(layer).__name__}, which cannot be sealed (quantised "
                f"and static caches cannot); pass DynamicCache() or verkv.make_cache(model.config)"
            )


def empty_cache(cache) -> None:
    """Forget everything, also of a plain cache, whose own ``reset`` zeroes its tensors but keeps their length."""
    for layer in cache.layers:
        if isinstance(layer, (VerKVLayer, WindowLayer, LinearLayer)):
            layer.reset()
        else:
            layer.keys, layer.values, layer.is_initialized = None, None, False
            if hasattr(layer, "cumulative_length"):
                layer.cumulative_length = 0


def reseal(cache, **options) -> None:
    """Seal the tail of a sealed cache as a further segment, with the press that sealed it.

    The tail's last ``n_local`` tokens stay in the tail: the exact window moves. Earlier segments are not touched.

    Parameters
    ----------
    cache : transformers.Cache
        Sealed by one of VerKV's presses, between two forward passes.
    **options
        ``attention_mask`` (B, T): the mask of the whole sequence, where it hides more than left padding; hidden tokens
        are never attended to again. ``scores`` (dict of int to Tensor (B, Hkv, t)): importance of all t tokens of the
        tail by layer, instead of the press' own. ``model``: where it is not known any more, as after unpickling.

    Raises
    ------
    ValueError
        If there is nothing to seal, no press to seal it with, or what the scores need is missing. The cache is left as
        it was.
    NotImplementedError
        If beams that share a context differ in their tails, or the press' scores cannot be had for a segment.
    """
    resealer = getattr(cache, "resealer", None)
    if resealer is None:
        raise ValueError(
            "the cache was sealed by no press of this process that could seal its tail; use press.reseal(model, cache)"
        )
    resealer.run(cache, **options)


@contextlib.contextmanager
def counted_apart(cache, name: str, exact: bool) -> Iterator[None]:
    """Count forward passes in ``cache.stats.chunks`` or ``.replays``, and attend exactly to what the host holds.

    Parameters
    ----------
    cache : transformers.Cache
        Sealed or not.
    name : {"chunks", "replays"}
    exact : bool
        Read the whole context from the host in blocks, where it is there, instead of planning.
    """
    contexts = [layer.context for layer in cache.layers if getattr(layer, "sealed", False)]
    before = [(context.stats, context.is_streaming) for context in contexts]
    try:
        for context in contexts:
            context.stats = context.stats.apart(name)
            context.is_streaming = exact and context.host is not None
        yield
    finally:
        for context, (stats, is_streaming) in zip(contexts, before, strict=True):
            context.stats, context.is_streaming = stats, is_streaming


def unsealed_keys(layer) -> Tensor:
    """Keys (B, Hkv, t, d) of a layer's tokens that are not sealed; of a plain layer those of all."""
    return unsealed_states(layer)[0]


def unsealed_states(layer) -> tuple[Tensor, Tensor]:
    """As :func:`unsealed_keys`, and the values."""
    return layer.unsealed() if isinstance(layer, VerKVLayer) else (layer.keys, layer.values)


def adopt_layers(cache) -> None:
    """Swap plain layers for VerKV's, in place: also those that are not sealed must roll back and reset."""
    for index, layer in enumerate(cache.layers):
        if type(layer) is DynamicLayer:
            cache.layers[index] = VerKVLayer.adopt(layer)
        elif type(layer) is DynamicSlidingWindowLayer:
            cache.layers[index] = WindowLayer.adopt(layer)
    join_layers(cache.layers)


def seal_cache(cache, plans: dict[int, SealPlan], stats: FetchStats) -> None:
    """Seal layers of a cache, one after the other, so that the peak is the full cache plus one layer.

    Layers that are sealed already get a further segment. Until all of them have it, their tails are kept.

    Parameters
    ----------
    cache : transformers.Cache
        ``DynamicCache`` or :class:`VerKVCache`; plain layers are swapped in place.
    plans : dict of int to SealPlan
        By layer. Plans are complete before the first layer is sealed; if sealing fails all the same, layers are brought
        back to what they were. Only a first segment of layers without an exact host copy cannot be: the cache is reset.
    stats : FetchStats
        Gets the layers and bytes; also set as ``cache.stats``.
    """
    adopt_layers(cache)
    is_first = not any(cache.layers[i].sealed for i in plans)
    before = {} if is_first else {i: _state(cache.layers[i]) for i in plans}
    sealed: list[int] = []
    try:
        for index in sorted(plans):
            cache.layers[index].seal(plans[index], stats)
            sealed.append(index)
    except BaseException:
        _undo_sealing(cache, sealed, before)
        raise
    if is_first:
        for layer in cache.layers:
            if isinstance(layer, (WindowLayer, LinearLayer)):
                layer.mark_context()
    stats.sealed_layers = tuple(sealed)
    count_sealed(cache.layers, stats)
    cache.stats = stats


def count_sealed(layers: list, stats: FetchStats) -> None:
    """Tell the statistics how much is sealed."""
    sealed = [layer for layer in layers if getattr(layer, "sealed", False)]
    stats.full_bytes = sum(layer.full_bytes for layer in sealed)
    stats.n_segments = max((len(layer.context.segments) for layer in sealed), default=0)


def _state(layer) -> tuple[dict, dict]:
    """Tail and context of a sealed layer, whose tensors are never written into."""
    tail = {name: getattr(layer, name) for name in ("tail_keys", "tail_values", "record")}
    return tail, vars(layer.context).copy()


def _undo_sealing(cache, sealed: list[int], before: dict[int, tuple[dict, dict]]) -> None:
    """Bring layers that were sealed back to the state before, or empty the cache where that is gone."""
    if before:
        for i in sealed:
            tail, context = before[i]
            vars(cache.layers[i]).update(tail)
            vars(cache.layers[i].context).update(context)
    elif all(c.host is not None and not c.host.is_coded for c in (cache.layers[i].context for i in sealed)):
        for i in sealed:
            cache.layers[i].unseal()
    else:
        cache.reset()
