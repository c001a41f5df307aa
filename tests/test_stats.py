"""Statistics against counts by hand, and the memory report against a walk over all live tensors."""

import copy
import dataclasses
import json
import math

import pytest
import torch
from sealing import certain_codes, forward, full_layers, prompt_ids, sampled_codes, seal
from torch import Tensor
from transformers import DynamicCache

import verkv
from verkv.cache import make_cache
from verkv.context import SealedContext, SealPlan
from verkv.kvfetch import FetchConfig
from verkv.sketches import ExactSketch, RopePairSketch
from verkv.stats import FetchStats, LayerRecord, MemoryReport, memory_report
from verkv.tiers import HostTier

pytestmark = pytest.mark.usefixtures("each_way")

N_CONTEXT, N_TOTAL = 60, 66


# --- a small example, counted by hand ---------------------------------------------------------------------------------


@pytest.fixture
def example():
    """Two layers, one KV head, two query heads, six tokens: token 0 certain, the others at r = 0.5, 4 and 5 resident.

    Key i is the i-th unit vector, so a query of 40 e_i attends to token i alone. That token has to be exact whenever
    0 < i: it is fetched where i is 1, 2 or 3, and promoted without a fetch where it is 4 or 5.
    """
    keys = torch.eye(6, 8)[None, None]
    codes = torch.tensor([[[0x80, 8, 8, 8, 0x88, 0x88]]], dtype=torch.uint8)
    stats = FetchStats(
        "test", epsilon=0.1, delta=0.1, sketch="exact", sealed_layers=(3, 7), full_bytes=2 * 384, record_bounds=True
    )
    plan = SealPlan(codes, torch.zeros(1, dtype=torch.int64), fetch=FetchConfig(0.1), sketch=ExactSketch(), audit=True)
    layers = [SealedContext(keys, keys.clone(), plan, i, stats) for i in (3, 7)]

    def attend(*targets):
        """One pass; for each layer the tokens that the two query heads look at, one list per query token."""
        for layer, target in zip(layers, targets, strict=True):
            query = 40 * torch.eye(6, 8)[torch.tensor(target)].transpose(0, 1)[None]  # (1, 2, Tq, 8)
            tail = torch.zeros(1, 1, len(target), 8)
            layer.attend(query, tail, tail, None, 1.0)

    attend([(2, 4), (2, 3)], [(0, 0), (5, 5)])  # question of two tokens: tokens 2 and 3 are fetched, then none
    attend([(1, 2)], [(4, 1)])  # decoding: tokens 1 and 2, then 1
    attend([(0, 4)], [(0, 0)])  # decoding: nothing
    return stats


ROW = 2 * 8 * 4  # bytes of a key and a value


def test_counts_by_phase(example):
    assert example.n_passes == 3
    assert [example.decisions(p) for p in ("all", "question", "decode")] == [16, 8, 8]
    assert [example.promoted(p) for p in ("all", "question", "decode")] == [11, 6, 5]
    assert [example.fetched(p) for p in ("all", "question", "decode")] == [5, 2, 3]
    assert [example.bytes_read(p) for p in ("all", "question", "decode")] == [5 * ROW, 2 * ROW, 3 * ROW]
    assert [example.shortlisted(p) for p in ("all", "question", "decode")] == [0, 0, 0]
    assert [example.fetch_rate(p) for p in ("all", "question", "decode")] == [6 / 16, 3 / 8, 3 / 8]
    assert [example.kv_head_fetch_rate(p) for p in ("all", "question", "decode")] == [3 / 6, 1 / 2, 2 / 4]
    assert example.kv_read_per_forward == 5 * ROW / (3 * 768)
    assert example.kv_read_per_token == 3 * ROW / (2 * 768)


def test_records_of_single_heads(example):
    first, second = example.passes[0]
    assert (first.layer_idx, second.layer_idx) == (3, 7)
    assert first.decisions.tolist() == second.decisions.tolist() == [2, 2]
    assert first.fetching.tolist() == [2, 1]
    assert first.promoted.tolist() == [2, 2]
    assert second.fetching.tolist() == [0, 0]
    assert second.promoted.tolist() == [1, 1]
    assert (first.kv_fetching.tolist(), second.kv_fetching.tolist()) == ([1], [0])


def test_maps_by_head(example):
    maps = example.by_head()
    # fetching of layer 3: 2 + 1 + 0 and 1 + 1 + 0; of layer 7: 0 + 0 + 0 and 0 + 1 + 0; four decisions each
    assert maps["fetch_rate"].tolist() == [[3 / 4, 2 / 4], [0 / 4, 1 / 4]]
    assert maps["error_bound"].shape == (2, 2)
    layer, head = 0, 1
    bounds = [r.error_bound[0, head] for r in example.records() if r.layer_idx == 3]
    assert maps["error_bound"][layer, head] == torch.cat(bounds).mean()


def test_bounds_say_which_decisions_promote(example):
    bounds = example.bounds()
    assert len(bounds) == 16 and int((bounds >= 0.1).sum()) == 11


def test_violations_are_decisions_above_epsilon(example):
    errors = example.relative_errors()
    assert len(errors) == 16 and len(example.relative_errors("decode")) == 8
    assert errors.max() < 1e-5  # what matters has been fetched
    assert example.violation_rate() == 0.0
    example.passes[0][0].relative_error[0, 0, 0] = 0.5
    assert example.violation_rate() == 1 / 16
    assert example.violation_rate(phase="question") == 1 / 8
    assert example.violation_rate(epsilon=0.6) == 0.0
    assert example.violation_rate(epsilon=-1.0) == 1.0
    assert len(example.output_errors("question")) == 8


def test_summary_is_a_json_line_of_the_same_numbers(example):
    example.notes.append("a note")
    summary = json.loads(json.dumps(example.summary()))
    assert summary["method"] == "test" and summary["notes"] == ["a note"]
    assert (summary["forward_passes"], summary["sealed_layers"], summary["full_bytes"]) == (3, 2, 768)
    for phase in ("question", "decode"):
        for name in (
            "decisions",
            "fetch_rate",
            "kv_head_fetch_rate",
            "promoted",
            "fetched",
            "shortlisted",
            "bytes_read",
        ):
            assert summary[f"{phase}_{name}"] == getattr(example, name)(phase)
    assert summary["violation_rate"] == 0.0
    assert summary["kv_read_per_token"] == example.kv_read_per_token


def test_phase_must_be_known(example):
    with pytest.raises(ValueError, match=r"phase must be .* got 'prefill'"):
        example.fetch_rate("prefill")


def test_empty_statistics():
    stats = FetchStats("dense")
    assert (stats.n_passes, stats.decisions(), stats.fetch_rate(), stats.kv_head_fetch_rate()) == (0, 0, 0.0, 0.0)
    assert (stats.kv_read_per_forward, stats.kv_read_per_token) == (0.0, 0.0)
    assert "violation_rate" not in stats.summary()
    for ask, match in (
        (stats.bounds, "record_bounds"),
        (stats.relative_errors, "audit"),
        (stats.output_errors, "audit"),
    ):
        with pytest.raises(ValueError, match=match):
            ask()
    with pytest.raises(ValueError, match="epsilon must be given"):
        stats.violation_rate()


# --- passes -----------------------------------------------------------------------------------------------------------


def record(layer_idx):
    ones = torch.ones(2, dtype=torch.int64)
    return LayerRecord(layer_idx, 1, ones, ones, ones[:1], 1, ones, full_bytes=0)


def test_the_first_sealed_layer_opens_a_pass():
    stats = FetchStats("test", sealed_layers=(1, 4))
    for i in (1, 4, 1, 4):
        stats.record(record(i))
    assert [[r.layer_idx for r in p] for p in stats.passes] == [[1, 4]]
    assert stats.n_passes == 2 and stats.decisions() == stats.decisions("decode") == 8
    assert stats.by_head()["fetch_rate"].shape == (2, 2)


def test_statistics_of_a_long_generation_do_not_grow():
    stats = FetchStats("test", sealed_layers=(1, 4))
    for _ in range(1000):
        for i in (1, 4):
            stats.record(record(i))
    assert len(stats.passes) == 1 and len(stats.records()) == 4
    assert stats.n_passes == 1000 and stats.decisions() == 4000


def test_maps_need_a_pass():
    with pytest.raises(ValueError, match="no forward pass"):
        FetchStats("test", sealed_layers=(1, 4)).by_head()


def test_failed_passes_are_dropped():
    stats = FetchStats("test", sealed_layers=(1, 4))
    stats.record(record(1))
    stats.record(record(4))
    stats.drop_pass_until(1)  # failed before anything was recorded
    assert stats.n_passes == 1
    stats.record(record(1))
    stats.drop_pass_until(4)
    assert stats.n_passes == 1
    stats.record(record(1))  # cut short without anybody noticing
    stats.record(record(1))
    stats.record(record(4))
    assert [[r.layer_idx for r in p] for p in stats.passes] == [[1, 4]]
    assert stats.n_passes == 2 and stats.decisions() == stats.decisions("decode") == 8


@pytest.mark.parametrize("epsilon", [1e-3, 0.1, 1.0])
def test_rates_of_a_model_are_shares(tiny_model, epsilon):
    model, ids = tiny_model("llama"), prompt_ids(2, N_TOTAL)
    cache = make_cache(model.config)
    forward(model, ids[:, :N_CONTEXT], cache)
    sketch = RopePairSketch()
    stats = seal(
        model,
        cache,
        sampled_codes,
        fetch=FetchConfig(epsilon, shortlist=4),
        sketch=sketch,
        audit=True,
        record_bounds=True,
    )
    forward(model, ids[:, N_CONTEXT:-2], cache)
    forward(model, ids[:, -2:-1], cache)
    forward(model, ids[:, -1:], cache)
    for phase, n_queries in (("question", 4), ("decode", 2)):
        assert stats.decisions(phase) == 4 * 4 * 2 * n_queries  # layers, query heads, batch
        assert 0.0 <= stats.fetch_rate(phase) <= stats.kv_head_fetch_rate(phase) <= 1.0
        assert 0.0 <= stats.violation_rate(phase=phase) <= 1.0
        values, keys = stats.fetched(phase), stats.bytes_read(phase) // (4 * 16) - stats.fetched(phase)
        assert stats.bytes_read(phase) == 4 * 16 * (values + keys)
        assert max(values, stats.shortlisted(phase)) <= keys <= values + stats.shortlisted(phase)
    assert stats.full_bytes == 4 * 2 * (2 * 2 * N_CONTEXT * 16 * 4)
    assert stats.sealed_layers == (0, 1, 2, 3)
    n_promoting = int((stats.bounds() >= epsilon).sum())
    assert sum(int(r.fetching.sum()) for r in stats.records()) <= n_promoting <= stats.promoted()


# --- memory -----------------------------------------------------------------------------------------------------------


def live_tensors(root, into=None, seen=None):
    """All tensors that can be reached from an object, by id."""
    into, seen = {} if into is None else into, set() if seen is None else seen
    if id(root) in seen:
        return into
    seen.add(id(root))
    if isinstance(root, Tensor):
        into[id(root)] = root
    elif isinstance(root, dict):
        for value in root.values():
            live_tensors(value, into, seen)
    elif isinstance(root, (list, tuple, set)):
        for value in root:
            live_tensors(value, into, seen)
    elif hasattr(root, "__dict__") and not isinstance(root, (type, FetchStats)):
        live_tensors(vars(root), into, seen)
    return into


def objects_of(root, kind, seen=None):
    seen = set() if seen is None else seen
    if id(root) in seen or isinstance(root, Tensor):
        return []
    seen.add(id(root))
    children = list(vars(root).values()) if hasattr(root, "__dict__") and not isinstance(root, type) else []
    children += list(root) if isinstance(root, (list, tuple)) else []
    return [root] * isinstance(root, kind) + [x for child in children for x in objects_of(child, kind, seen)]


def assert_report_is_complete(cache):
    """Host: what host tiers hold. Uncharged: tails, padding, channel choices, remembered windows. Device: the rest."""
    report = memory_report(cache)
    everything = live_tensors(list(cache.layers))
    host = live_tensors(objects_of(list(cache.layers), HostTier))
    assert sum(report.host.values()) == sum(t.nbytes for t in host.values())
    on_device = {i: t for i, t in everything.items() if i not in host}
    charged, uncharged = sum(report.device.values()), sum(report.device_uncharged.values())
    assert charged + uncharged == sum(t.nbytes for t in on_device.values())

    expected = 0
    for layer in cache.layers:
        if getattr(layer, "sealed", False):
            kept = [layer.tail_keys, layer.tail_values, layer.context.n_padding]
            kept += [layer.context.sketch._channels] if isinstance(layer.context.sketch, RopePairSketch) else []
        else:
            now = [getattr(layer, "_keys", None), getattr(layer, "_values", None)]
            kept = [t for i, t in live_tensors({k: v for k, v in vars(layer).items() if k != "_siblings"}).items()]
            kept = [t for t in kept if not any(t is x for x in now)]
        expected += sum({id(t): t.nbytes for t in kept}.values())
    assert uncharged == expected
    return report


def evicting_codes(shape, seed=0):
    return sampled_codes(shape, seed) & 0x80


MEMORY = {
    "rope_pair": (sampled_codes, {"fetch": FetchConfig(0.1), "sketch": RopePairSketch()}),
    "exact": (sampled_codes, {"fetch": FetchConfig(0.1), "sketch": ExactSketch()}),
    "sample_only": (sampled_codes, {"keep_host": False}),
    "sample_audited": (sampled_codes, {"keep_host": False, "audit": True}),
    "eviction": (evicting_codes, {"keep_host": False}),
    "certain": (certain_codes, {}),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("cache_kind", ["dynamic", "dynamic_of_config", "make_cache"])
@pytest.mark.parametrize("config", MEMORY)
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_report_counts_all_live_tensors(tiny_model, kind, config, cache_kind, dtype):
    model, ids = tiny_model(kind).to(dtype), prompt_ids(2, N_TOTAL)
    cache = {
        "dynamic": DynamicCache,
        "dynamic_of_config": lambda: DynamicCache(config=model.config),
        "make_cache": lambda: make_cache(model.config),
    }[cache_kind]()
    forward(model, ids[:, :N_CONTEXT], cache)
    make_codes, options = MEMORY[config]
    stats = seal(model, cache, make_codes, **options)
    report = assert_report_is_complete(cache)
    assert ("host_keys" in report.host) == (config not in ("sample_only", "eviction"))
    size = dtype.itemsize
    full = [2 * 2 * 2 * N_CONTEXT * 16 * size for _ in full_layers(model)]
    assert stats.full_bytes == sum(full)
    if kind == "llama":
        assert report.full_bytes == sum(full)
        assert report.resident_share == sum(report.device.values()) / sum(full)
        n_rows = sum(len(layer.context.rows.codes) for layer in cache.layers)
        assert report.device["row_keys"] == report.device["row_values"] == n_rows * 16 * size
    if report.host:
        assert report.host["host_keys"] == report.host["host_values"] == sum(full) // 2

    forward(model, ids[:, N_CONTEXT:-1], cache)
    forward(model, ids[:, -1:], cache)
    later = assert_report_is_complete(cache)
    n_new = (N_TOTAL - N_CONTEXT) * 2 * 2 * 2 * 16 * size
    assert later.device_uncharged["tail"] == n_new * len(full)
    for name in report.device.keys() - {"unsealed"}:
        assert later.device[name] == report.device[name]
    assert_report_is_complete(copy.deepcopy(cache))
    cache.batch_select_indices(torch.tensor([1]))
    assert_report_is_complete(cache)


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_report_of_caches_that_are_not_sealed(tiny_model, kind):
    model, ids = tiny_model(kind), prompt_ids(1, N_TOTAL)
    for cache in (DynamicCache(), DynamicCache(config=model.config), make_cache(model.config)):
        assert sum(memory_report(cache).device.values()) == 0
        forward(model, ids, cache)
        report = memory_report(cache)
        tensors = [t for layer in cache.layers for t in (layer.keys, layer.values)]
        assert report.device == {"unsealed": sum(t.nbytes for t in tensors)}
        assert report.full_bytes == report.device["unsealed"] and report.resident_share == 1.0


def test_report_of_a_cache_is_the_function(tiny_model):
    cache = make_cache(tiny_model("llama").config)
    assert cache.memory_report() == verkv.memory_report(cache)


def test_report_prints_every_part():
    report = MemoryReport({"row_keys": 3000}, {"tail": 5}, {"host_keys": 7}, full_bytes=12_000)
    text = str(report)
    assert "25.00 %" in text and "12,000" in text
    for part, size in (("row_keys", "3,000"), ("tail", "5"), ("host_keys", "7")):
        assert part in text and size in text


def test_statistics_are_plain_data():
    assert {f.name for f in dataclasses.fields(FetchStats)} >= {
        "method",
        "epsilon",
        "delta",
        "sketch",
        "passes",
        "notes",
    }
    assert math.isclose(FetchStats("x", full_bytes=10).kv_read_per_forward, 0.0)
