"""The cache: a layer that is transformers' own until it is sealed, and helpers to make and seal whole caches."""

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from verkv.attention import SealedHandle, wrap_attention_functions
from verkv.context import SealedContext, SealPlan
from verkv.hybrid import HybridStates, LinearLayer, repair_linear_attention
from verkv.members import Member, join_layers, kept_length
from verkv.stats import FetchStats, MemoryReport, memory_report
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

    Sealed, the context lives in a :class:`~verkv.context.SealedContext` and new tokens in a tail that is always exact.
    Lengths stay logical: positions, masks and ``generate`` see the full context.
    """

    is_sliding = False

    def __init__(self):
        self.context: SealedContext | None = None
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
        """Split the context as planned; the device's full copy is freed.

        Parameters
        ----------
        plan : SealPlan
        stats : FetchStats
            Shared by the cache's layers.
        """
        wrap_attention_functions()
        keys, values = self._keys[:: plan.beams], self._values[:: plan.beams]
        self.context = SealedContext(keys, values, plan, self._index, stats)
        batch = self._keys.shape[0]
        self._keys = self._values = None
        self._clear_tail(batch)

    def unseal(self) -> None:
        """Bring the full context back to the device (undoes :meth:`seal`; needs the host tier)."""
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
        """Length and offset of the mask; ``query`` is a count, or positions before transformers 5.4."""
        return self.get_seq_length() + (query if isinstance(query, int) else query.shape[0]), 0

    def crop(self, max_length: int) -> None:
        """Keep a prefix, see :func:`~verkv.members.kept_length`. A sealed context cannot be cut."""
        self._crop_to(kept_length(max_length, self.get_seq_length()))

    def reset(self) -> None:
        """Forget everything; the layer is an empty plain one again."""
        self.context, self._keys, self._values, self.is_initialized = None, None, None, False
        self.tail_keys = self.tail_values = None
        self.leave()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Permute the batch. Beams of one context share it, so only their tails move."""
        if not self.sealed:
            return super().reorder_cache(beam_idx)
        contexts = beam_idx.to("cpu") // self.context.beams
        if not torch.equal(contexts, torch.arange(len(beam_idx), device="cpu") // self.context.beams):
            self.context = self.context.select(beam_idx)
        self._index_tail(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every batch row; repeats share their context."""
        if not self.sealed:
            return super().batch_repeat_interleave(repeats)
        self.context.beams *= repeats
        self.tail_keys = self.tail_keys.repeat_interleave(repeats, dim=0)
        self.tail_values = self.tail_values.repeat_interleave(repeats, dim=0)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep some batch rows."""
        if not self.sealed:
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
            self._keys, self._values = self._keys[:, :, :length], self._values[:, :, :length]
            return
        n_tail = length - self.context.n_tokens
        if n_tail < 0:
            raise ValueError(
                f"max_length={length} cuts into the sealed context of {self.context.n_tokens} tokens; reset the cache "
                f"and prefill the shorter context"
            )
        self.tail_keys, self.tail_values = self.tail_keys[:, :, :n_tail], self.tail_values[:, :, :n_tail]

    def _clear_tail(self, batch: int) -> None:
        context = self.context
        empty = {"device": context.device, "dtype": context.dtype}
        self.tail_keys = torch.empty(batch, context.n_kv_heads, 0, context.key_dim, **empty)
        self.tail_values = torch.empty(batch, context.n_kv_heads, 0, context.value_dim, **empty)

    def _index_tail(self, indices: Tensor) -> None:
        indices = indices.to(self.tail_keys.device)
        self.tail_keys, self.tail_values = self.tail_keys[indices], self.tail_values[indices]


class VerKVCache(Cache):
    """A cache whose full-attention layers can be sealed. See :func:`make_cache`."""

    stats: FetchStats | None = None

    def memory_report(self) -> MemoryReport:
        """Bytes on the device by part, and on the host."""
        return memory_report(self)

    def reset(self) -> None:
        """Forget everything, statistics included."""
        super().reset()
        self.stats = None


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


def seal_cache(cache, plans: dict[int, SealPlan], stats: FetchStats) -> None:
    """Seal layers of a cache, one after the other, so that the peak is the full cache plus one layer.

    Parameters
    ----------
    cache : transformers.Cache
        ``DynamicCache`` or :class:`VerKVCache`; plain layers are swapped in place.
    plans : dict of int to SealPlan
        By layer. Plans are complete before the first layer is sealed; if sealing fails all the same, layers that were
        sealed are brought back where they have a host copy, otherwise the cache is reset.
    stats : FetchStats
        Gets the layers and bytes; also set as ``cache.stats``.
    """
    for index, layer in enumerate(cache.layers):  # all: those that stay as they are must roll back and reset, too
        if type(layer) is DynamicLayer:
            cache.layers[index] = VerKVLayer.adopt(layer)
        elif type(layer) is DynamicSlidingWindowLayer:
            cache.layers[index] = WindowLayer.adopt(layer)
    join_layers(cache.layers)
    sealed: list[int] = []
    try:
        for index in sorted(plans):
            cache.layers[index].seal(plans[index], stats)
            sealed.append(index)
    except BaseException:
        if all(cache.layers[i].context.host is not None for i in sealed):
            for i in sealed:
                cache.layers[i].unseal()
        else:
            cache.reset()
        raise
    for layer in cache.layers:
        if isinstance(layer, (WindowLayer, LinearLayer)):
            layer.mark_context()
    stats.sealed_layers = tuple(sealed)
    stats.full_bytes = sum(cache.layers[i].full_bytes for i in sealed)
    cache.stats = stats
