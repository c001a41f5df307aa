"""Scalar codes for uncorrelated components: how many bits each gets, how it is quantised, how the bits are packed.

What the transform sketch and query-weighted PCA share. Components are rows of bit planes: one bit of one component for
eight tokens to a byte. A uniform quantiser is linear in its code, so decoding is one matrix product.
"""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

MAX_BITS = 8  # a code fits a byte
# Mean squared error of the best uniform quantiser with 0, 1, ... bits for a Gaussian of unit variance (Max, 1960,
# table II), and half the range it covers, in standard deviations.
DISTORTION = (1.0, 0.3634, 0.1188, 0.03744, 0.01154, 0.003495, 0.001041, 0.0003035, 0.0000869)
HALF_RANGE = (0.0, 1.596, 1.991, 2.344, 2.681, 3.007, 3.320, 3.620, 3.905)
FIT_ROUNDS = 10
FIT_TOKENS = 8192  # evenly spaced ones fit the ranges; more tokens only cost time


@dataclass(frozen=True)
class EncodedFeatures:
    """Features of T tokens in few bits; see :func:`encode_features`.

    Attributes
    ----------
    planes : Tensor, shape (n_bits, ceil(T / 8)), uint8
        Packed codes.
    counts : tuple of int
        How many components have a first, a second, ... bit.
    decoding : Tensor, shape (1 + C, F), float32
        Constant, and what a unit of each component's code adds to the features.
    """

    planes: Tensor
    counts: tuple[int, ...]
    decoding: Tensor


def encode_features(
    features: Tensor, padding: int, analysis: Tensor, synthesis: Tensor, n_bits: int
) -> EncodedFeatures:
    """Transform, give each component its bits, quantise and pack.

    Parameters
    ----------
    features : Tensor, shape (T, F), float32
    padding : int
        Tokens at the start that are encoded, but have no part in mean, bits and ranges.
    analysis, synthesis : Tensor, shapes (F, C) and (C, F), float32
        From centred features to components, and back.
    n_bits : int
        For each token.

    Returns
    -------
    EncodedFeatures
    """
    mean = features[padding:].mean(0)
    components = (features - mean) @ analysis
    bits = allocate_bits(components[padding:].square().mean(0), n_bits)
    order = bits.argsort(descending=True, stable=True)[: int((bits > 0).sum())]
    bits, order = bits[order], order.to(features.device)
    components, synthesis = components[:, order], synthesis[order]
    low, step = fit_quantizer(components[padding:], bits)
    codes = quantize(components, low, step, bits)
    decoding = torch.cat([mean + low[None] @ synthesis, step[:, None] * synthesis])
    return EncodedFeatures(pack_planes(codes.mT, bits), plane_counts(bits), decoding)


def decoding_factors(planes: Tensor, counts: tuple[int, ...], n_tokens: int) -> Tensor:
    """What is to be multiplied with the decoding matrix: ones, then the codes; (1 + C, n_tokens), float32."""
    factors = torch.empty(1 + counts[0], n_tokens, device=planes.device)
    factors[0] = 1.0
    factors[1:] = unpack_planes(planes, counts)[:, :n_tokens]
    return factors


def allocate_bits(variances: Tensor, n_bits: int) -> Tensor:
    """Distribute bits over components so that the expected squared error is least: integer reverse water-filling.

    Minimises sum_i variances[i] * DISTORTION[bits[i]] subject to sum(bits) = n_bits. The gain of a component's next bit
    falls with every bit it has, so taking the largest gains is optimal.

    Parameters
    ----------
    variances : Tensor, shape (C,)
        Variances >= 0 in the metric of the error; values below 0, from rounding, count as 0.
    n_bits : int
        To distribute, between 0 and 8 C.

    Returns
    -------
    Tensor, shape (C,), int64
        Between 0 and 8 bits each. Ties go to the component that comes first and has fewer bits.

    Raises
    ------
    ValueError
        If that many bits do not fit.

    References
    ----------
    .. [1] J. Max, "Quantizing for minimum distortion", IRE Trans. Inform. Theory 6 (1960), table II.

    Examples
    --------
    >>> import torch
    >>> allocate_bits(torch.tensor([100.0, 10.0, 1.0, 0.0]), 6)
    tensor([4, 2, 0, 0])
    """
    n_components = len(variances)
    if not 0 <= n_bits <= MAX_BITS * n_components:
        raise ValueError(f"n_bits={n_bits} is not between 0 and {MAX_BITS} for each of {n_components} components")
    distortion = torch.tensor(DISTORTION, dtype=torch.float64, device="cpu")
    gains = (distortion[:-1] - distortion[1:])[:, None] * variances.detach().cpu().double().clamp_min(0)
    # By level, then component: the stable sort then never takes a bit before the one above it, also where gains tie.
    chosen = gains.flatten().sort(descending=True, stable=True).indices[:n_bits]
    return torch.bincount(chosen % n_components, minlength=n_components)


def fit_quantizer(values: Tensor, bits: Tensor) -> tuple[Tensor, Tensor]:
    """Lowest level and step of a uniform quantiser for each component, fitted to the data.

    Starts from the range that is best for a Gaussian, then alternates between the nearest levels and the line through
    them that is closest to the data (Lloyd's iteration, with levels kept equidistant).

    Parameters
    ----------
    values : Tensor, shape (T, C), float32
    bits : Tensor, shape (C,), int64
        1 to 8 bits each.

    Returns
    -------
    low, step : Tensor, shape (C,), float32
        The levels are low, low + step, ... A component without variance has step 0.
    """
    sample, bits = values[:: -(-len(values) // FIT_TOKENS)], bits.to(values.device)
    mean = sample.mean(0)
    n_levels = 2.0**bits
    spread = (sample - mean).square().mean(0).sqrt()
    half_range = torch.tensor(HALF_RANGE, device=values.device)[bits] * spread
    step = 2 * half_range / n_levels
    low = mean - half_range + step / 2
    for _ in range(FIT_ROUNDS):
        codes = _nearest_level(sample, low, step, n_levels)
        mean_code = codes.mean(0)
        centred = codes - mean_code
        variation = centred.square().sum(0)
        slope = (centred * (sample - mean)).sum(0) / variation.clamp_min(1e-12)
        step = torch.where(variation > 0, slope.clamp_min(0), step)
        low = mean - step * mean_code
    return low, step


def quantize(values: Tensor, low: Tensor, step: Tensor, bits: Tensor) -> Tensor:
    """Codes (T, C) uint8 of the levels nearest to the values; see :func:`fit_quantizer`."""
    return _nearest_level(values, low, step, 2.0 ** bits.to(values.device)).to(torch.uint8)


def pack_planes(codes: Tensor, bits: Tensor) -> Tensor:
    """Pack codes into bit planes.

    Parameters
    ----------
    codes : Tensor, shape (C, T), uint8
    bits : Tensor, shape (C,), int64
        Bits of each component, not increasing.

    Returns
    -------
    Tensor, shape (sum(bits), ceil(T / 8)), uint8
        First the highest bit of all components that have one, then the next of those that have two, and so on. Token
        t is bit t % 8 of byte t // 8.
    """
    n_tokens = codes.shape[1]
    codes = torch.nn.functional.pad(codes, (0, -n_tokens % 8))
    shifts = torch.arange(8, dtype=torch.uint8, device=codes.device)
    planes = []
    for level, n_components in enumerate(plane_counts(bits)):
        place = (bits[:n_components] - 1 - level).to(codes.device, torch.uint8)
        plane = (codes[:n_components] >> place[:, None]) & 1
        planes.append((plane.unflatten(1, (-1, 8)) << shifts).sum(-1, dtype=torch.uint8))
    return torch.cat(planes)


def plane_counts(bits: Tensor) -> tuple[int, ...]:
    """How many components have a first, a second, ... bit."""
    return tuple(int((bits > level).sum()) for level in range(int(bits.max())))


def unpack_planes(planes: Tensor, counts: tuple[int, ...]) -> Tensor:
    """Codes (C, 8 * n_bytes) uint8 of planes (sum(counts), n_bytes); the inverse of :func:`pack_planes`.

    Every byte is looked up as a word of eight bytes, one for each token, so that the codes of eight tokens are put
    together at once.
    """
    words = _spread_table(planes.device).index_select(0, planes.reshape(-1).int()).view(planes.shape)
    codes, first = words[: counts[0]], counts[0]
    for n_components in counts[1:]:
        # The others have all their bits.
        codes[:n_components].mul_(2).add_(words[first : first + n_components])
        first += n_components
    return codes.view(torch.uint8)


@functools.lru_cache(maxsize=16)
def _spread_table(device: torch.device) -> Tensor:
    """For each byte, the word whose byte k (in memory) is its bit k; (256,) int64, little-endian."""
    bits = (torch.arange(256, device=device)[:, None] >> torch.arange(8, device=device)) & 1
    return (bits << (8 * torch.arange(8, device=device))).sum(1)


def _nearest_level(values: Tensor, low: Tensor, step: Tensor, n_levels: Tensor) -> Tensor:
    codes = ((values - low) / torch.where(step > 0, step, 1.0)).round()
    return torch.minimum(codes.clamp_min(0), n_levels - 1)
