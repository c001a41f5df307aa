"""Error bounds of the scalar quantisers, bit packing, and the two layouts of coded rows."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verkv.codecs.errors import CorruptFileError
from verkv.codecs.packing import RowCoder, pack_codes, unpack_codes
from verkv.codecs.quantiser import (
    Run,
    dequantise_dynamic,
    dequantise_static,
    fit_steps,
    quantise_dynamic,
    quantise_static,
)

PLANS = {
    "one group": (Run(0, 16, 3),),
    "all widths": tuple(Run(16 * i, 16, b) for i, b in enumerate([1, 2, 3, 4, 5, 6, 7, 8, 16])),
    "gap and large groups": (Run(0, 16, 16), Run(32, 64, 5), Run(96, 256, 2)),
}


@given(
    st.integers(1, 8),
    st.lists(st.floats(-1000, 1000, width=32), min_size=2, max_size=40),
    st.floats(2**-10, 30, width=32),
)
@settings(max_examples=150, deadline=None)
def test_dynamic_error_is_at_most_half_a_step_and_the_rounding_of_the_range(bits, values, scale):
    x = torch.tensor([values]) * scale
    codes, shift, step = quantise_dynamic(x, bits)
    error = (dequantise_dynamic(codes, shift, step) - x).abs()
    # The ends of the range are moved by rounding shift and scale to float16 (relative 2**-11 each, or its least step).
    levels = 2**bits - 1
    rounding = (x.abs().max() + (x.max() - x.min())) * 2**-10 + (1 + levels) * 2**-24
    assert float(error.max()) <= float(step) / 2 * 1.001 + float(rounding)


@given(st.integers(1, 8), st.floats(2**-7, 10, width=32), st.integers(0, 2**16))
@settings(max_examples=80, deadline=None)
def test_static_error_is_at_most_half_a_step_inside_the_range(bits, step, seed):
    half = 2 ** (bits - 1)
    x = (torch.rand(50, 3, generator=torch.Generator().manual_seed(seed)) * 2 - 1) * half * step * 0.999
    steps = torch.full((3,), step)
    decoded = dequantise_static(quantise_static(x, steps, bits), steps, bits)
    assert float((decoded - x).abs().max()) <= step / 2 * 1.001


def test_a_constant_group_comes_back_as_its_float16():
    x = torch.full((2, 16), 0.3)
    codes, shift, scale = quantise_dynamic(x, 4)
    assert torch.equal(dequantise_dynamic(codes, shift, scale), x.half().float())


def test_steps_are_better_than_their_neighbours():
    rows = torch.randn(2000, 2, generator=torch.Generator().manual_seed(0)) * torch.tensor([1.0, 30.0])
    steps, errors = fit_steps(rows)
    for bits in range(1, 9):
        for factor in (0.85, 1.15):
            step = steps[bits] * factor
            other = (dequantise_static(quantise_static(rows, step, bits), step, bits) - rows).square().mean(0)
            assert (errors[bits] <= other.double() * 1.0001).all()
    assert (errors.diff(dim=0) < 0).all()


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("n", [8, 16, 1000, 4096])
def test_codes_survive_packing(bits, n):
    codes = torch.randint(0, 2**bits, (3, n), generator=torch.Generator().manual_seed(bits)).to(torch.uint8)
    packed = pack_codes(codes, bits)
    assert packed.shape == (3, n * bits // 8)
    assert torch.equal(unpack_codes(packed, bits), codes)


@pytest.mark.parametrize("bits", range(1, 9))
def test_packing_is_little_endian(bits):
    codes = torch.randint(0, 2**bits, (64,), generator=torch.Generator().manual_seed(bits)).to(torch.uint8)
    number = sum(int(code) << (bits * i) for i, code in enumerate(codes))
    assert bytes(pack_codes(codes, bits).tolist()) == number.to_bytes(8 * bits, "little")


def coder_and_rows(mode, plan, n_tokens):
    rows = torch.randn(n_tokens, 352, generator=torch.Generator().manual_seed(n_tokens)) * 5
    return RowCoder(plan, mode, fit_steps(rows)[0]), rows


@pytest.mark.parametrize("mode", ["dynamic", "static"])
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("n_tokens", [1, 7, 64])
def test_layouts_decode_identically_and_hold_exactly_the_planned_bits(mode, plan, n_tokens):
    coder, rows = coder_and_rows(mode, plan, n_tokens)
    coded = coder.quantise(rows)
    expected = coder.dequantise(coded)
    planned = sum(run.size * run.bits + 32 * (mode == "dynamic" and run.bits < 16) for run in plan)
    for layout in ("store", "fetch"):
        data = coder.write(coded, layout)
        assert 8 * len(data) == n_tokens * planned == n_tokens * coder.bits
        assert torch.equal(coder.dequantise(coder.read(data, n_tokens, layout)), expected)


@pytest.mark.parametrize("mode", ["dynamic", "static"])
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_gathered_rows_are_those_of_all(mode, plan):
    coder, rows = coder_and_rows(mode, plan, 33)
    coded = coder.quantise(rows)
    table = coder.write_rows(coded)
    chosen = torch.tensor([32, 0, 5, 5])
    assert torch.equal(coder.dequantise(coder.read_rows(table[chosen])), coder.dequantise(coded)[chosen])
    empty = coder.dequantise(coder.read_rows(table[:0]))
    assert empty.shape == (0, coder.width)


def test_dropped_coordinates_come_back_as_zero():
    coder, rows = coder_and_rows("dynamic", PLANS["gap and large groups"], 5)
    decoded = coder.dequantise(coder.quantise(rows))
    assert not decoded[:, 16:32].any() and decoded[:, 32:96].all()


def test_rows_of_another_length_are_refused():
    coder, rows = coder_and_rows("static", PLANS["one group"], 5)
    with pytest.raises(CorruptFileError):
        coder.read(coder.write(coder.quantise(rows), "store")[:-1], 5, "store")
