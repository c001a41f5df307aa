"""How large the codec's error is on a given cache."""

import torch
from torch import Tensor

from verkv.codecs.cache_access import coded_states
from verkv.codecs.kvtc import KVTC
from verkv.codecs.layout import check_positions


@torch.no_grad()
def token_errors(codec: KVTC, cache, positions: Tensor | None = None, skip: int | None = None) -> dict[str, Tensor]:
    """Squared error and energy of every coded and decoded row but the first ones.

    The window is coded here, too: the figure is the codec's, not the share of exact rows.

    Parameters
    ----------
    codec : KVTC
    cache : transformers.Cache
        Of one sequence.
    positions : Tensor, shape (T,), optional
    skip : int, optional
        Leading tokens to leave out; the codec's sinks by default.

    Returns
    -------
    dict of str to Tensor, shape (T - skip,), float64
        For side "k" and "v": ``k_squared_error``, ``k_energy``, ``k_centred_energy`` (about the calibrated mean). Keys
        are compared without RoPE, which is an isometry.
    """
    n_tokens = coded_states(cache, codec.layout.groups[0].k[0], "k").shape[1]
    positions = check_positions(positions, n_tokens)
    tokens = torch.arange(codec.config.sinks if skip is None else skip, n_tokens)
    found: dict[str, Tensor] = {}
    for (_, side), part_codec in codec.sides.items():
        states_of = codec.states_reader(cache, side, positions, tokens)
        coordinates, centred_energy, energy = part_codec.project(states_of)
        decoded = part_codec.coder.dequantise(part_codec.coder.quantise(coordinates))
        error = torch.zeros_like(energy)
        for part in part_codec.slices:
            error += (part_codec.reconstruct(decoded, part) - states_of(part)).square().sum((0, 2))
        parts = {"squared_error": error, "energy": energy, "centred_energy": centred_energy}
        for name, values in parts.items():
            found[f"{side}_{name}"] = found.get(f"{side}_{name}", 0.0) + values.double().cpu()
    return found


def reconstruction_error(
    codec: KVTC, cache, positions: Tensor | None = None, skip: int | None = None
) -> dict[str, float]:
    """Sums of :func:`token_errors` over the tokens, and ``n_tokens``.

    Sums of several caches add up; :func:`relative_errors` makes relative Frobenius errors of them.
    """
    errors = token_errors(codec, cache, positions, skip)
    n_tokens = float(len(next(iter(errors.values()))))
    return {name: float(values.sum()) for name, values in errors.items()} | {"n_tokens": n_tokens}


def relative_errors(sums: dict[str, float]) -> dict[str, float]:
    """Relative Frobenius errors of the sums of :func:`reconstruction_error`: K and V, un-centred and centred."""
    errors = {}
    for side in ("k", "v"):
        squared = sums[f"{side}_squared_error"]
        errors[f"{side}_error"] = (squared / sums[f"{side}_energy"]) ** 0.5
        errors[f"{side}_centred_error"] = (squared / sums[f"{side}_centred_energy"]) ** 0.5
    return errors
