"""The compressed host tier reads what a full decode gives, and says how far that is from the model's own rows."""

import copy

import pytest
import torch

from verkv.codecs import CodecError, CompressedHostTier, denominator_error
from verkv.tiers import HostTier

pytestmark = pytest.mark.filterwarnings("ignore:residuals are larger")

ONE_LAYER = {"layers_per_group": 1, "float32_basis": True}
N = 90


@pytest.fixture(params=["dynamic", "static"])
def case(request, codec_of, prefill):
    """Codec, layer, and keys and values (2, H, T, d) of two contexts, the second left-padded by 7."""
    model, codec = codec_of("llama", ONE_LAYER, ratio=2.0, mode=request.param, layout="fetch", window=8)
    caches = [prefill(model, n)[1] for n in (N, N - 7)]
    layer, states = 2, []
    for name in ("keys", "values"):
        first, second = (getattr(cache.layers[layer], name) for cache in caches)
        states.append(torch.cat([first, torch.nn.functional.pad(second, (0, 0, 7, 0))]))
    return codec, layer, *states, torch.tensor([0, 7])


def test_rows_read_are_those_of_a_full_decode(case):
    codec, layer, keys, values, padding = case
    tier = CompressedHostTier.encode(codec, layer, keys, values, padding)
    units, positions = torch.tensor([0, 3, 3, 1, 2]), torch.tensor([0, 89, 50, 40, 8])
    for read, whole in ((tier.read_keys, tier.keys), (tier.read_values, tier.values)):
        found = read(units, positions, torch.device("cpu"))
        torch.testing.assert_close(found, whole.flatten(0, 1)[units, positions], rtol=1e-5, atol=1e-5)
    assert tier.read_keys(units[:0], positions[:0], torch.device("cpu")).shape == (0, 16)


def test_it_is_near_the_raw_tier_and_exact_at_the_ends(case):
    codec, layer, keys, values, padding = case
    tier, raw = CompressedHostTier.encode(codec, layer, keys, values, padding), HostTier.copy_from(keys, values)
    real = torch.arange(N) >= padding[:, None]
    for name, restored, exact in (("key", tier.keys, raw.keys), ("value", tier.values, raw.values)):
        error = float((restored - exact).norm() / exact.norm())
        assert tier.tier_error[f"{name}_error"] == pytest.approx(error, rel=1e-4) and 0 < error < 0.1
        assert torch.equal(restored[:, :, -8:], exact[:, :, -8:])
        for context, start in enumerate(padding.tolist()):  # the first real tokens, behind the padding
            assert torch.equal(restored[context, :, : start + 4], exact[context, :, : start + 4])
    assert real.any()
    assert tier.row_bytes < raw.row_bytes * 2 / 1.9  # a row of two heads at 2x against 16 bit; raw rows are 32 bit
    assert tier.nbytes("k") + tier.nbytes("v") < (raw.keys.nbytes + raw.values.nbytes) / 2


def test_the_batch_can_be_reindexed_and_copied(case):
    codec, layer, keys, values, padding = case
    tier = CompressedHostTier.encode(codec, layer, keys, values, padding)
    chosen = tier.select(torch.tensor([1, 1, 0]))
    assert torch.equal(chosen.keys, tier.keys[[1, 1, 0]]) and torch.equal(chosen.values, tier.values[[1, 1, 0]])
    assert torch.equal(copy.deepcopy(tier).keys, tier.keys)


def test_positions_behind_padding_are_undone(case):
    codec, layer, keys, values, padding = case
    right = CompressedHostTier.encode(codec, layer, keys, values, padding)
    alone = CompressedHostTier.encode(codec, layer, keys[1:, :, 7:], values[1:, :, 7:])
    torch.testing.assert_close(right.keys[1, :, 7:], alone.keys[0], rtol=1e-4, atol=1e-4)


def test_denominators_are_compared_over_real_tokens(case):
    codec, layer, keys, values, padding = case
    tier = CompressedHostTier.encode(codec, layer, keys, values, padding)
    queries = torch.randn(2, 4, 5, 16)
    errors = denominator_error(tier, keys, queries, 0.25, padding)
    for context in range(2):
        start = int(padding[context])
        for head in range(4):
            exact = (queries[context, head] @ keys[context, head // 2, start:].T * 0.25).exp().sum(-1)
            restored = (queries[context, head] @ tier.keys[context, head // 2, start:].T * 0.25).exp().sum(-1)
            expected = (restored / exact - 1).abs()
            torch.testing.assert_close(errors[context, head], expected, rtol=1e-3, atol=1e-5)
    assert float(errors.max()) > 0


def test_codecs_whose_rows_cannot_be_read_alone_are_refused(codec_of, prefill):
    keys = values = torch.zeros(1, 2, 30, 16)
    for settings, layout, message in (({}, "fetch", "layers_per_group=1"), (ONE_LAYER, "store", "layout='fetch'")):
        _, codec = codec_of("llama", settings, ratio=2.0, layout=layout)
        with pytest.raises(CodecError, match=message):
            CompressedHostTier.encode(codec, 0, keys, values)
