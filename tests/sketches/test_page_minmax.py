"""Page bounds are bounds, whatever the rounding; pages are those they should be."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from verkv.sketches import PageMinMaxSketch


@settings(deadline=None, max_examples=80)
@given(
    seed=st.integers(0, 999),
    n_tokens=st.integers(1, 40),
    page_size=st.integers(1, 50),
    precision=st.sampled_from([8, 16]),
    offset=st.sampled_from([0.0, 1.0, -1e4, 1e6]),
    scale=st.sampled_from([0.0, 1e-6, 1.0, 1e5]),
)
def test_extremes_enclose_every_key_and_scores_every_logit(seed, n_tokens, page_size, precision, offset, scale):
    """Also where the levels lie closer together than float32 numbers (a large offset, a small scale)."""
    generator = torch.Generator().manual_seed(seed)
    keys = offset + scale * torch.randn(1, 2, n_tokens, 4, generator=generator)
    sketch = PageMinMaxSketch(page_size=page_size, precision=precision).build(keys)
    minima, maxima = sketch.bounds()
    for page, tokens in enumerate(keys.split(page_size, dim=2)):
        assert (minima[:, :, page] <= tokens.amin(2)).all() and (maxima[:, :, page] >= tokens.amax(2)).all()
    query = torch.randn(1, 2, 3, 4, generator=generator)
    rounding = 1e-6 * query.abs().double() @ keys.abs().double().mT
    assert (sketch.logits(query).double() >= query.double() @ keys.double().mT - rounding).all()


@pytest.mark.parametrize("precision", [8, 16])
def test_extremes_are_less_than_two_steps_off(precision):
    """Rounded outward, not farther than that."""
    keys = torch.randn(2, 3, 100, 8)
    sketch = PageMinMaxSketch(page_size=10, precision=precision).build(keys)
    minima, maxima = sketch.bounds()
    pages = keys.unflatten(2, (10, 10))
    step = (keys.amax(2, keepdim=True) - keys.amin(2, keepdim=True)) / (2**precision - 1)
    for excess in (pages.amin(3) - minima, maxima - pages.amax(3)):
        assert (excess >= 0).all() and (excess <= 1.01 * step + 1e-6).all()


def test_tokens_of_a_page_score_its_bound():
    keys, query = torch.randn(1, 2, 25, 4), torch.randn(1, 2, 3, 4)
    sketch = PageMinMaxSketch(page_size=10).build(keys)
    minima, maxima = sketch.bounds()
    logits = sketch.logits(query)
    assert minima.shape == (1, 2, 3, 4) and logits.shape == (1, 2, 3, 25)
    for head in range(2):
        for row in range(3):
            for token in range(25):
                page, q = token // 10, query[0, head, row]
                bound = sum(
                    max(float(q[c] * minima[0, head, page, c]), float(q[c] * maxima[0, head, page, c]))
                    for c in range(4)
                )
                assert float(logits[0, head, row, token]) == pytest.approx(bound, abs=1e-5)


def test_pages_of_one_token_are_nearly_exact():
    keys, query = torch.randn(1, 2, 50, 8), torch.randn(1, 2, 3, 8)
    logits = PageMinMaxSketch(page_size=1, precision=16).build(keys).logits(query)
    assert_close(logits, query @ keys.mT, atol=5e-3, rtol=0)


@pytest.mark.parametrize("precision,expected", [(8, 29), (16, 57)])
def test_page_size_by_bytes(precision, expected):
    """At head dim 64 the 2-bit sketch has 36 bits; a page has 2 * 64 numbers."""
    sketch = PageMinMaxSketch(precision=precision)
    assert sketch._page_size(64) == expected
    assert 128 * precision / expected <= 36 < 128 * precision / (expected - 1)
    assert PageMinMaxSketch(bits_per_token=72, precision=precision)._page_size(64) == -(-128 * precision // 72)


def test_it_is_not_linear():
    sketch = PageMinMaxSketch().build(torch.randn(1, 1, 5, 8))
    assert not sketch.is_linear and not sketch.is_oracle
    with pytest.raises(NotImplementedError, match="page sketch"):
        sketch.decode()


@pytest.mark.parametrize(
    "options,match",
    [
        ({"page_size": 0}, "page_size"),
        ({"page_size": 4, "bits_per_token": 8}, "page_size and bits_per_token"),
        ({"precision": 4}, "precision must be 8 or 16, got 4"),
    ],
    ids=str,
)
def test_options_out_of_range(options, match):
    with pytest.raises(ValueError, match=match):
        PageMinMaxSketch(**options)
