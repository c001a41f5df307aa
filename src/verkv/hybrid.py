"""Models that mix full attention with linear attention (Qwen3.5, Qwen3-Next): the linear layers' part of a cache.

A gated delta net has no keys and values but a state of fixed size, which every forward pass replaces. It is left as it
is. What is added is the way back: several questions about one context start from the state at the context's end, and a
failed forward pass leaves the one before it.
"""

import functools
import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from verkv.members import BatchMapped, Member, join_layers
from verkv.window import LogicalKV

# By the text config's model_type: modelling module and class whose forward pass keeps the state.
_GATED_DELTA_NETS = {
    "qwen3_next": ("qwen3_next", "Qwen3NextGatedDeltaNet"),
    "qwen3_5_text": ("qwen3_5", "Qwen3_5GatedDeltaNet"),
    "qwen3_5_moe_text": ("qwen3_5_moe", "Qwen3_5MoeGatedDeltaNet"),
}


# --- one layer --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Moment:
    """State after ``length`` tokens. Its tensors are never written: the model gets a copy of what it writes into."""

    conv: Tensor | None = None  # (B, channels, kernel size), inputs of the last tokens
    recurrent: Tensor | None = None  # (B, heads, key dim, value dim)
    length: int = 0

    def map(self, function: Callable[[Tensor], Tensor]) -> "_Moment":
        apply = lambda t: None if t is None else function(t)  # noqa: E731
        return _Moment(apply(self.conv), apply(self.recurrent), self.length)

    def row(self, index: int, length: int) -> "_Moment":
        """Of one row of the batch, counted as ``length`` tokens."""
        return replace(self.map(lambda t: t[index : index + 1]), length=length)


class LinearLayer(BatchMapped, Member, CacheLayerMixin):
    """The state of a linear-attention layer, with the states it can go back to.

    These are the context's end (of the first forward pass, until the cache is sealed), the one before the last forward
    pass, and the empty one. Anywhere else the state is gone.
    """

    is_sliding = False

    def __init__(self):
        self._now = _Moment()
        self._context: _Moment | None = None
        self._before: _Moment | None = None
        self._in_pass = False

    @property
    def state(self) -> _Moment:
        """The present state. Assigning one that was read earlier brings it back."""
        return self._now

    @state.setter
    def state(self, moment: _Moment) -> None:
        self._now = moment

    def mark_context(self) -> None:
        """Remember the present state as the context's end."""
        self._now = self._now.map(Tensor.detach)
        self._context, self._before = self._now, None

    @contextmanager
    def forward_pass(self, n_new: int) -> Iterator[_Moment]:
        """The pass of one layer over ``n_new`` tokens, with the state it starts from; undone if it fails."""
        self.refuse_half_a_forward(n_new)
        self._before = before = self._now
        if before.conv is not None:
            # The kernels for single tokens write into the conv state, so they get a copy.
            self._now = replace(before, conv=before.conv.clone())
        self._in_pass = True
        try:
            yield before
        except BaseException:
            self._now = before
            raise
        finally:
            self._in_pass = False
        self._now = replace(self._now, length=before.length + n_new)
        if self._context is None:
            self._context = self._now

    def store(self, **states: Tensor) -> None:
        """Take a state from the model.

        Raises
        ------
        RuntimeError
            If the model's forward pass was not announced, so that its state would be neither counted nor right.
        """
        if not self._in_pass:
            raise RuntimeError(
                "a linear-attention layer ran without VerKV's repair of transformers' multi-token forward passes. "
                "Modules that were given hooks before, as device_map over several devices does, keep the function they "
                "had: call verkv.make_cache(config) once before the model is loaded"
            )
        self._now = replace(self._now, **states)

    def can_go_back_to(self, length: int) -> bool:
        """Whether the state at that length is known."""
        return self._remembered(length) is not None

    def roll_back_to(self, length: int) -> None:
        """Return to the state at that length.

        Raises
        ------
        ValueError
            If it is not remembered.
        """
        moment = self._remembered(length)
        if moment is None:
            raise ValueError(
                f"a linear-attention layer keeps no state of {length} tokens: it can go back to "
                f"{self._choices()} tokens; reset the cache and prefill again"
            )
        self._now = moment

    def memory(self) -> dict[str, dict[str, int]]:
        """Bytes by tier and part: states do not grow with the context and are not charged to the budget."""
        moments = [m for m in (self._now, self._context, self._before) if m is not None]
        tensors = {id(t): t for m in moments for t in (m.conv, m.recurrent) if t is not None}
        return {"device": {}, "device_uncharged": {"linear_states": sum(t.nbytes for t in tensors.values())}}

    # --- what transformers and KVPress call -------------------------------------------------------------------------

    @property
    def is_initialized(self) -> bool:
        """Whether there is a state."""
        return self._now.conv is not None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing: the model makes the states."""

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs):
        """There are no keys and values."""
        raise NotImplementedError("a linear-attention layer of the cache was given keys and values; it has only states")

    def get_seq_length(self) -> int:
        """Tokens the state has seen."""
        return self._now.length

    def get_mask_sizes(self, query) -> tuple[int, int]:
        """Length and offset of the mask; ``query`` is a count, or positions before transformers 5.4."""
        return self.get_seq_length() + (query if isinstance(query, int) else query.shape[0]), 0

    def get_max_cache_shape(self) -> int:
        """No maximum."""
        return -1

    get_max_length = get_max_cache_shape  # its name in newer transformers

    def crop(self, max_length: int) -> None:
        """Go back; a negative ``max_length`` is the number of tokens to take out."""
        length = max_length if max_length >= 0 else self.get_seq_length() + max_length
        if length < self.get_seq_length():
            self.roll_back_to(length)

    def reset(self) -> None:
        """Forget everything."""
        self._now, self._context, self._before = _Moment(), None, None

    def offload(self) -> None:
        """Nothing: a state is read in every pass."""

    def prefetch(self) -> None:
        """Nothing."""

    @property
    def keys(self) -> LogicalKV:
        """A stand-in that can be sliced to a prefix, as KVPress' roll-back does."""
        return LogicalKV(self, self.get_seq_length())

    @keys.setter
    def keys(self, value) -> None:
        if not (isinstance(value, LogicalKV) and value.layer is self):
            raise NotImplementedError("keys and values of a linear-attention layer cannot be replaced; it has none")
        if value.length < self.get_seq_length():
            self.roll_back_to(value.length)

    values = keys

    # --- internals --------------------------------------------------------------------------------------------------

    def _remembered(self, length: int) -> _Moment | None:
        moments = [m for m in (self._now, self._context, self._before, _Moment()) if m is not None]
        return next((m for m in moments if m.length == length), None)

    def _choices(self) -> str:
        lengths = {m.length for m in (self._context, self._before) if m is not None} | {0}
        return " or ".join(map(str, sorted(lengths)))

    def _map(self, function: Callable[[Tensor], Tensor]) -> None:
        self._now = self._now.map(function)
        self._context = self._context and self._context.map(function)
        self._before = self._before and self._before.map(function)


# --- the cache's part -------------------------------------------------------------------------------------------------


class _States:
    """One kind of state of all layers, indexed by layer as transformers' caches for these models are."""

    def __init__(self, layers: list, name: str):
        self.layers, self.name = layers, name

    def __len__(self) -> int:
        return len(self.layers)

    def __getitem__(self, index: int) -> Tensor | None:
        layer = self.layers[index]
        return getattr(layer.state, self.name) if isinstance(layer, LinearLayer) else None

    def __setitem__(self, index: int, value: Tensor) -> None:
        self.layers[index].store(**{self.name: value})


class HybridStates:
    """What a cache needs beside its layers, for the modelling code of hybrid models; mixed into a cache class."""

    layers: list

    @property
    def conv_states(self) -> _States:
        """By layer; None for full attention."""
        return _States(self.layers, "conv")

    @property
    def recurrent_states(self) -> _States:
        """By layer; None for full attention."""
        return _States(self.layers, "recurrent")

    @property
    def has_previous_state(self) -> bool:
        """Whether a forward pass has gone through the last linear-attention layer."""
        return [layer for layer in self.layers if isinstance(layer, LinearLayer)][-1].is_initialized

    def crop(self, max_length: int) -> None:
        """Keep a prefix of a length that the linear-attention layers remember; nothing is changed where they do not.

        Raises
        ------
        ValueError
            For every other length, so for prompt lookup and assistant models.
        """
        linear = [layer for layer in self.layers if isinstance(layer, LinearLayer)]
        for layer in linear:
            length = max_length if max_length >= 0 else layer.get_seq_length() + max_length
            if length < layer.get_seq_length() and not layer.can_go_back_to(length):
                layer.roll_back_to(length)  # raises
        for layer in [layer for layer in self.layers if not isinstance(layer, LinearLayer)] + linear:
            layer.crop(max_length)

    def reset(self) -> None:
        """Forget everything."""
        super().reset()
        join_layers(self.layers)  # a state cannot be mended later, so half a forward pass is never built on


# --- the repair of multi-token forward passes -------------------------------------------------------------------------


def repair_linear_attention(config) -> None:
    """Make a model's linear-attention layers continue from VerKV's caches. Idempotent; not done at import.

    As long as transformers has a cache class of its own for each of these models (until 5.4), a forward pass of several
    tokens starts from an empty state, whatever the cache holds (huggingface/transformers#45513): a question about a
    cached context, a chunked prefill and a replay all silently forget it. The forward function of the layer's class is
    wrapped. With other caches than VerKV's it does what it did.

    Parameters
    ----------
    config : transformers.PreTrainedConfig
        Of the model.

    Raises
    ------
    NotImplementedError
        For models and versions of transformers whose linear attention is not known.
    """
    model_type = getattr(config.get_text_config(decoder=True), "model_type", None)
    if model_type not in _GATED_DELTA_NETS:
        raise NotImplementedError(
            f"the model has layers of type 'linear_attention', which VerKV knows of Qwen3.5 and Qwen3-Next only, not "
            f"of model_type={model_type!r}; use a model with full and sliding attention"
        )
    if hasattr(Cache, "update_conv_state"):
        # Since 5.5 the states are in transformers' own layers, whose multi-token passes are mended in 5.7.
        raise NotImplementedError(
            "hybrid models (layers of type 'linear_attention') need transformers 5.2 to 5.4: later versions keep the "
            "state in another kind of cache, which VerKV cannot roll back yet"
        )
    family, class_name = _GATED_DELTA_NETS[model_type]
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    delta_net = getattr(module, class_name)
    delta_net.forward = _continuing(delta_net.forward)


def _continuing(forward: Callable) -> Callable:
    """A forward function that starts from the state of VerKV's cache and counts its tokens."""
    if getattr(forward, "_continues_states", False):
        return forward

    @functools.wraps(forward)
    def continuing(self, hidden_states, cache_params=None, *args, **kwargs):
        if not isinstance(cache_params, HybridStates):
            return forward(self, hidden_states, cache_params, *args, **kwargs)
        layer = cache_params.layers[self.layer_idx]
        with layer.forward_pass(hidden_states.shape[1]) as previous:
            module = self if previous.conv is None else _Continuation(self, layer, previous)
            return forward(module, hidden_states, cache_params, *args, **kwargs)

    continuing._continues_states = True
    return continuing


class _Continuation:
    """Stands for a gated delta net during one forward pass, and replaces the two functions that forget the state.

    They are called for several tokens only; that for a single token reads the cache's state as it should. A stand-in
    and not a changed module: other threads may be running the same model.
    """

    def __init__(self, module: nn.Module, layer: LinearLayer, previous: _Moment):
        self._module, self._layer, self._previous = module, layer, previous

    def __getattr__(self, name: str):
        return getattr(self._module, name)

    def causal_conv1d_fn(self, x: Tensor, **kwargs) -> Tensor:
        """The convolution over the remembered inputs and the new ones; outputs of the new ones, (B, channels, T)."""
        inputs = torch.cat([self._previous.conv, x], dim=-1)
        self._layer.store(conv=inputs[..., -self._previous.conv.shape[-1] :].contiguous())
        fast = self._module.causal_conv1d_fn
        if fast is not None:
            outputs = fast(x=inputs, **kwargs)
        else:
            outputs = F.silu(self._module.conv1d(inputs)[..., : inputs.shape[-1]])
        return outputs[..., -x.shape[-1] :]

    def chunk_gated_delta_rule(self, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """The delta rule from the remembered state."""
        return self._module.chunk_gated_delta_rule(*args, **{**kwargs, "initial_state": self._previous.recurrent})
