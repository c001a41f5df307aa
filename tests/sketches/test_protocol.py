"""What every sketch that is fitted on a prompt promises: bytes, padding, the batch, bad keys."""

import copy
import dataclasses

import pytest
import torch
from torch.testing import assert_close

from verkv.rotary import Rotary
from verkv.sketches import (
    PageMinMaxSketch,
    ProductQuantizationSketch,
    QueryPCASketch,
    RopePairSketch,
    TransformSketch,
)

ROTARY = Rotary(1.0 / 10000.0 ** (torch.arange(8) / 8))
SKETCHES = {
    "transform": TransformSketch(ROTARY),
    "transform, partly rotated": TransformSketch(Rotary(torch.tensor([1.0, 0.3, 0.01]))),
    "transform, as cached": TransformSketch(None),
    "query_pca": QueryPCASketch(),
    "product_quantization": ProductQuantizationSketch(rounds=3),
    "page_minmax": PageMinMaxSketch(),
    "page_minmax, 16 bits": PageMinMaxSketch(page_size=7, precision=16),
}
LINEAR = [name for name in SKETCHES if not name.startswith("page")]
all_sketches = pytest.mark.parametrize("recipe", SKETCHES.values(), ids=SKETCHES)
linear_sketches = pytest.mark.parametrize("recipe", [SKETCHES[name] for name in LINEAR], ids=LINEAR)


def random_keys(batch=1, n_tokens=50, n_heads=2, head_dim=16, seed=0):
    """Correlated channels with a mean, rotated."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(n_heads, head_dim, head_dim, generator=generator) / head_dim**0.5
    keys = torch.randn(batch, n_heads, n_tokens, head_dim, generator=generator) @ mixing + 2
    return ROTARY.apply(keys, torch.arange(n_tokens))


def random_queries(batch=1, n_heads=4, head_dim=16):
    return torch.randn(batch, n_heads, 9, head_dim)


def padded(keys, n_padding):
    """Left padding with copies of the first key, and the positions that go with it."""
    keys = torch.cat([keys[:, :, :1].expand(-1, -1, n_padding, -1), keys], dim=2)
    positions = (torch.arange(keys.shape[2]) - n_padding).clamp_min(0)
    return keys, positions.expand(len(keys), -1)


# --- bytes ------------------------------------------------------------------------------------------------------------


@all_sketches
@pytest.mark.parametrize("n_tokens", [1, 8, 63, 130])
def test_charged_bytes_are_those_of_the_tensors(recipe, n_tokens):
    sketch = recipe.build(random_keys(2, n_tokens, 3), random_queries(2, 6))
    assert recipe.charged_bytes(n_tokens, 16) * 6 == sketch.charged_bytes(n_tokens, 16) * 6 == sketch.nbytes
    assert sketch.nbytes == sum(t.nbytes for t in sketch.tensors().values())
    assert sketch.uncharged_nbytes == sum(t.nbytes for t in sketch.uncharged_tensors().values()) > 0
    held = [t for t in vars(sketch).values() if isinstance(t, torch.Tensor)]
    assert sum(t.nbytes for t in held) + shared_nbytes(sketch) == sketch.nbytes + sketch.uncharged_nbytes


def shared_nbytes(sketch):
    """Of what the rows of a batch have in common."""
    rotary = getattr(sketch, "rotary", None)
    return 0 if rotary is None else rotary.inv_freq.nbytes


@pytest.mark.parametrize("kind", [TransformSketch, QueryPCASketch, ProductQuantizationSketch, PageMinMaxSketch])
@pytest.mark.parametrize("head_dim", [16, 64, 80, 128])
def test_default_is_not_larger_than_the_2_bit_sketch(kind, head_dim):
    recipe = kind(None) if kind is TransformSketch else kind()
    n_tokens = 128 * 50
    expected = RopePairSketch().charged_bytes(n_tokens, head_dim)
    charged = recipe.charged_bytes(n_tokens, head_dim)
    if kind is PageMinMaxSketch:  # whole tokens to a page
        assert 0.8 * expected < charged <= expected
    else:
        assert charged == expected


@pytest.mark.parametrize("kind", [TransformSketch, QueryPCASketch, ProductQuantizationSketch, PageMinMaxSketch])
def test_size_is_free(kind):
    for bits in (1, 5, 18, 40, 128):
        recipe = kind(None, bits_per_token=bits) if kind is TransformSketch else kind(bits_per_token=bits)
        sketch = recipe.build(random_keys(1, 40))
        assert sketch.nbytes == 2 * recipe.charged_bytes(40, 16)
        assert sketch.logits(torch.randn(1, 2, 3, 16)).isfinite().all()
        if kind is not PageMinMaxSketch:
            assert sketch.nbytes == 2 * bits * 40 // 8


@linear_sketches
def test_more_bits_are_closer(recipe):
    keys, queries = random_keys(1, 300), random_queries()
    rows = torch.randn(1, 2, 5, 16)
    errors = []
    for bits in (8, 32, 100):
        sketch = dataclasses.replace(recipe, bits_per_token=bits).build(keys, queries)
        errors.append(float((sketch.logits(rows) - rows @ keys.mT).square().mean()))
    assert errors[0] > 2 * errors[1] > 4 * errors[2]


# --- logits -----------------------------------------------------------------------------------------------------------


@linear_sketches
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("n_tokens", [1, 7, 100])
def test_logits_are_those_of_the_decoded_keys(recipe, dtype, n_tokens):
    keys = random_keys(2, n_tokens).to(dtype)
    sketch = recipe.build(keys, random_queries(2).to(dtype))
    decoded = sketch.decode()
    assert sketch.is_linear and not sketch.is_oracle
    assert decoded.shape == keys.shape and decoded.dtype == torch.float32
    for n_rows in (1, 5):
        query = torch.randn(2, 2, n_rows, 16).to(dtype)
        logits = sketch.logits(query)
        assert logits.dtype == torch.float32 and logits.shape == (2, 2, n_rows, n_tokens)
        assert_close(logits, query.float() @ decoded.mT, atol=1e-4, rtol=1e-4)


@all_sketches
def test_fit_is_deterministic_and_a_copy(recipe):
    keys, queries, rows = random_keys(), random_queries(), torch.randn(1, 2, 3, 16)
    before = {name: value for name, value in vars(recipe).items()}
    first = recipe.build(keys, queries)
    expected = copy.deepcopy(first.logits(rows))
    torch.manual_seed(99)
    assert torch.equal(recipe.build(keys, queries).logits(rows), expected)
    keys.zero_(), queries.zero_()
    assert torch.equal(first.logits(rows), expected)
    assert vars(recipe) == before


# --- rows of a batch --------------------------------------------------------------------------------------------------


@all_sketches
@pytest.mark.parametrize("n_padding", [0, 1, 13])
def test_padding_does_not_change_the_row(recipe, n_padding):
    """Up to one rounding: products of phases are taken at other places of their table."""
    keys, queries, rows = random_keys(), random_queries(), torch.randn(1, 2, 3, 16)
    alone = recipe.build(keys, queries)
    with_padding, positions = padded(keys, n_padding)
    sketch = recipe.build(with_padding, queries, positions)
    logits = sketch.logits(rows)
    assert_close(logits[..., n_padding:], alone.logits(rows), atol=1e-4, rtol=1e-4)
    assert_close(logits[..., :n_padding], logits[..., n_padding, None].expand(-1, -1, -1, n_padding))
    if sketch.is_linear:
        assert_close(sketch.decode()[:, :, n_padding:], alone.decode(), atol=1e-4, rtol=1e-4)


@all_sketches
def test_rows_are_independent_and_selectable(recipe):
    keys = torch.cat([random_keys(seed=1), padded(random_keys(n_tokens=40, seed=2) * 3, 10)[0], random_keys(seed=3)])
    positions = torch.stack([torch.arange(50), (torch.arange(50) - 10).clamp_min(0), torch.arange(50)])
    queries, rows = random_queries(3), torch.randn(3, 2, 4, 16)
    sketch = recipe.build(keys, queries, positions)
    logits = sketch.logits(rows)
    for row in range(3):
        alone = recipe.build(keys[row : row + 1], queries[row : row + 1], positions[row : row + 1])
        assert_close(logits[row : row + 1], alone.logits(rows[row : row + 1]), atol=1e-4, rtol=1e-4)
    for chosen in ([1], [2, 0], [1, 1, 0, 2]):
        selected = sketch.select(torch.tensor(chosen))
        assert_close(selected.logits(rows[chosen]), logits[chosen])
        assert selected.nbytes * 3 == sketch.nbytes * len(chosen)
        sizes = [s.uncharged_nbytes - shared_nbytes(s) for s in (selected, sketch)]
        assert sizes[0] * 3 == sizes[1] * len(chosen)
        assert selected.charged_bytes(50, 16) * 2 * len(chosen) == selected.nbytes
        again = selected.select(torch.tensor([0]))
        assert_close(again.logits(rows[chosen[:1]]), logits[chosen[:1]])


@all_sketches
@pytest.mark.parametrize(
    "positions",
    [torch.tensor([[0, 1, 3, 4]]), torch.tensor([[3, 2, 1, 0]]), torch.tensor([[0, 1, 1, 2]])],
    ids=["gap", "falling", "repeated within"],
)
def test_positions_that_are_not_consecutive_are_refused(recipe, positions):
    with pytest.raises(ValueError, match="positions must increase by one"):
        recipe.build(random_keys(1, 4), positions=positions)


@all_sketches
@pytest.mark.parametrize("positions", [torch.arange(4), torch.arange(4.0)[None]], ids=["shape", "dtype"])
def test_positions_of_another_kind_are_refused(recipe, positions):
    with pytest.raises(ValueError, match="positions must be integers of shape"):
        recipe.build(random_keys(1, 4), positions=positions)


# --- bad input --------------------------------------------------------------------------------------------------------


@all_sketches
@pytest.mark.parametrize(
    "value,match",
    [(torch.nan, "NaN or infinite"), (torch.inf, "NaN or infinite"), (-torch.inf, "NaN or"), (1e30, "too large")],
    ids=str,
)
def test_keys_that_cannot_be_sketched_are_refused(recipe, value, match):
    keys = random_keys()
    keys[0, 1, 7, 3] = value
    with pytest.raises(ValueError, match=match):
        recipe.build(keys)


@all_sketches
def test_keys_without_tokens_are_refused(recipe):
    with pytest.raises(ValueError, match="at least one token"):
        recipe.build(torch.zeros(1, 2, 0, 16))


DEGENERATE = {
    "zeros": lambda: torch.zeros(1, 2, 40, 16),
    "constant": lambda: torch.full((1, 2, 40, 16), 3.0),
    "one direction": lambda: torch.randn(1, 2, 40, 1) * torch.randn(16),
    "two different tokens": lambda: torch.randn(1, 2, 1, 16) * (torch.arange(40) < 20)[:, None],
    "one outlier token": lambda: torch.zeros(1, 2, 40, 16).index_fill(2, torch.tensor([7]), 100.0),
    "outlier channel": lambda: torch.randn(1, 2, 40, 16) * torch.tensor([1.0] * 5 + [100.0] + [1.0] * 10),
    "tiny": lambda: 1e-30 * torch.randn(1, 2, 40, 16),
    "fp16's largest": lambda: (6e4 * torch.randn(1, 2, 40, 16).sign()).half(),
    "bf16, large": lambda: (1e8 * torch.randn(1, 2, 40, 16)).bfloat16(),
}


@all_sketches
@pytest.mark.parametrize("keys", DEGENERATE.values(), ids=DEGENERATE)
@pytest.mark.parametrize(
    "queries", [None, torch.zeros(1, 4, 3, 16), torch.full((1, 4, 1, 16), 1e4)], ids=["no queries", "zero", "large"]
)
def test_degenerate_keys_stay_finite(recipe, keys, queries):
    keys = keys()
    sketch = recipe.build(keys, queries)
    assert sketch.logits(torch.randn(1, 2, 3, 16)).isfinite().all()
    if sketch.is_linear:
        error = (sketch.decode() - keys.float()).square().mean()
        assert error <= 1.01 * keys.float().square().mean()


@linear_sketches
def test_one_token_is_kept(recipe):
    keys = 10 * torch.randn(1, 2, 1, 16)
    assert_close(recipe.build(keys, random_queries()).decode(), keys, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("bits", [0, -3, 2.5, True, "8"])
@pytest.mark.parametrize("kind", [TransformSketch, QueryPCASketch, ProductQuantizationSketch, PageMinMaxSketch])
def test_bits_that_are_no_count_are_refused(kind, bits):
    with pytest.raises(ValueError, match="bits_per_token"):
        kind(None, bits_per_token=bits) if kind is TransformSketch else kind(bits_per_token=bits)


@all_sketches
def test_too_many_bits_are_refused(recipe):
    options = {"bits_per_token": 1000} | ({"page_size": None} if hasattr(recipe, "page_size") else {})
    with pytest.raises(ValueError, match="bits_per_token=1000 is too large"):
        dataclasses.replace(recipe, **options).build(random_keys())


@pytest.mark.gpu
@all_sketches
def test_gpu_gives_the_same(recipe):
    keys, queries, rows = random_keys(2, 300), random_queries(2), torch.randn(2, 2, 3, 16)
    positions = torch.arange(300).expand(2, -1)
    on_gpu = recipe.build(keys.cuda(), queries.cuda(), positions.cuda())
    logits = on_gpu.logits(rows.cuda())
    assert logits.is_cuda and all(t.is_cuda for t in on_gpu.tensors().values())
    error = (recipe.build(keys, queries).logits(rows) - rows @ keys.mT).std()
    gpu_error = (logits.cpu() - rows @ keys.mT).std()
    assert_close(gpu_error, error, rtol=0.05, atol=1e-3)  # rounding may move single codes
    assert_close(on_gpu.select(torch.tensor([1])).logits(rows[1:].cuda()), logits[1:])
