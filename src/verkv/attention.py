"""Weighted attention over several parts, and the hand-off of sealed layers to transformers' attention functions.

A sealed cache layer gives the model a :class:`SealedHandle` instead of keys. The functions in transformers' registry
are wrapped under their own names, so masks, flash dispatch and ``config._attn_implementation`` stay as they are; a
handle is answered by its layer, everything else passes through. A foreign function that meets a handle raises.
"""

import contextlib
import contextvars
import functools
import sys
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

# Attention implementations compute with these; one that does so on a handle would silently see the tail only.
# fmt: off
_COMPUTING = frozenset({
    "__getitem__", "__setitem__", "__matmul__", "add", "baddbmm", "bmm", "cat", "clone", "contiguous", "einsum",
    "expand", "flatten", "flex_attention", "float", "matmul", "mul", "permute", "repeat", "repeat_interleave",
    "reshape", "scaled_dot_product_attention", "split", "to", "transpose", "unsqueeze", "view",
})
# fmt: on

# Properties that are tensors and that torch.compile asks for, attention implementations do not.
_HARMLESS = frozenset(["_base", "grad"])

_observer: contextvars.ContextVar[Callable | None] = contextvars.ContextVar("verkv_attention_observer", default=None)
_sealed_observer: contextvars.ContextVar[Callable | None] = contextvars.ContextVar(
    "verkv_sealed_observer", default=None
)


def weighted_attention(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Softmax attention over the union of several sets of tokens, with log-weights already added to the logits.

    Parameters
    ----------
    parts : sequence of (logits, values)
        logits (..., R, S), float32, with S differing between parts; values (..., S, d), any float dtype; leading axes
        broadcast. A token weighted by w has log(w) added to its logit; -inf leaves it out.

    Returns
    -------
    output : Tensor, shape (..., R, d), float32
    lse : Tensor, shape (..., R), float32
        Log of the denominator; -inf where every token is left out (the output is 0 there).

    Examples
    --------
    >>> import torch
    >>> logits, values = torch.zeros(1, 2), torch.tensor([[0.0], [1.0]])
    >>> weighted_attention([(logits, values)])[0]
    tensor([[0.5000]])
    """
    lse = torch.logsumexp(torch.stack([torch.logsumexp(logits, dim=-1) for logits, _ in parts]), dim=0)
    shift = torch.where(torch.isfinite(lse), lse, 0.0)[..., None]
    output = sum((logits - shift).exp() @ values.float() for logits, values in parts)
    return output, lse


def allowed_tokens(mask: Tensor | None, n_total: int) -> Tensor | None:
    """Which tokens each query may see, from any mask transformers makes.

    Parameters
    ----------
    mask : Tensor or None
        Padding (B, T), or (B or 1, 1, Tq, T), bool or additive; None if nothing is masked but the future.
    n_total : int
        Tokens there are; a longer mask is cut.

    Returns
    -------
    Tensor, shape (B or 1, Tq or 1, n_total), bool, or None

    Raises
    ------
    NotImplementedError
        For other forms, and masks that add finite values.
    ValueError
        If the mask is too short.
    """
    if mask is None:
        return None
    if not isinstance(mask, Tensor):
        raise NotImplementedError(
            f"attention_mask of type {type(mask).__name__} is not supported after sealing; load the model with "
            f"attn_implementation='sdpa', 'eager' or 'flash_attention_2'"
        )
    if mask.dim() == 2:
        mask = mask[:, None]
    elif mask.dim() == 4 and mask.shape[1] == 1:
        mask = mask[:, 0]
    else:
        raise NotImplementedError(f"attention_mask of shape {tuple(mask.shape)} is not supported after sealing")
    if mask.shape[-1] < n_total:
        raise ValueError(
            f"attention_mask covers {mask.shape[-1]} tokens, but context and new tokens are {n_total}; pass the mask "
            f"of the whole sequence"
        )
    mask = mask[..., :n_total]
    if mask.dtype == torch.bool:
        return mask
    if mask.is_floating_point():
        hidden = mask <= torch.finfo(mask.dtype).min / 2
        if not bool((hidden | (mask == 0)).all()):
            raise NotImplementedError(
                "attention_mask adds finite values to logits; after sealing it can only hide tokens (0 or the minimum)"
            )
        return ~hidden
    return mask != 0


class SealedHandle(torch.Tensor):
    """The keys (or values) a sealed layer returns from ``update``: the tail, with a reference to the layer.

    Reading its shape, dtype or device works; anything that would make a tensor of it raises, since it is not the whole
    cache.
    """

    layer: object

    @classmethod
    def wrap(cls, tail: Tensor, layer: object) -> "SealedHandle":
        """View ``tail`` as a handle of ``layer``."""
        handle = tail.as_subclass(cls)
        handle.layer = layer
        return handle

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", str(func))
        if name == "__get__":  # a property, such as mT
            name = getattr(func.__self__, "__name__", name)
        if name not in _COMPUTING:  # refused before it fails for another reason, such as the mask's shape
            with torch._C.DisableTorchFunctionSubclass():
                result = func(*args, **(kwargs or {}))
            results = result if isinstance(result, (list, tuple)) else [result]
            if name in _HARMLESS or not any(isinstance(r, Tensor) for r in results):
                return result
        for argument in (*args, *(kwargs or {}).values()):
            for handle in argument if isinstance(argument, (list, tuple)) else [argument]:
                if type(handle) is cls:
                    handle.layer.undo_update()
        raise NotImplementedError(
            f"a sealed VerKV cache reached an attention implementation that VerKV does not wrap (it called {name}); "
            f"load the model with attn_implementation='sdpa', 'eager' or 'flash_attention_2'"
        )


def wrap_attention_functions() -> None:
    """Make transformers' attention functions answer sealed layers. Idempotent; called when a layer is first sealed.

    Not at import: importing VerKV changes nothing, and kvpress' own wrappers, made when it is imported, must end up
    inside ours (they would index a sealed layer's tail with positions of an earlier context).
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    for name in list(ALL_ATTENTION_FUNCTIONS):
        ALL_ATTENTION_FUNCTIONS[name] = _wrapped(ALL_ATTENTION_FUNCTIONS[name])
    if "eager" not in ALL_ATTENTION_FUNCTIONS:  # models keep it in their own module and only look here first
        ALL_ATTENTION_FUNCTIONS["eager"] = _wrapped(_eager_of_module)


@contextlib.contextmanager
def observe_attention(observer: Callable, sealed: Callable | None = None) -> Iterator[None]:
    """Call ``observer(module, query, key, scaling)`` before every attention on plain tensors.

    Queries and keys are what the attention function sees: after norm, RoPE and any query scale. ``sealed(module, query,
    layer, scaling)`` is called before every attention that a sealed layer answers.
    """
    wrap_attention_functions()
    tokens = _observer.set(observer), _sealed_observer.set(sealed)
    try:
        yield
    finally:
        _observer.reset(tokens[0])
        _sealed_observer.reset(tokens[1])


def _wrapped(function: Callable) -> Callable:
    if getattr(function, "_answers_sealed_layers", False):
        return function

    @functools.wraps(function)
    def attention(module, query, key, value, attention_mask, dropout=0.0, scaling=None, **kwargs):
        # kvpress' wrapper passes `dropout` as the sixth positional argument
        if type(key) is SealedHandle:
            scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
            try:
                _refuse_unsupported(module, kwargs)
                observer = _sealed_observer.get()
                if observer is not None:
                    observer(module, query, key.layer, scaling)
                return key.layer.attend(query, attention_mask, scaling), None
            except BaseException:
                key.layer.undo_update()
                raise
        observer = _observer.get()
        if observer is not None:
            observer(module, query, key, query.shape[-1] ** -0.5 if scaling is None else scaling)
        return function(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs)

    attention._answers_sealed_layers = True
    return attention


def _eager_of_module(module, query, key, value, attention_mask, dropout=0.0, scaling=None, **kwargs):
    """The eager attention of the model's own modelling file."""
    eager = sys.modules[type(module).__module__].eager_attention_forward
    return eager(module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs)


def _refuse_unsupported(module, kwargs: dict) -> None:
    if kwargs.get("softcap") is not None:
        raise NotImplementedError("soft-capped attention (softcap) cannot be verified; use the model without VerKV")
    if kwargs.get("s_aux") is not None:
        raise NotImplementedError("attention with learned sinks (s_aux) is not supported; use the model without VerKV")
    config = getattr(module, "config", None)
    if kwargs.get("output_attentions") or getattr(config, "output_attentions", False):
        raise NotImplementedError(
            "output_attentions is not available after sealing: most weights are estimates that are never formed; "
            "pass output_attentions=False"
        )
