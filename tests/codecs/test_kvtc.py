"""The codec on caches of tiny models: what is exact, what is close, what is refused."""

import copy

import pytest
import torch
from transformers import DynamicCache

from verkv import make_cache
from verkv.codecs import (
    CodecError,
    KvtcConfig,
    MismatchError,
    Stages,
    reconstruction_error,
    relative_errors,
)
from verkv.codecs.calibration import CalibrationConfig, Calibrator, calibrate
from verkv.codecs.kvtc import KVTC
from verkv.codecs.quantiser import Run

pytestmark = pytest.mark.filterwarnings("ignore:residuals are larger")  # calibrated on very little text

KINDS = ["llama", "qwen2", "qwen3", "gemma3", "ministral3", "qwen3_5"]
N = 150


def relative_error(restored, cache, layers):
    """Largest relative Frobenius error over layers and sides."""
    found = []
    for i in layers:
        for name in ("keys", "values"):
            exact = getattr(cache.layers[i], name)
            found.append(float((getattr(restored.layers[i], name) - exact).norm() / exact.norm()))
    return max(found)


def key_error(restored, cache):
    """Relative Frobenius error of the first layer's keys."""
    exact = cache.layers[0].keys
    return float((restored.layers[0].keys - exact).norm() / exact.norm())


def next_logits(model, cache, n=6):
    ids = torch.randint(3, 256, (1, n), generator=torch.Generator().manual_seed(9))
    with torch.no_grad():
        return model(input_ids=ids, past_key_values=copy.deepcopy(cache)).logits


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layers_per_group", ["all", 1])
def test_sixteen_bits_are_exact_to_bf16_rounding(codec_of, prefill, kind, layers_per_group):
    settings = {"float32_basis": True, "layers_per_group": layers_per_group}
    model, codec = codec_of(kind, settings, ratio=1.0)
    _, cache = prefill(model, N)
    restored = codec.compress(cache).restore()
    for i in codec.layout.layers:
        for name in ("keys", "values"):
            exact = getattr(cache.layers[i], name)
            # One bf16 rounding of a value is up to 2**-9 of it. The error of a row is spread over its coordinates.
            error = (getattr(restored.layers[i], name) - exact).abs()
            assert float(error.max()) <= 2**-9 * float(exact.abs().max())
            assert float(error.norm()) <= 2**-9 / 3**0.5 * float(exact.norm())
    assert torch.allclose(next_logits(model, restored), next_logits(model, cache), atol=0.05)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", ["dynamic", "static"])
def test_more_bits_give_less_error_in_every_kind_of_model(codec_of, prefill, kind, mode):
    errors = []
    for ratio in (2.0, 4.0, 8.0):
        model, codec = codec_of(kind, None, ratio=ratio, mode=mode)
        _, cache = prefill(model, N)
        errors.append(relative_error(codec.compress(cache).restore(), cache, codec.layout.layers))
    assert errors[0] < 0.06 and errors[0] < errors[1] < errors[2] < 1.0, errors


@pytest.mark.parametrize("kind", ["gemma3", "qwen3_5"])
def test_layers_that_are_not_coded_come_back_bit_by_bit(codec_of, prefill, kind, tmp_path):
    model, codec = codec_of(kind, {"float32_basis": True}, ratio=1.0)
    _, cache = prefill(model, N)
    restored = codec.compress(cache).restore()
    for i, layer in enumerate(cache.layers):
        if i in codec.layout.layers:
            continue
        other = restored.layers[i]
        assert other.get_seq_length() == N
        if kind == "gemma3":
            assert torch.equal(other.keys, layer.keys) and torch.equal(other.values, layer.values)
        else:
            assert torch.equal(other.state.conv, layer.state.conv)
            assert torch.equal(other.state.recurrent, layer.state.recurrent)
    assert torch.allclose(next_logits(model, restored), next_logits(model, cache), atol=0.05)


@pytest.mark.parametrize("layout", ["store", "fetch"])
@pytest.mark.parametrize("mode", ["dynamic", "static"])
def test_sinks_window_and_outliers_are_bit_exact(codec_of, prefill, layout, mode):
    model, codec = codec_of("llama", None, ratio=8.0, layout=layout, mode=mode, outlier_factor=0.9)
    _, cache = prefill(model, N)
    compressed = codec.compress(cache)
    assert compressed.n_outliers == int(0.01 * (N - 20))
    expected = {*range(4), *range(N - 16, N)}
    assert expected < set(compressed.exact_index.tolist())
    assert len(compressed.exact_index) == 20 + compressed.n_outliers
    restored = compressed.restore()
    exact = compressed.exact_index
    for i, layer in enumerate(cache.layers):
        assert torch.equal(restored.layers[i].keys[:, :, exact], layer.keys[:, :, exact])
        assert torch.equal(restored.layers[i].values[:, :, exact], layer.values[:, :, exact])
        changed = restored.layers[i].keys[:, :, compressed.coded_index] != layer.keys[:, :, compressed.coded_index]
        assert bool(changed.any(-1).all())


def test_a_token_far_from_the_others_is_kept(codec_of, prefill):
    model, codec = codec_of("llama", None, ratio=4.0)
    _, cache = prefill(model, N)
    cache.layers[2].values[:, :, 77] *= 100.0
    compressed = codec.compress(cache)
    assert 77 in compressed.exact_index.tolist() and compressed.n_outliers == 1


def test_text_of_another_kind_is_reported(codec_of, prefill):
    model, codec = codec_of("llama", None, ratio=4.0)
    _, cache = prefill(model, N)
    for layer in cache.layers:
        layer.values.mul_(4.0)
    with pytest.warns(UserWarning, match="residuals are larger"):
        compressed = codec.compress(cache)
    assert compressed.residual_ratio()["v"] > 1.5 > compressed.residual_ratio()["k"]


def test_layouts_restore_identically(codec_of, prefill):
    for mode in ("dynamic", "static"):
        restored = []
        for layout in ("store", "fetch"):
            model, codec = codec_of("llama", None, ratio=4.0, layout=layout, mode=mode)
            _, cache = prefill(model, N)
            restored.append(codec.compress(cache).restore())
        for first, second in zip(restored[0].layers, restored[1].layers, strict=True):
            assert torch.equal(first.keys, second.keys) and torch.equal(first.values, second.values)


@pytest.mark.parametrize("layout", ["store", "fetch"])
@pytest.mark.parametrize("mode", ["dynamic", "static"])
def test_some_tokens_of_a_layer_are_those_of_the_whole(codec_of, prefill, layout, mode):
    model, codec = codec_of("llama", None, ratio=4.0, layout=layout, mode=mode)
    _, cache = prefill(model, N)
    compressed = codec.compress(cache)
    tokens = torch.tensor([149, 0, 70, 4, 131, 70, 133, 134])
    for layer in (0, 3):
        whole, part = compressed.decode_layer(layer), compressed.decode_layer(layer, tokens)
        for full, some in zip(whole, part, strict=True):
            # The same codes; matrix products of other shapes may round differently.
            torch.testing.assert_close(some, full[:, tokens], rtol=1e-5, atol=1e-5)
    rows = torch.tensor([3, 100, 64])
    for side in ("k", "v"):
        assert torch.equal(compressed.coordinates(0, side, rows), compressed.coordinates(0, side)[rows])
    with pytest.raises(ValueError, match="tokens"):
        compressed.decode_layer(0, torch.tensor([N]))


def test_chosen_layers_alone_are_restored(codec_of, prefill):
    model, codec = codec_of("llama", {"layers_per_group": 2}, ratio=4.0)
    _, cache = prefill(model, N)
    compressed = codec.compress(cache)
    whole, part = compressed.restore(), compressed.restore(layers=[2])
    assert torch.equal(part.layers[2].keys, whole.layers[2].keys)
    assert [layer.get_seq_length() for layer in part.layers] == [0, 0, N, 0]
    assert [layer for layer, _, _ in compressed.iter_layers()] == [0, 1, 2, 3]


@pytest.mark.parametrize("ratio", [1.0, 2.0, 7.3, 16.0])
@pytest.mark.parametrize("mode", ["dynamic", "static"])
def test_bits_written_are_bits_planned_and_within_the_budget(codec_of, prefill, ratio, mode):
    model, codec = codec_of("llama", None, ratio=ratio, mode=mode, lossless="none")
    _, cache = prefill(model, N)
    compressed = codec.compress(cache)
    bits = codec.bits_per_token("k") + codec.bits_per_token("v")
    assert 8 * compressed.sizes()["coded_rows"] == len(compressed.coded_index) * bits
    for (_, _), side in codec.sides.items():
        assert side.coder.bits <= 16 * side.width / ratio == side.budget_bits
    assert compressed.ratios()["nominal_ratio"] >= ratio


def test_reported_ratios_are_bytes_on_disk(codec_of, prefill, tmp_path):
    model, codec = codec_of("llama", None, ratio=4.0)
    _, cache = prefill(model, N)
    compressed = codec.compress(cache)
    n_bytes = compressed.save(tmp_path / "context")
    ratios, full = compressed.ratios(), N * 4 * 2 * 2 * 16 * 2  # layers, K and V, heads, channels, bytes at 16 bit
    assert n_bytes == (tmp_path / "context").stat().st_size == compressed.sizes()["file"]
    assert ratios["stored_ratio"] == pytest.approx(full / n_bytes)
    row, coded = full / N, compressed.sizes()["coded_rows"]
    assert ratios["paper_ratio"] == pytest.approx((N - 16) * row / (coded + 4 * row))


def test_keys_and_values_can_have_their_own_ratio(codec_of, prefill):
    model, codec = codec_of("llama", None, k_ratio=2.0, v_ratio=8.0)
    assert codec.bits_per_token("k") > 3 * codec.bits_per_token("v")
    _, cache = prefill(model, N)
    errors = relative_errors(reconstruction_error(codec, cache))
    assert errors["k_error"] < 0.2 * errors["v_error"]


def test_measured_error_is_that_of_restored_rows(codec_of, prefill):
    model, codec = codec_of("qwen3", None, ratio=4.0, sinks=4, window=0, outlier_fraction=0.0)
    _, cache = prefill(model, N)
    restored = codec.compress(cache).restore()
    errors = relative_errors(reconstruction_error(codec, cache))
    for side, name in (("k", "keys"), ("v", "values")):
        exact = torch.cat([getattr(layer, name)[:, :, 4:] for layer in cache.layers])
        found = torch.cat([getattr(layer, name)[:, :, 4:] for layer in restored.layers])
        assert errors[f"{side}_error"] == pytest.approx(float((found - exact).norm() / exact.norm()), rel=1e-3)


def test_keys_are_turned_back_at_their_own_positions(codec_of, prefill):
    model, codec = codec_of("llama", None, ratio=2.0, window=0)
    ids, near = prefill(model, 60)
    positions = torch.arange(1000, 1060)
    far = make_cache(model.config)
    with torch.no_grad():
        model(input_ids=ids, position_ids=positions[None], past_key_values=far)
    # Attention is relative, so the same text gives the same keys wherever it stands, once RoPE is undone.
    tokens = torch.arange(4, 60)
    projected = lambda cache, at: codec.sides[0, "k"].project(codec.states_reader(cache, "k", at, tokens))[0]  # noqa: E731
    expected = projected(near, torch.arange(60))
    assert float((projected(far, positions) - expected).norm() / expected.norm()) < 1e-3
    for off in (torch.arange(60), positions + 1):
        assert float((projected(far, off) - expected).norm() / expected.norm()) > 0.1
    right = codec.compress(far, positions)
    shifted = codec.compress(far, positions)
    shifted.positions = shifted.positions + 1
    assert key_error(shifted.restore(), far) > 10 * key_error(right.restore(), far)


def test_appending_leaves_what_was_coded_and_codes_what_left_the_window(codec_of, prefill):
    model, codec = codec_of("llama", None, ratio=4.0, outlier_factor=0.9)
    ids, cache = prefill(model, N)
    more = torch.randint(3, 256, (1, 40))
    compressed = codec.compress(cache, token_ids=ids)
    longer = copy.deepcopy(cache)
    with torch.no_grad():
        model(input_ids=more, past_key_values=longer)
    all_ids = torch.cat([ids, more], 1)
    appended = codec.append(compressed, longer, token_ids=all_ids)
    assert appended.n_tokens == N + 40
    assert appended.blocks[: len(compressed.blocks)] == compressed.blocks
    for key in compressed.sections:
        if key.kind == 4:
            assert appended.sections.stored(key) is compressed.sections.stored(key)
    kept = set(compressed.exact_index[compressed.exact_index < N - 16].tolist())
    assert kept <= set(appended.exact_index.tolist()) and set(range(N + 24, N + 40)) <= set(
        appended.exact_index.tolist()
    )
    before, after = compressed.restore(), appended.restore()
    old = compressed.coded_index
    for i in range(4):
        torch.testing.assert_close(
            after.layers[i].keys[:, :, old], before.layers[i].keys[:, :, old], rtol=1e-5, atol=1e-5
        )
    assert relative_error(after, longer, range(4)) < 0.2
    assert appended.is_prefix_of(all_ids[0]) and compressed.is_prefix_of(all_ids[0])
    assert not appended.is_prefix_of(all_ids[0].roll(1)) and not appended.is_prefix_of(ids[0])
    # Once more, from the restored cache, as between turns.
    again = codec.append(appended, after, token_ids=all_ids)
    assert again.blocks == appended.blocks and torch.equal(again.exact_index, appended.exact_index)


def test_appending_to_another_context_is_refused(codec_of, prefill):
    model, codec = codec_of("llama", None, ratio=4.0)
    ids, cache = prefill(model, N)
    _, other = prefill(model, N, seed=6)
    compressed = codec.compress(cache, token_ids=ids)
    _, short = prefill(model, N - 1)
    cases = [(other, {}), (short, {}), (cache, {"token_ids": ids.roll(1)}), (cache, {"positions": torch.arange(N) + 1})]
    for given, arguments in cases:
        with pytest.raises(MismatchError):
            codec.append(compressed, given, **arguments)
    _, other_codec = codec_of("llama", None, ratio=8.0)
    with pytest.raises(MismatchError, match="another calibration or configuration"):
        other_codec.append(compressed, cache)


@pytest.mark.parametrize("n_tokens", [1, 4, 5, 20])
def test_short_contexts_are_kept_whole(codec_of, prefill, n_tokens, tmp_path):
    model, codec = codec_of("llama", None, ratio=16.0)
    _, cache = prefill(model, n_tokens)
    compressed = codec.compress(cache)
    assert len(compressed.exact_index) == n_tokens and compressed.blocks == []
    assert relative_error(compressed.restore(), cache, range(4)) == 0.0
    with torch.no_grad():
        grown = copy.deepcopy(cache)
        model(input_ids=torch.full((1, 30), 7), past_key_values=grown)
    assert codec.append(compressed, grown).n_tokens == n_tokens + 30


def test_plain_caches_and_bfloat16_work(codec_of, prefill):
    model, codec = codec_of("llama", {"float32_basis": True}, ratio=1.0)
    _, cache = prefill(model, N)
    plain = DynamicCache()
    for i, layer in enumerate(cache.layers):
        plain.update(layer.keys.bfloat16(), layer.values.bfloat16(), i)
    restored = codec.compress(plain).restore()
    for name in ("keys", "values"):
        exact = torch.cat([getattr(layer, name) for layer in plain.layers])  # (L, H, T, d)
        found = torch.cat([getattr(layer, name) for layer in restored.layers])
        assert found.dtype == torch.bfloat16
        # Coordinates are off by 2**-11 of a row's norm at most, together; numbers are then rounded to a neighbour.
        row_norm = exact.float().square().sum((0, 1, 3), keepdim=True).sqrt()
        allowed = 2**-11 * row_norm + 2**-8 * exact.float().abs()
        assert bool(((found.float() - exact.float()).abs() <= allowed).all())


def test_caches_that_cannot_be_coded_are_refused(codec_of, prefill):
    model, codec = codec_of("llama", None, ratio=4.0)
    with pytest.raises(CodecError, match="no tokens"):
        codec.compress(make_cache(model.config))
    batch = make_cache(model.config)
    with torch.no_grad():
        model(input_ids=torch.ones(2, 30, dtype=torch.long), past_key_values=batch)
    with pytest.raises(MismatchError, match="2 sequences"):
        codec.compress(batch)
    _, cache = prefill(model, 60)
    cache.layers[1].keys[0, 0, 30, 0] = torch.nan
    with pytest.raises(CodecError, match="NaN"):
        codec.compress(cache)


@pytest.mark.parametrize(
    ("positions", "message"),
    [
        (torch.arange(60).expand(3, 60), "Multimodal"),
        (torch.arange(3 * 60).view(3, 1, 60), "Multimodal"),
        (torch.arange(59), "59"),
        (torch.arange(60.0), "integers"),
        (torch.arange(60) - 1, "from 0"),
    ],
)
def test_positions_that_make_no_sense_are_refused(codec_of, prefill, positions, message):
    model, codec = codec_of("llama", None, ratio=4.0)
    _, cache = prefill(model, 60)
    with pytest.raises(MismatchError, match=message):
        codec.compress(cache, positions)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
        {
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "factor": 2.0,
            "short_factor": [1.0] * 8,
            "long_factor": [2.0] * 8,
            "original_max_position_embeddings": 64,
        },
    ],
    ids=["dynamic", "longrope"],
)
def test_rope_that_depends_on_the_length_is_refused(tiny_model, calibrated, rope):
    model = tiny_model("llama", rope_parameters=rope)
    with pytest.raises(NotImplementedError, match="depend on the length"):
        Calibrator(model.config)
    _, artefact = calibrated("llama")
    with pytest.raises(NotImplementedError, match="depend on the length"):
        KVTC(artefact, model)


def test_another_model_is_refused(tiny_model, calibrated):
    model, artefact = calibrated("llama")
    for other in (tiny_model("llama", seed=1), tiny_model("qwen2"), tiny_model("llama", num_hidden_layers=3)):
        with pytest.raises(MismatchError, match="calibrate this model"):
            KVTC(artefact, other)
    KVTC(artefact, copy.deepcopy(model).bfloat16())  # the same model in another type
    KVTC(artefact, model.config)


def test_a_ratio_that_the_calibration_does_not_serve_is_refused(calibrated):
    model, artefact = calibrated("llama", min_ratio=8.0)
    with pytest.raises(MismatchError, match="min_ratio"):
        KVTC(artefact, model, KvtcConfig(ratio=4.0))
    with pytest.raises(ValueError, match="leaves no bits"):
        KVTC(artefact, model, KvtcConfig(ratio=10_000.0))


@pytest.mark.parametrize(
    "wrong",
    [
        {"ratio": 0.5},
        {"ratio": "16"},
        {"k_ratio": 0},
        {"sinks": -1},
        {"window": 1.5},
        {"mode": "both"},
        {"layout": "rows"},
        {"lossless": "lzma"},
        {"layout": "fetch", "lossless": "deflate"},
        {"block_tokens": 0},
        {"outlier_factor": 0},
        {"outlier_fraction": 2},
    ],
    ids=str,
)
def test_wrong_options_are_refused_by_name(wrong):
    with pytest.raises(ValueError, match=list(wrong)[-1]):
        KvtcConfig(**wrong)


def test_stages_say_where_the_time_goes(codec_of, prefill):
    model, codec = codec_of("llama", None, ratio=4.0)
    _, cache = prefill(model, N)
    stages = Stages()
    codec.compress(cache, stages=stages).restore(stages=stages)
    expected = {"project", "quantise", "pack", "deflate", "inflate", "unpack", "dequantise", "reconstruct", "rotate"}
    assert expected <= set(stages) and min(stages.values()) >= 0.0


def test_fewer_calibration_rows_than_features_work(tiny_model, prefill, tmp_path):
    model = tiny_model("llama")
    texts = [torch.randint(3, 256, (40,)) for _ in range(2)]
    artefact = calibrate(model, texts, tmp_path / "few.safetensors", CalibrationConfig(min_ratio=2.0))
    _, cache = prefill(model, N)
    codec = KVTC(artefact, model, KvtcConfig(ratio=2.0, window=16))
    assert relative_error(codec.compress(cache).restore(), cache, range(4)) < 0.9


def test_wide_rows_use_power_iteration_with_nearly_the_same_error(calibrated, tiny_model, prefill, tmp_path):
    model = tiny_model("llama")
    texts = [torch.randint(3, 256, (250,), generator=torch.Generator().manual_seed(1)) for _ in range(3)]
    _, cache = prefill(model, N)
    errors = []
    for exact_features in (8192, 16):
        settings = CalibrationConfig(min_ratio=4.0, rank=64, exact_features=exact_features)
        artefact = calibrate(model, texts, tmp_path / f"{exact_features}.safetensors", settings)
        errors.append(relative_errors(reconstruction_error(KVTC(artefact, model, KvtcConfig(ratio=8.0)), cache)))
    for name in ("k_centred_error", "v_centred_error"):
        assert errors[1][name] == pytest.approx(errors[0][name], rel=0.05)


def test_too_little_text_is_refused(tiny_model, tmp_path):
    for texts in ([], [torch.arange(3, 7)], [torch.arange(3, 10)]):
        with pytest.raises(ValueError, match="too few"):
            calibrate(tiny_model("llama"), texts, tmp_path / "x.safetensors")
    assert not list(tmp_path.iterdir())


def test_runs_know_what_they_cost():
    assert Run(0, 64, 3).cost("dynamic") == 64 * 3 + 32
    assert Run(0, 64, 3).cost("static") == 64 * 3
    assert Run(0, 64, 16).cost("dynamic") == 64 * 16
