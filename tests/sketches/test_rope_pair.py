"""The 2-bit sketch: which channels, how exactly, how many bytes."""

import copy

import pytest
import torch
from torch.testing import assert_close

from verkv.sketches import RopePairSketch
from verkv.sketches.rope_pair import _pack, _pairs, _unpack

LENGTHS = [1, 127, 128, 129, 1000]
HEAD_DIMS = [16, 64, 80, 128, 256]
GROUP = 128


def random_keys(*shape, seed=0):
    """Channels of different size and mean, as keys have them."""
    generator = torch.Generator().manual_seed(seed)
    scale = torch.rand(shape[0], shape[1], 1, shape[3], generator=generator) * 4 + 0.1
    mean = 5 * torch.randn(shape[0], shape[1], 1, shape[3], generator=generator)
    return scale * torch.randn(*shape, generator=generator) + mean


# --- bytes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("n_tokens", LENGTHS)
def test_charged_bytes_are_those_of_the_tensors(n_tokens, head_dim):
    for options in ({}, {"fraction": 0.5, "group_size": 32}, {"fraction": 1.0}, {"fraction": 0.01}):
        sketch = RopePairSketch(**options).build(random_keys(2, 3, n_tokens, head_dim))
        assert sketch.charged_bytes(n_tokens, head_dim) * 6 == sketch.nbytes
        assert sketch.nbytes == sum(t.nbytes for t in sketch.tensors().values())
        assert sketch.uncharged_nbytes == sum(t.nbytes for t in sketch.uncharged_tensors().values()) > 0
        held = [t for t in vars(sketch).values() if isinstance(t, torch.Tensor)]
        assert sum(t.nbytes for t in held) == sketch.nbytes + sketch.uncharged_nbytes


@pytest.mark.parametrize("n_tokens", [128, 1024])
def test_share_of_a_bf16_cache_at_head_dim_128(n_tokens):
    keys = random_keys(1, 2, n_tokens, 128).bfloat16()
    assert RopePairSketch().build(keys).nbytes * 512 == 9 * (2 * keys.nbytes)  # 1.76 %, of keys and values


def test_bytes_do_not_depend_on_the_keys_dtype():
    keys = random_keys(1, 2, 200, 64)
    sizes = {RopePairSketch().build(keys.to(dtype)).nbytes for dtype in (torch.float32, torch.bfloat16, torch.float16)}
    assert len(sizes) == 1


# --- channels ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("head_dim,rotary_dim", [(16, None), (80, None), (128, None), (128, 64), (256, 64), (80, 32)])
def test_strongest_pairs_are_kept(head_dim, rotary_dim):
    keys = random_keys(2, 3, 100, head_dim)
    sketch = RopePairSketch(rotary_dim=rotary_dim).build(keys)
    half, n_channels = (rotary_dim or head_dim) // 2, sketch._n_channels(head_dim)
    pairs = [(i, i + half) for i in range(half)]
    rest = head_dim - 2 * half
    pairs += [(2 * half + i, 2 * half + i + rest // 2) for i in range(rest // 2)]
    assert sorted(channel for pair in pairs for channel in pair) == list(range(head_dim))
    for context in range(2):
        for head in range(3):
            energy = keys[context, head].double().square().mean(0)
            strongest = sorted(pairs, key=lambda pair: float(energy[list(pair)].sum()), reverse=True)[: n_channels // 2]
            kept = sketch._channels[context, head].tolist()
            assert list(zip(kept[: n_channels // 2], kept[n_channels // 2 :], strict=True)) == sorted(strongest)


def test_unrotated_channels_compete_with_the_rotated_ones():
    keys = torch.full((1, 1, 10, 64), 0.1)
    keys[..., [20, 42]] = 9.0  # the 5th pair beyond the 16 rotated channels: (16 + 4, 16 + 4 + 24) is (20, 44)
    sketch = RopePairSketch(rotary_dim=16).build(keys)
    kept = set(sketch._channels.flatten().tolist())
    assert {20, 44, 42, 18} <= kept


@pytest.mark.parametrize("fraction,expected", [(0.25, 32), (1.0, 128), (0.001, 4), (0.3, 40), (0.5, 64)])
def test_number_of_channels_fills_whole_bytes(fraction, expected):
    assert RopePairSketch(fraction=fraction)._n_channels(128) == expected


def test_all_channels_of_an_odd_head_dim():
    sketch = RopePairSketch(fraction=1.0).build(random_keys(1, 1, 10, 20))
    assert sorted(sketch._channels.flatten().tolist()) == list(range(20))


def test_choice_survives_rope():
    """RoPE rotates within pairs, so keys before and after it have the same strongest pairs."""
    keys = random_keys(1, 2, 50, 32)
    angle = torch.arange(50)[:, None] / 10.0 ** (torch.arange(16) / 4)
    first, second = keys[..., :16], keys[..., 16:]
    rotated = torch.cat([first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()], -1)
    sketches = [RopePairSketch().build(k) for k in (keys, rotated)]
    assert torch.equal(sketches[0]._channels, sketches[1]._channels)


# --- accuracy ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("head_dim", [16, 80, 128])
@pytest.mark.parametrize("n_tokens", LENGTHS)
def test_decoded_channels_are_within_half_a_step(n_tokens, head_dim, dtype):
    """Up to float16's rounding of the group's zero and scale: three steps of a scale off by 2 ** -11, and a zero."""
    keys = random_keys(2, 2, n_tokens, head_dim).to(dtype)
    sketch = RopePairSketch().build(keys)
    channels = sketch._channels.long()[:, :, None].expand(-1, -1, n_tokens, -1)
    kept, decoded = keys.gather(-1, channels).double(), sketch._decode_kept().double()
    assert decoded.shape == kept.shape
    for start in range(0, n_tokens, GROUP):
        group = slice(start, start + GROUP)
        low, high = kept[:, :, group].amin(2, keepdim=True), kept[:, :, group].amax(2, keepdim=True)
        rounding = 2.0**-11 * (low.abs() + (high - low)) + 1e-6
        error = (decoded[:, :, group] - kept[:, :, group]).abs()
        assert (error <= (high - low) / 6 + rounding).all()


def test_constant_and_tiny_channels():
    keys = torch.full((1, 1, 200, 16), 1.5)
    keys[..., 0] += 1e-9 * torch.randn(200)
    assert_close(RopePairSketch().build(keys)._decode_kept(), torch.full((1, 1, 200, 4), 1.5))
    assert not RopePairSketch().build(torch.zeros(1, 1, 5, 16)).decode().any()


def test_logits_are_those_of_the_decoded_channels():
    keys, query = random_keys(2, 3, 300, 64), torch.randn(2, 3, 5, 64)
    sketch = RopePairSketch().build(keys)
    dense = torch.zeros(2, 3, 300, 64).scatter(
        -1, sketch._channels.long()[:, :, None].expand(-1, -1, 300, -1), sketch._decode_kept()
    )
    logits = sketch.logits(query)
    assert logits.dtype == torch.float32
    assert sketch.is_linear and torch.equal(sketch.decode(), dense)
    assert_close(logits, query @ dense.mT, atol=1e-3, rtol=1e-4)
    assert_close(sketch.logits(query.bfloat16()), query.bfloat16().float() @ dense.mT, atol=1e-3, rtol=1e-4)


def test_scores_are_close_where_all_channels_are_kept():
    keys, query = torch.randn(1, 2, 256, 32), torch.randn(1, 2, 4, 32)
    exact = query @ keys.mT
    for fraction, least in ((1.0, 0.9), (0.25, 0.4)):
        logits = RopePairSketch(fraction=fraction, group_size=32).build(keys).logits(query)
        correlation = torch.corrcoef(torch.stack([logits.flatten(), exact.flatten()]))[0, 1]
        assert correlation > least


@pytest.mark.parametrize("n_channels", [4, 8, 20, 64])
def test_packing_round_trip(n_channels):
    codes = torch.randint(0, 4, (2, 3, 50, n_channels), dtype=torch.uint8)
    packed = _pack(codes)
    assert packed.shape == (2, 3, 50, n_channels // 4) and packed.dtype == torch.uint8
    assert torch.equal(_unpack(packed, n_channels), codes)


def test_pairs_of_a_partly_rotated_head():
    first, second = _pairs(12, 8, torch.device("cpu"))
    assert list(zip(first.tolist(), second.tolist(), strict=True)) == [(0, 4), (1, 5), (2, 6), (3, 7), (8, 10), (9, 11)]


# --- the rest of the protocol -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value,match",
    [
        (torch.nan, "NaN or infinite"),
        (torch.inf, "NaN or infinite"),
        (-torch.inf, "NaN or infinite"),
        (-1e5, "too large"),
        (3e5, "too large"),
        (1e30, "infinite|too large"),  # its square is infinite
    ],
    ids=str,
)
def test_keys_that_cannot_be_sketched_are_refused(value, match):
    keys = torch.randn(1, 2, 20, 16)
    keys[0, 1, 7, 3] = value
    with pytest.raises(ValueError, match=match):
        RopePairSketch().build(keys)


def test_largest_half_precision_keys_are_accepted():
    keys = torch.randn(1, 2, 20, 16).half()
    keys[0, 0, 3, 5], keys[0, 0, 4, 5] = 60000.0, -60000.0
    assert RopePairSketch().build(keys).decode().isfinite().all()


@pytest.mark.parametrize(
    "options", [{"fraction": 0.0}, {"fraction": 1.5}, {"fraction": -1.0}, {"group_size": 0}], ids=str
)
def test_options_out_of_range_are_refused(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        RopePairSketch(**options)


@pytest.mark.parametrize("rows", [[1], [2, 0], [1, 1, 0, 2]], ids=str)
def test_select_reindexes_the_batch(rows):
    keys, rows = random_keys(3, 2, 150, 64), torch.tensor(rows)
    selected, expected = (
        RopePairSketch(group_size=64).build(keys).select(rows),
        RopePairSketch(group_size=64).build(keys[rows]),
    )
    query = torch.randn(len(rows), 2, 3, 64)
    assert torch.equal(selected.logits(query), expected.logits(query))
    assert selected.nbytes == expected.nbytes and selected == expected
    assert selected.charged_bytes(150, 64) * len(rows) * 2 == selected.nbytes


def test_recipe_is_not_changed_and_the_fit_is_a_copy():
    keys = random_keys(1, 2, 100, 64)
    recipe = RopePairSketch()
    sketch = recipe.build(keys)
    assert vars(recipe) == vars(RopePairSketch())
    assert not sketch.is_oracle and sketch.name == "rope_pair"
    before = copy.deepcopy(sketch.decode())
    keys.zero_()
    assert torch.equal(sketch.decode(), before)


@pytest.mark.gpu
def test_gpu_gives_the_same():
    keys, query = random_keys(1, 2, 300, 64), torch.randn(1, 2, 3, 64)
    expected = RopePairSketch().build(keys)
    actual = RopePairSketch().build(keys.cuda())
    assert torch.equal(actual._codes.cpu(), expected._codes)
    assert_close(actual.logits(query.cuda()).cpu(), expected.logits(query), atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize(
    ("options", "head_dim", "match"),
    [({}, 2, "head dim of 2"), ({}, 15, "head dim of 15"), ({"rotary_dim": 32}, 16, "rotary_dim=32")],
)
def test_keys_that_do_not_fit_the_sketch(options, head_dim, match):
    with pytest.raises(ValueError, match=match):
        RopePairSketch(**options).build(torch.randn(1, 1, 10, head_dim))


@pytest.mark.parametrize("rotary_dim", [0, -2, 5, 16.0])
def test_rotary_dim_out_of_range(rotary_dim):
    with pytest.raises(ValueError, match="rotary_dim"):
        RopePairSketch(rotary_dim=rotary_dim)
