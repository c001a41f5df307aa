"""Bits, levels and packing of scalar codes, against enumeration and codes unpacked bit by bit."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from verkv.sketches.component_code import (
    DISTORTION,
    HALF_RANGE,
    MAX_BITS,
    allocate_bits,
    decoding_factors,
    encode_features,
    fit_quantizer,
    pack_planes,
    plane_counts,
    quantize,
    unpack_planes,
)

# --- how many bits ----------------------------------------------------------------------------------------------------


def distortion(variances, bits):
    return sum(v * DISTORTION[b] for v, b in zip(variances, bits, strict=True))


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.one_of(st.just(0.0), st.floats(1e-6, 1e6)), min_size=1, max_size=3), st.integers(0, 2 * MAX_BITS + 3)
)
def test_allocation_is_the_best_of_all(variances, n_bits):
    n_bits = min(n_bits, MAX_BITS * len(variances))
    everything = itertools.product(range(MAX_BITS + 1), repeat=len(variances))
    best = min(distortion(variances, bits) for bits in everything if sum(bits) == n_bits)
    bits = allocate_bits(torch.tensor(variances, dtype=torch.float64), n_bits).tolist()
    assert sum(bits) == n_bits and all(0 <= b <= MAX_BITS for b in bits)
    assert distortion(variances, bits) == pytest.approx(best, rel=1e-12)


def test_gain_of_a_bit_falls_with_every_bit():
    gains = torch.tensor(DISTORTION).diff().neg()
    assert (gains > 0).all() and (gains.diff() < 0).all()


def test_components_without_variance_get_bits_from_the_top():
    assert allocate_bits(torch.zeros(3), 5).tolist() == [2, 2, 1]
    assert allocate_bits(torch.tensor([-1e-20, 1.0]), 9).tolist() == [1, 8]
    assert allocate_bits(torch.ones(2), 16).tolist() == [8, 8]


@pytest.mark.parametrize("n_bits", [-1, 17])
def test_bits_that_do_not_fit_are_refused(n_bits):
    with pytest.raises(ValueError, match=f"n_bits={n_bits}"):
        allocate_bits(torch.ones(2), n_bits)


# --- levels -----------------------------------------------------------------------------------------------------------


def quantized(values, bits):
    low, step = fit_quantizer(values, bits)
    return low + step * quantize(values, low, step, bits)


def test_error_on_gaussian_data_is_that_of_the_best_uniform_quantizer():
    values = torch.randn(20000, MAX_BITS) * 3 + 7
    error = (quantized(values, torch.arange(1, MAX_BITS + 1)) - values).square().mean(0) / 9
    # With many levels the error is mostly clipping, which a handful of tokens decides.
    assert_close(error[:6], torch.tensor(DISTORTION[1:7]), rtol=0.1, atol=0)
    assert_close(error[6:], torch.tensor(DISTORTION[7:]), rtol=0.2, atol=0)


def test_codes_are_those_of_the_nearest_level():
    values, bits = torch.randn(500, 4), torch.tensor([1, 2, 3, 5])
    low, step = fit_quantizer(values, bits)
    codes = quantize(values, low, step, bits)
    assert codes.dtype == torch.uint8
    for i, n_bits in enumerate(bits.tolist()):
        levels = low[i].double() + step[i].double() * torch.arange(2**n_bits)
        nearest = (values[:, i, None].double() - levels).abs().amin(1)
        chosen = (values[:, i].double() - levels[codes[:, i].long()]).abs()
        assert_close(chosen, nearest, atol=1e-6, rtol=0)


def test_fit_is_better_than_the_gaussian_range_on_heavy_tails():
    values = torch.distributions.StudentT(3.0).sample((8000, 1))
    bits = torch.tensor([3])
    half = HALF_RANGE[3] * values.std(correction=0)
    step = 2 * half / 8
    low = values.mean() - half + step / 2
    gaussian = low + step * quantize(values, low[None], step[None], bits)
    assert (quantized(values, bits) - values).square().mean() < 0.95 * (gaussian - values).square().mean()


def test_two_values_need_one_bit_and_one_value_none():
    values = torch.tensor([[5.0, 2.0], [-3.0, 2.0], [5.0, 2.0], [5.0, 2.0]])
    assert_close(quantized(values, torch.tensor([1, 3])), values)


@pytest.mark.parametrize("bits", [1, 8])
def test_one_token_is_kept(bits):
    values = torch.randn(1, 3) * 100
    assert_close(quantized(values, torch.full((3,), bits)), values)


# --- packing ----------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(1, MAX_BITS), min_size=1, max_size=6), st.integers(1, 40), st.integers(0, 99))
def test_packing_is_bit_by_bit_and_invertible(bits, n_tokens, seed):
    bits = torch.tensor(sorted(bits, reverse=True))
    generator = torch.Generator().manual_seed(seed)
    codes = (torch.rand(len(bits), n_tokens, generator=generator) * 2.0 ** bits[:, None]).to(torch.uint8)
    planes, counts = pack_planes(codes, bits), plane_counts(bits)
    assert planes.shape == (int(bits.sum()), -(-n_tokens // 8)) and planes.dtype == torch.uint8
    row = 0
    for level in range(int(bits.max())):
        for component in range(counts[level]):
            for token in range(n_tokens):
                bit = int(planes[row, token // 8]) >> (token % 8) & 1
                assert bit == int(codes[component, token]) >> (int(bits[component]) - 1 - level) & 1
            row += 1
    before = planes.clone()
    assert torch.equal(unpack_planes(planes, counts)[:, :n_tokens], codes)
    assert torch.equal(planes, before)


def test_all_bytes_survive_packing():
    codes = torch.arange(256, dtype=torch.uint8).repeat(2, 1)
    bits = torch.tensor([8, 8])
    assert torch.equal(unpack_planes(pack_planes(codes, bits), plane_counts(bits)), codes)


# --- all together -----------------------------------------------------------------------------------------------------


def decode(encoded, n_tokens):
    return decoding_factors(encoded.planes, encoded.counts, n_tokens).mT @ encoded.decoding


@pytest.mark.parametrize("n_tokens", [1, 3, 200])
def test_many_bits_give_the_features_back(n_tokens):
    """Six features, each a whole byte: the error is at most half of a step of the range."""
    features, (basis, _) = torch.randn(n_tokens, 6) + 20, torch.linalg.qr(torch.randn(6, 6))
    encoded = encode_features(features, 0, basis, basis.mT, 48)
    assert encoded.planes.shape == (48, -(-n_tokens // 8)) and encoded.counts == (6,) * 8
    assert_close(decode(encoded, n_tokens), features, atol=0.05, rtol=0)


def test_components_without_bits_are_replaced_by_their_mean():
    features = torch.randn(100, 3) * torch.tensor([100.0, 1e-3, 1e-3]) + torch.tensor([0.0, 5.0, -7.0])
    encoded = encode_features(features, 0, torch.eye(3), torch.eye(3), 4)
    assert encoded.counts == (1, 1, 1, 1) and encoded.decoding.shape == (2, 3)
    assert_close(decode(encoded, 100)[:, 1:], features[:, 1:].mean(0).expand(100, -1))


def test_padding_has_no_part_in_the_fit():
    features = torch.randn(50, 4)
    padded = torch.cat([torch.full((11, 4), 1e6), features])
    alone, encoded = (encode_features(x, p, torch.eye(4), torch.eye(4), 10) for x, p in ((features, 0), (padded, 11)))
    assert encoded.counts == alone.counts
    assert torch.equal(encoded.decoding, alone.decoding)
    assert torch.equal(decode(encoded, 61)[11:], decode(alone, 50))
