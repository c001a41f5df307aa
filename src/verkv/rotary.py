"""RoPE as a model applies it to its keys, and its inverse, for what must look at keys as if all stood at position 0."""

from dataclasses import dataclass

import torch
from torch import Tensor

# Their frequencies depend on the length of the sequence, so keys cached at different times are rotated differently.
LENGTH_DEPENDENT = ("dynamic", "longrope")


@dataclass(frozen=True)
class Rotary:
    """The rotation of channel pairs (i, i + rotary_dim / 2) by position * inv_freq[i].

    Only the rotation: a constant factor that YaRN puts on cos and sin stays on the keys. Undoing and applying are each
    other's inverse whatever a model does, so a model that pairs its channels differently loses no correctness, only
    what undoing RoPE was meant to gain.

    Parameters
    ----------
    inv_freq : Tensor, shape (rotary_dim / 2,), float32
        Radians per position. Channels from rotary_dim on are left alone.

    Raises
    ------
    ValueError
        If ``inv_freq`` is not a non-empty vector of finite numbers.

    Examples
    --------
    >>> import torch
    >>> rotary = Rotary(torch.tensor([1.0, 0.1]))
    >>> keys, positions = torch.randn(3, 4), torch.tensor([0, 5, 900])
    >>> bool(torch.allclose(rotary.undo(rotary.apply(keys, positions), positions), keys, atol=1e-5))
    True
    """

    inv_freq: Tensor

    def __post_init__(self):
        if self.inv_freq.dim() != 1 or not len(self.inv_freq) or not bool(torch.isfinite(self.inv_freq).all()):
            raise ValueError(f"inv_freq must be a non-empty vector of finite numbers, got {tuple(self.inv_freq.shape)}")
        object.__setattr__(self, "inv_freq", self.inv_freq.float())

    @property
    def rotary_dim(self) -> int:
        """Channels that are rotated."""
        return 2 * len(self.inv_freq)

    def apply(self, states: Tensor, positions: Tensor) -> Tensor:
        """Rotate states (..., T, d) to their positions, (T,) or broadcastable to (..., T); in float32."""
        return self._rotate(states, positions, 1.0)

    def undo(self, states: Tensor, positions: Tensor) -> Tensor:
        """Rotate states (..., T, d) back from their positions, (T,) or broadcastable to (..., T); in float32."""
        return self._rotate(states, positions, -1.0)

    def to(self, device: torch.device | str) -> "Rotary":
        """The same rotation with its frequencies on a device."""
        return Rotary(self.inv_freq.to(device))

    def _rotate(self, states: Tensor, positions: Tensor, sign: float) -> Tensor:
        half = len(self.inv_freq)
        if states.shape[-1] < 2 * half:
            raise ValueError(f"states have {states.shape[-1]} channels, but the rotation has {2 * half}")
        angles = positions.to(states.device, torch.float32)[..., None] * self.inv_freq.to(states.device)
        cos, sin = angles.cos(), sign * angles.sin()
        states = states.float()
        first, second = states[..., :half], states[..., half : 2 * half]
        rotated = [first * cos - second * sin, second * cos + first * sin, states[..., 2 * half :]]
        return torch.cat(rotated, dim=-1)


def rotary_dim(config) -> int:
    """Channels of a head that RoPE rotates, from a model's config.

    Parameters
    ----------
    config : transformers.PreTrainedConfig

    Returns
    -------
    int
        The head dim times ``partial_rotary_factor`` (1 where there is none).
    """
    text = config.get_text_config(decoder=True)
    factor = _rope_parameters(text).get("partial_rotary_factor") or getattr(text, "partial_rotary_factor", None) or 1.0
    return int(_head_dim(text) * factor)


def has_rotary(config) -> bool:
    """Whether a model's config speaks of RoPE."""
    return bool(_rope_parameters(config.get_text_config(decoder=True)).get("rope_theta"))


def rotary_from_config(config) -> Rotary:
    """The rotation of a model's full-attention layers, from its config.

    Parameters
    ----------
    config : transformers.PreTrainedConfig
        Of any model with RoPE: plain, partial, linear, YaRN or llama-3 scaling.

    Returns
    -------
    Rotary

    Raises
    ------
    ValueError
        If the config has no RoPE, or one whose frequencies depend on the length (dynamic NTK, longrope).
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    text = config.get_text_config(decoder=True)
    rope = _rope_parameters(text)
    if not has_rotary(config):
        raise ValueError(f"the config of {text.model_type!r} has no rope_theta: its keys carry no RoPE to undo")
    rope_type = rope.get("rope_type", "default")
    if rope_type in LENGTH_DEPENDENT:
        raise ValueError(
            f"rope_type {rope_type!r} has frequencies that depend on the length, so keys cannot be rotated back; use "
            f"a sketch that takes keys as they are cached, such as 'rope_pair'"
        )
    if rope_type == "default":
        return Rotary(_default_inv_freq(rope["rope_theta"], rotary_dim(config)))
    if rope_type not in ROPE_INIT_FUNCTIONS:
        raise ValueError(f"rope_type {rope_type!r} is not known to the installed transformers")
    layer_type = {} if rope is _all_rope_parameters(text) else {"layer_type": "full_attention"}
    inv_freq, _ = ROPE_INIT_FUNCTIONS[rope_type](text, torch.device("cpu"), **layer_type)
    return Rotary(inv_freq)


def _default_inv_freq(theta: float, n_channels: int) -> Tensor:
    exponents = torch.arange(0, n_channels, 2, dtype=torch.float32, device="cpu") / n_channels
    return 1.0 / theta**exponents


def _head_dim(text) -> int:
    return getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads


def _all_rope_parameters(text) -> dict:
    return getattr(text, "rope_parameters", None) or {}


def _rope_parameters(text) -> dict:
    """Those of the full-attention layers, in models with one set per kind of layer."""
    parameters = _all_rope_parameters(text)
    return parameters.get("full_attention", parameters)
