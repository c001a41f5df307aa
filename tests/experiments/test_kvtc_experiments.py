"""Experiments of kvtc: the methods it is compared with on hand-made cases, resuming, and tiny runs from end to end."""

import argparse
import dataclasses
import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import DynamicCache

EXPERIMENTS = Path(__file__).resolve().parents[2] / "experiments"
sys.path.append(str(EXPERIMENTS))  # scripts import each other

pytest.importorskip("kvpress", reason="the scripts run presses")
pytest.importorskip("scipy", reason="the tables need it")

import kvtc_ablation_tables  # noqa: E402
import kvtc_ablations  # noqa: E402
import kvtc_baselines as baselines  # noqa: E402
import kvtc_common  # noqa: E402
import kvtc_fits  # noqa: E402
import kvtc_lossless  # noqa: E402
import kvtc_quality  # noqa: E402
from paper_items import paper_table  # noqa: E402

from verkv.codecs import Artefact, CalibrationConfig, KvtcConfig, calibrate  # noqa: E402
from verkv.rotary import rotary_from_config  # noqa: E402

N_CONTEXT = 160


def random_cache(n_layers: int = 4, n_tokens: int = 96, seed: int = 0) -> DynamicCache:
    """Keys and values of 2 heads of 16 channels."""
    generator = torch.Generator().manual_seed(seed)
    return DynamicCache([tuple(torch.randn(2, 1, 2, n_tokens, 16, generator=generator)) for _ in range(n_layers)])


def relative_error(exact: torch.Tensor, restored: torch.Tensor) -> float:
    """Frobenius."""
    return float((restored - exact).norm() / exact.norm())


@pytest.fixture(scope="module")
def setting(tiny_model, tmp_path_factory):
    """A tiny calibrated model; its tokenizer only writes numbers."""
    model = tiny_model("llama")
    generator = torch.Generator().manual_seed(1)
    texts = [torch.randint(3, 256, (250,), generator=generator) for _ in range(4)]
    path = tmp_path_factory.mktemp("calibration") / "all.safetensors"
    calibrate(model, texts, path, CalibrationConfig(min_ratio=2.0))
    tokenizer = SimpleNamespace(decode=lambda tokens, **options: " ".join(map(str, tokens)))
    return kvtc_common.Setting(model, tokenizer, Artefact(path))


def random_ids(n_tokens: int, seed: int) -> torch.Tensor:
    """Token ids (n_tokens,)."""
    return torch.randint(3, 256, (n_tokens,), generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def texts(monkeypatch):
    """Random texts instead of prose."""

    def made(tokenizer, n_texts):
        return [random_ids(N_CONTEXT + kvtc_common.N_SCORED + 1, seed) for seed in range(n_texts)]

    for module in (kvtc_ablations, kvtc_fits, kvtc_lossless):
        monkeypatch.setattr(module, "test_texts", made)
    monkeypatch.setattr(
        kvtc_fits, "calibration_sequences", lambda tokenizer, n: [random_ids(n // 2, 50 + i) for i in (0, 1)]
    )
    return made


# --- methods of comparison --------------------------------------------------------------------------------------------


def test_groups_of_integers_by_hand():
    states = torch.tensor([[0.0, 1.0, 2.0, 3.0], [-1.0, -1.0, 5.0, 0.9]])
    restored, n_bytes = baselines.quantise_groups(states, bits=2, group=4)
    assert restored.tolist() == [[0.0, 1.0, 2.0, 3.0], [-1.0, -1.0, 5.0, 1.0]]  # steps of 1 and of 2
    assert n_bytes == 2 * (4 * 2 // 8) + 2 * 2 * 2


def test_a_constant_group_is_exact():
    restored, _ = baselines.quantise_groups(torch.full((3, 8), 2.5), bits=2, group=8)
    assert torch.equal(restored, torch.full((3, 8), 2.5))


def test_kivi_codes_keys_by_channel_and_values_by_token_and_keeps_the_window():
    cache = random_cache(n_layers=1, n_tokens=100)
    layer = cache.layers[0]
    layer.keys[..., 3] *= 1000  # an outlier channel spoils groups along channels only
    layer.values[:, :, 7] *= 1000  # an outlier token spoils groups along tokens only
    stored = baselines.kivi(cache, bits=4, group=16, residual=20)
    restored = stored.cache.layers[0]
    assert relative_error(layer.keys[..., 4:], restored.keys[..., 4:]) < 0.1
    assert relative_error(layer.values[:, :, 8:], restored.values[:, :, 8:]) < 0.1
    assert torch.equal(restored.keys[:, :, 80:], layer.keys[:, :, 80:])
    assert torch.equal(restored.values[:, :, 80:], layer.values[:, :, 80:])
    assert not torch.equal(restored.keys[:, :, :80], layer.keys[:, :, :80])
    n_coded, n_exact, n_groups = 80 * 32, 20 * 32, 80 * 32 // 16
    assert stored.n_bytes == 2 * (n_coded // 2 + 4 * n_groups + 2 * n_exact)


def test_fp8_keeps_powers_of_two_and_is_within_its_rounding():
    exact = torch.tensor([[448.0, 224.0, 1.75, -0.5]])
    restored, n_bytes = baselines.fp8_states(exact)  # scale 1
    assert torch.equal(restored, exact)
    assert n_bytes == 4 + 2
    states = torch.randn(5, 64) * torch.logspace(-3, 3, 5)[:, None]
    restored, _ = baselines.fp8_states(states)
    large = states.abs() > states.abs().amax(1, keepdim=True) / 1000
    assert float(((restored - states) / states)[large].abs().max()) <= 1 / 16 + 1e-3  # half a step of 3 bits
    assert torch.equal(baselines.fp8_states(torch.zeros(2, 4))[0], torch.zeros(2, 4))


def test_decomposition_is_exact_at_full_rank_and_best_below(tiny_model):
    rotary = rotary_from_config(tiny_model("llama").config)
    cache = random_cache()
    full = baselines.cross_layer_svd(cache, rotary, layers_per_group=2, k_share=1.0, v_share=1.0)
    for layer, other in zip(cache.layers, full.cache.layers, strict=True):
        torch.testing.assert_close(other.keys, layer.keys, atol=1e-4, rtol=0)
        torch.testing.assert_close(other.values, layer.values, atol=1e-4, rtol=0)
    rows = torch.randn(40, 12, dtype=torch.float64)
    restored, n_bytes = baselines.low_rank(rows, 5)
    left = torch.linalg.svdvals(rows)[5:].square().sum().sqrt()
    assert float((rows - restored).norm()) == pytest.approx(float(left), rel=1e-6)
    assert n_bytes == 2 * 5 * (40 + 12)


def test_decomposition_joins_layers(tiny_model):
    """Two layers with the same values need no more rank than one."""
    rotary, cache = rotary_from_config(tiny_model("llama").config), random_cache(n_layers=2)
    cache.layers[1].values = cache.layers[0].values.clone()
    joint = baselines.cross_layer_svd(cache, rotary, layers_per_group=2, k_share=0.5, v_share=0.5)
    alone = baselines.cross_layer_svd(cache, rotary, layers_per_group=1, k_share=0.5, v_share=0.5)
    assert relative_error(cache.layers[1].values, joint.cache.layers[1].values) < 1e-4
    assert relative_error(cache.layers[1].values, alone.cache.layers[1].values) > 0.1


def test_eviction_keeps_the_best_of_every_head_in_their_order():
    cache = random_cache(n_layers=1, n_tokens=8)
    score = torch.tensor([[[9.0, 0, 8, 0, 0, 0, 0, 0], [0, 0, 0, 1, 0, 0, 0, 2]]])
    stored = baselines.evict(cache, [score], ratio=4)
    exact, kept = cache.layers[0], stored.cache.layers[0]
    assert torch.equal(kept.keys[0, 0], exact.keys[0, 0, [0, 2]])
    assert torch.equal(kept.values[0, 1], exact.values[0, 1, [3, 7]])
    assert baselines.full_bytes(cache) == 4 * stored.n_bytes


def test_scores_are_those_of_the_presses_own_prefill(setting):
    ids = random_ids(48, 3)[None]
    cache, scores = baselines.prefill_scored(setting.model, ids)
    assert setting.model.config._attn_implementation == "sdpa"
    evicted = baselines.evict(cache, scores["tova"], ratio=4).cache
    pruned = DynamicCache()
    with torch.no_grad(), baselines.TOVAPress(compression_ratio=0.75)(setting.model):
        setting.model.model(input_ids=ids, past_key_values=pruned)
    for layer, other in zip(pruned.layers, evicted.layers, strict=True):
        torch.testing.assert_close(layer.keys.sort(2).values, other.keys.sort(2).values, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("backend", ["quanto", "hqq"])
def test_transformers_cache_counts_what_it_keeps(backend):
    try:
        baselines.quantised_layer(backend, 4)
    except ImportError as error:
        pytest.skip(str(error))
    cache = DynamicCache([tuple(torch.randn(2, 1, 2, 33, 64)) for _ in range(2)])
    stored = baselines.transformers_quantised(cache, backend, 4)
    assert relative_error(cache.layers[1].keys, stored.cache.layers[1].keys) < 0.15
    n_exact = 1 if backend == "hqq" else 0  # 33 tokens do not fill hqq's bytes
    n_groups = 2 * 2 * 2 * (33 - n_exact)
    assert stored.n_bytes == n_groups * (64 // 2 + 4) + 2 * 2 * 2 * 2 * 64 * n_exact


# --- lines ------------------------------------------------------------------------------------------------------------


def test_lines_are_kept_and_half_a_line_is_cut_off(tmp_path):
    path = tmp_path / "lines.jsonl"
    lines = kvtc_common.Lines(path, {"version": 1})
    lines.add({"a": 1, "b": [2]})
    path.write_text(path.read_text() + '{"a": 2, "b"')
    lines = kvtc_common.Lines(path)
    assert lines.lines == [{"a": 1, "b": [2], "version": 1}]
    lines.add({"a": 3})
    assert [json.loads(line)["a"] for line in path.read_text().splitlines()] == [1, 3]
    assert lines.has(a=3)
    assert not lines.has(a=1, version=2)


def test_comparison_by_hand():
    exact = torch.tensor([[0.5, 0.5], [0.9, 0.1]]).log()
    found = torch.tensor([[0.75, 0.25], [0.1, 0.9]]).log()
    result = kvtc_common.compare(exact, found, torch.tensor([0, 1]))
    kl = (0.5 * math.log(2) + 0.5 * math.log(2 / 3) + 0.9 * math.log(9) + 0.1 * math.log(1 / 9)) / 2
    assert result["kl"] == pytest.approx(kl, rel=1e-5)
    assert result["dnll"] == pytest.approx((math.log(2 / 3) - math.log(9)) / 2, rel=1e-5)
    assert result["same_top1"] == 0.5


def test_intervals_by_hand():
    assert kvtc_common.interval([1.0, 2.0, 3.0]) == "2 ± 2.5"  # 4.303 / sqrt(3)
    assert kvtc_common.interval([1.0, 3.0]) == "2"
    lines = [{"dnll": 0.1, "dnll_variance": 0.0009}, {"dnll": 0.2, "dnll_variance": 0.0016}]
    assert kvtc_common.dnll_cell(lines) == "+0.150 ± 0.025"


# --- tiny runs --------------------------------------------------------------------------------------------------------


def quality_case(index: int) -> kvtc_quality.Case:
    """A question on random tokens."""
    ids = random_ids(N_CONTEXT + 6, 10 + index)[None]
    return kvtc_quality.Case("vt", index, ids[:, :N_CONTEXT], ids[:, N_CONTEXT:], None, ("1", "7"), 12)


def test_quality_runs_resumes_and_prints(setting, tmp_path, monkeypatch):
    monkeypatch.setattr(kvtc_quality, "RATIOS", (2, 8))
    methods = kvtc_quality.make_methods(setting)
    methods.pop("hqq_4", None), methods.pop("hqq_2", None)  # slow
    methods.pop("quanto_4", None), methods.pop("quanto_2", None)  # compiles when it is first used
    lines = kvtc_common.Lines(tmp_path / "quality.jsonl")
    kvtc_quality.run(setting, [quality_case(0)], {name: methods[name] for name in ("none", "fp8")}, lines)
    kvtc_quality.run(setting, [quality_case(0), quality_case(1)], methods, lines)
    keys = [(line["example"], line["method"]) for line in lines.lines]
    assert len(set(keys)) == len(keys) == 2 * len(methods)
    before = len(lines.lines)
    kvtc_quality.run(setting, [quality_case(0), quality_case(1)], methods, kvtc_common.Lines(lines.path))
    assert len(lines.path.read_text().splitlines()) == before
    exact = lines.find(method="none")
    assert all(line["kl"] == 0 and line["same_top1"] == 1 and line["stored_ratio"] == 1 for line in exact)
    kl = {name: kvtc_common.mean_of(lines.find(method=name), "kl") for name in methods}
    assert 0 < kl["kvtc_2"] < kl["kvtc_8"]
    lines.add(exact[0] | {"example": 2})  # not every method has answered it
    table = kvtc_quality.tables(lines)
    assert "Examples: vt 2." in table
    assert "| fp8 | 1.78 |" in table  # 16 bytes of codes and 2 of a scale for every 32
    assert "99.8" in table  # the paper's


def test_an_answer_is_decoded_on_from_where_it_differs(setting):
    case = quality_case(0)
    cache, _ = baselines.prefill_scored(setting.model, case.context_ids)
    tokens = kvtc_quality.continue_greedily(setting.model, kvtc_common.fork(cache), case.question_ids, N_CONTEXT, 12)
    other = baselines.evict(
        cache, [torch.rand(1, 2, N_CONTEXT, generator=torch.Generator().manual_seed(0))] * 4, 8
    ).cache
    whole = kvtc_quality.continue_greedily(setting.model, kvtc_common.fork(other), case.question_ids, N_CONTEXT, 12)
    assert whole != tokens
    targets = torch.tensor(tokens)
    found = kvtc_quality.forced(setting.model, kvtc_common.fork(other), case.question_ids, targets, N_CONTEXT)
    line = kvtc_quality.scored(setting, case, other, N_CONTEXT, found, targets)
    assert line["prediction"] == " ".join(map(str, whole))


def test_ablations_run_resume_and_print(setting, texts, tmp_path, monkeypatch):
    monkeypatch.setattr(kvtc_ablations, "points", lambda name: FEWER.get(name, []))  # a row here is 128 numbers wide
    monkeypatch.setattr(kvtc_lossless, "contexts", lambda setting, n: {"pydoc": texts(None, n)})
    options = argparse.Namespace(artefact=tmp_path / "all.safetensors", calibration_tokens=800, n_texts=2)
    options.fit_tokens, options.latency = [800], Path(__file__)  # there: nothing is timed
    lines = kvtc_common.Lines(tmp_path / "ablations.jsonl")
    names = [name for name in kvtc_ablations.EXPERIMENTS if name != "table5"]
    kvtc_ablations.run(setting, ["table6"], options, lines)
    n_first = len(lines.lines)
    kvtc_ablations.run(setting, names, options, lines)
    n_all = len(lines.lines)
    kvtc_ablations.run(setting, names, options, kvtc_common.Lines(lines.path))
    assert 0 < n_first < n_all == len(lines.path.read_text().splitlines())
    points = [json.dumps({key: line[key] for key in ("text", *POINT)}) for line in lines.find(kind="point")]
    assert len(set(points)) == len(points)
    stored = {line["codec"]: line["stored_bytes"] for line in lines.find(kind="lossless", layout="store", number=0)}
    assert all(stored[name] <= stored["none"] for name in stored)
    text = kvtc_ablation_tables.render(names, lines, kvtc_common.Lines(tmp_path / "none.jsonl"))
    assert all(f"### {name}" in text for name in names)
    assert "| 16x | 4 |" in text


def test_points_can_be_coded_and_are_shared(setting):
    wanted = {name: kvtc_ablations.points(name) for name in kvtc_ablations.EXPERIMENTS}
    for point in (point for found in wanted.values() for point in found):
        KvtcConfig(ratio=point.k_ratio, v_ratio=point.v_ratio, sinks=point.sinks, window=point.window)
    assert set(wanted["table12"]) & set(wanted["table14"]) and set(wanted["table14"]) & set(wanted["table15"])
    assert {point.layers for point in wanted["table15"]} == {1, 2, 5, 10, "all"}
    paper = paper_table("kvtc_table14")
    for row in paper:
        assert Point.at(row["ratio"], window=row["window"], plan=row["plan"]) in wanted["table14"]


Point = kvtc_ablations.Point
FEWER = {
    "figure2": [Point.at(8), Point.at(16)],
    "table6": [Point.at(16, sinks=0), Point.at(16, sinks=0, outliers=True), Point.at(16)],
    "table15": [Point.at(8, window=16, layers=layers, plan=p) for layers in (2, "all") for p in ("pca", "dp")],
}
POINT = [field.name for field in dataclasses.fields(kvtc_ablations.Point)]


def test_plain_axes_keep_what_the_ratio_allows(setting):
    artefact, config = setting.artefact, setting.model.config
    codec = kvtc_ablations.make_codec(artefact, config, kvtc_ablations.Point.at(8, plan="pca"))
    width = artefact.layout.groups[0].width("k")
    assert codec.bits_per_token("k") == 16 * width // 8
    assert kvtc_ablations.kept_share(codec, "k") == 1 / 8


# --- the paper's figures ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["figure2", "figure6", *(f"table{n}" for n in (2, 5, 6, 7, 12, 13, 14, 15))])
def test_data_of_the_paper_names_its_table(name):
    first = (EXPERIMENTS / "paper" / f"kvtc_{name}.csv").read_text().splitlines()[0]
    assert first.startswith("# Source: ") and "2511.01815v1" in first
    assert f"{'Figure' if name[0] == 'f' else 'Table'} {name.lstrip('figuretabl')}" in first
    rows = paper_table(f"kvtc_{name}")
    assert rows and all(None not in row for row in rows)  # no cell too many
