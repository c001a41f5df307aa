"""A press with a coded host tier: rows, sketch, bounds and fetched rows are all those of the restored cache."""

import copy
import math

import pytest
import torch
from press_helpers import full_layers, random_ids
from segment_helpers import EXACT, SHORT, TOLERANCE, forward, kvzip
from torch.testing import assert_close
from transformers import DynamicCache

from verkv import PoissonCompPress, VerKVPress, make_cache, prefill
from verkv.codecs import CodecError, HostCodec, KvtcConfig, load_context, save_context
from verkv.codecs.host_tier import CompressedHostTier
from verkv.codecs.kvtc import KVTC
from verkv.estimators.compiled_plan import compiles

pytestmark = pytest.mark.filterwarnings("ignore:residuals are larger")

ONE_LAYER = {"layers_per_group": 1, "float32_basis": True}
N = 90


@pytest.fixture
def case(codec_of):
    """Model and a coarse host codec of it."""
    model, codec = codec_of("llama", ONE_LAYER, ratio=4.0, mode="static", layout="fetch", window=8)
    return model, HostCodec(codec)


def sealed(model, press, ids, cache=None):
    cache = make_cache(model.config) if cache is None else cache
    with press(model):
        logits = forward(model, ids, cache)
    return cache, logits


def restored_dense(model, cache) -> DynamicCache:
    """A dense cache of what the coded host tier holds, and the tail."""
    dense = DynamicCache()
    for i in full_layers(cache):
        layer = cache.layers[i]
        states = [
            (t.clone() for t in (host, tail))
            for host, tail in zip(
                (layer.context.host.keys, layer.context.host.values), (layer.tail_keys, layer.tail_values), strict=True
            )
        ]
        dense.update(*(torch.cat(list(pair), 2) for pair in states), i)
    return dense


def test_everything_fetched_is_dense_attention_over_the_restored_cache(case):
    model, codec = case
    ids = random_ids(1, N + 20)
    press = VerKVPress(kvzip(), 0.4, host_codec=codec, audit=True, **EXACT)
    cache, _ = sealed(model, press, ids[:, :N])
    dense = restored_dense(model, cache)
    untouched, _ = sealed(model, VerKVPress(kvzip(), 0.4, **EXACT), ids[:, :N])
    more = ids[:, N:]
    logits = forward(model, more, cache)
    assert_close(logits, forward(model, more, dense), **TOLERANCE)
    assert press.stats.relative_errors().max() < 1e-4  # of the restored cache
    assert (logits - forward(model, more, untouched)).abs().max() > 1e-3  # which is another than the model's own


def test_resident_rows_and_host_agree_and_memory_is_what_is_held(case):
    model, codec = case
    press = VerKVPress(kvzip(), 0.4, host_codec=codec, **SHORT)
    cache, _ = sealed(model, press, random_ids(2, N))
    for i in full_layers(cache):
        context = cache.layers[i].context
        assert isinstance(context.host, CompressedHostTier) and context.host.is_coded
        units, positions = (context.codes & 0x80).nonzero(as_tuple=True)
        assert_close(context.rows.keys, context.host.read_keys(units, positions, context.device), rtol=1e-5, atol=1e-5)
        assert_close(
            context.rows.values, context.host.read_values(units, positions, context.device), rtol=1e-5, atol=1e-5
        )
    host = cache.memory_report().host
    held = sum(cache.layers[i].context.host.nbytes(side) for i in full_layers(cache) for side in "kv")
    assert host["host_keys"] + host["host_values"] == held < 0.6 * press.stats.full_bytes
    (note,) = [note for note in press.stats.notes if "host tier is coded" in note]
    errors = [cache.layers[i].context.host.tier_error["key_error"] for i in full_layers(cache)]
    assert f"keys {sum(errors) / len(errors):.3f}" in note and sum(errors) > 0.01


def test_violations_are_of_the_restored_cache(case):
    model, codec = case
    press = VerKVPress(kvzip(), 0.4, host_codec=codec, audit=True, epsilon=0.2, **SHORT)
    ids = random_ids(1, N + 30)
    cache, _ = sealed(model, press, ids[:, :N])
    for n in range(N, N + 30):
        forward(model, ids[:, n : n + 1], cache)
    assert press.stats.decisions() > 0 and press.stats.violation_rate() <= press.delta
    assert press.stats.bytes_read() > 0


@pytest.mark.parametrize("options", [{"compression_ratio": 0.4}, {"budget_tokens": 40}])
def test_it_grows_by_segments_and_goes_back(case, options):
    model, codec = case
    ids = random_ids(1, 200)
    press = VerKVPress(kvzip(), host_codec=codec, max_tail=math.inf, **options, **EXACT)
    cache = prefill(model, ids[:, :120], chunk_size=60, press=press)
    with press(model):
        forward(model, ids[:, 120:150], cache)
        cache.reseal()
    assert [part.is_coded for part in cache.layers[0].context.host.parts] == [True] * 3
    dense = restored_dense(model, cache)
    twin = copy.deepcopy(cache)
    assert_close(forward(model, ids[:, 150:160], cache), forward(model, ids[:, 150:160], dense), **TOLERANCE)
    twin.crop(130)
    shorter = restored_dense(model, twin)
    assert_close(forward(model, ids[:, 130:140], twin), forward(model, ids[:, 130:140], shorter), **TOLERANCE)


def test_positions_of_later_segments_are_the_models(case):
    """RoPE is undone at the right positions: a segment is coded as well as the same tokens of a whole context."""
    model, codec = case
    ids = random_ids(1, 160)
    press = VerKVPress(kvzip(), 0.4, host_codec=codec, max_tail=math.inf, **SHORT)
    cache = prefill(model, ids, chunk_size=80, press=press)
    exact = DynamicCache()
    forward(model, ids, exact)
    for i in full_layers(cache):
        n_first, part = cache.layers[i].context.segments[0].n_tokens, cache.layers[i].context.host.parts[1]
        n_tokens = cache.layers[i].context.n_tokens
        states = exact.layers[i].keys[:, :, n_first:n_tokens]
        wrong = CompressedHostTier.encode(codec.codec, i, states, exact.layers[i].values[:, :, n_first:n_tokens])
        assert part.tier_error["key_error"] < wrong.tier_error["key_error"]


def test_saved_and_loaded_it_answers_alike(case, tmp_path, each_way):
    """Bit by bit, but where loops serve the loaded context: they do not serve coded hosts, and round otherwise."""
    model, codec = case
    ids = random_ids(1, N + 10)
    press = VerKVPress(kvzip(), 0.4, host_codec=codec, **SHORT)
    cache, _ = sealed(model, press, ids[:, :N])
    save_context(tmp_path / "context.kvtc", cache, model, press=press)
    loaded = load_context(tmp_path / "context.kvtc", model)
    answers = [forward(model, ids[:, N:], each) for each in (loaded, cache)]
    assert_close(*answers, atol=1e-4 if compiles() else 0.0, rtol=0.0)
    assert not loaded.layers[0].context.host.is_coded


def test_rows_of_a_batch_are_padded_selected_and_repeated(case):
    model, codec = case
    ids, mask = random_ids(2, N), torch.ones(2, N, dtype=torch.int64)
    mask[1, :7] = 0
    press = VerKVPress(kvzip(), 0.4, host_codec=codec, **EXACT)
    cache = make_cache(model.config)
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    with press(model):
        forward(model, ids, cache, attention_mask=mask, position_ids=positions)
    host = cache.layers[0].context.host
    cache.batch_select_indices(torch.tensor([1, 0]))
    assert torch.equal(cache.layers[0].context.host.keys, host.keys.flip(0))


def test_what_does_not_fit_is_refused(case, codec_of):
    model, codec = case
    with pytest.raises(ValueError, match=r"got KVTC: wrap a codec as HostCodec"):
        VerKVPress(kvzip(), 0.4, host_codec=codec.codec)
    with pytest.raises(CodecError, match="layers_per_group=1"):
        HostCodec(codec_of("llama", ratio=2.0, layout="fetch")[1])
    with pytest.raises(CodecError, match="layout='fetch'"):
        HostCodec(codec_of("llama", ONE_LAYER, ratio=2.0)[1])
    with pytest.raises(TypeError, match="host_codec"):
        PoissonCompPress(kvzip(), 0.4, host_codec=codec)  # it keeps no host copy
    bad = KVTC(codec.codec.artefact, model, KvtcConfig(ratio=4.0, layout="fetch", sinks=4, window=8))
    assert HostCodec(bad).codec is bad


def test_a_failure_in_the_middle_of_sealing_leaves_no_half_sealed_cache(case, monkeypatch):
    model, codec = case
    press, cache, seal = VerKVPress(kvzip(), 0.4, host_codec=codec, **SHORT), make_cache(model.config), None
    from verkv.cache import VerKVLayer

    seal = VerKVLayer.seal

    def fails(layer, plan, stats):
        if layer is cache.layers[2]:
            raise MemoryError("no more")
        seal(layer, plan, stats)

    monkeypatch.setattr(VerKVLayer, "seal", fails)
    with pytest.raises(MemoryError):
        sealed(model, press, random_ids(1, N), cache)
    assert cache.get_seq_length() == 0  # restored keys are not the model's: rather nothing than those
