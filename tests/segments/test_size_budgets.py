"""Budgets by size: kept to in expectation while a context grows, whatever is drawn, and what is refused."""

import copy
import math

import pytest
import torch
from kvpress import KnormPress
from press_helpers import full_layers, inclusion_probs, random_ids
from segment_helpers import EXACT, TOLERANCE, forward, kvzip
from torch.testing import assert_close

from verkv import FastKVzipPress, KVzipPress, PoissonCompPress, VerKVPress, make_cache, prefill
from verkv.codecs import load_context, save_context
from verkv.estimators.thinning import PROTECTED
from verkv.presses.budget import BudgetTooSmall, LayerGeometry
from verkv.presses.size_budget import SizeBudget
from verkv.sketches import RopePairSketch

SMALL = {"n_sink": 4, "n_local": 4, "max_tail": math.inf, "outliers": 0.0}
TURNS = (40, *[30] * 19)


def options(kind: str) -> dict:
    return SMALL if kind == "verkv" else {name: value for name, value in SMALL.items() if name != "outliers"}


SCOPES = ("head", "layer", "model")


def grown(model, press, ids, lengths, each=lambda cache: None):
    """A cache that was resealed after every turn."""
    cache, n = make_cache(model.config), 0
    with press(model):
        for turn, length in enumerate(lengths):
            forward(model, ids[:, n : n + length], cache)
            n += length
            if turn:
                cache.reseal()
            each(cache)
    return cache


def sum_of_probs(cache) -> torch.Tensor:
    """Of every KV head, (L, N), from the bytes on the device alone."""
    contexts = [cache.layers[i].context for i in full_layers(cache)]
    return torch.stack([(inclusion_probs(c.codes).double() * (c.codes != 0)).sum(-1) for c in contexts])


# --- twenty turns -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scope", SCOPES)
def test_twenty_turns_keep_to_a_budget_of_tokens(tiny_model, scope):
    model, ids = tiny_model("llama"), random_ids(1, sum(TURNS))
    press = VerKVPress(KnormPress(), budget_tokens=24, budget_scope=scope, sketch="rope_pair", **SMALL)
    reports = []

    def check(cache):
        sums, report = sum_of_probs(cache), press.budget_report()
        per_budget = {"head": sums, "layer": sums.mean(-1), "model": sums.mean()}[scope]
        assert (per_budget <= 24 + 1e-9).all() and (per_budget > 24 - 0.6).all()
        assert report.expected == pytest.approx(float(sums.mean()))
        assert abs(report.realised - report.expected) < 3 * report.standard_deviation
        assert 0 <= report.headroom < 0.6 and report.budget == 24
        reports.append(report)

    cache = grown(model, press, ids, TURNS, check)
    assert cache.stats.n_segments == 20 and len(reports) == 20
    assert len({report.realised for report in reports}) > 10  # it is drawn


@pytest.mark.parametrize("scope", SCOPES)
def test_twenty_turns_keep_to_a_budget_of_bytes(tiny_model, scope):
    model, ids, budget = tiny_model("llama"), random_ids(1, sum(TURNS)), 80_000
    press = VerKVPress(KnormPress(), budget_bytes=budget, budget_scope=scope, sketch="rope_pair", **SMALL)
    hosts, times = [], []

    def check(cache):
        report, memory = press.budget_report(), cache.memory_report()
        assert report.realised == sum(memory.device.values())
        n_tokens = cache.layers[0].context.n_tokens
        fits = bool((sum_of_probs(cache) == n_tokens).all())
        assert fits == (n_tokens < 90) and report.expected <= budget
        assert fits or report.headroom < 100
        assert abs(report.realised - report.expected) <= 3 * report.standard_deviation
        hosts.append(memory.host["host_keys"] + memory.host["host_values"])
        times.append(cache.layers[0].context.n_tokens)

    grown(model, press, ids, TURNS, check)
    row = 4 * 2 * 2 * 16 * 4  # layers, keys and values, KV heads, channels, bytes
    assert hosts == [n * row for n in times]
    assert times[-1] == sum(TURNS) - 4


def test_early_turns_are_exact_while_everything_fits(tiny_model):
    model, ids = tiny_model("llama"), random_ids(1, 300)
    with torch.no_grad():
        dense = model(ids).logits
    press, cache = VerKVPress(KnormPress(), budget_tokens=120, audit=True, **SMALL), make_cache(model.config)
    with press(model):
        for start in range(0, 100, 50):
            logits = forward(model, ids[:, start : start + 50], cache)
            if start:
                cache.reseal()
        assert sum_of_probs(cache).tolist() == [[96.0, 96.0]] * 4  # 4 are the window
        logits = forward(model, ids[:, 100:150], cache)
        assert_close(logits, dense[:, 100:150], **TOLERANCE)
        assert press.budget_report().standard_deviation == 0.0 and press.budget_report().headroom == 24
        cache.reseal()
    assert press.budget_report().standard_deviation > 0.0


def test_ten_turns_are_dense_where_all_that_was_thinned_is_fetched(tiny_model):
    model, ids = tiny_model("llama"), random_ids(1, 300)
    with torch.no_grad():
        dense = model(ids).logits
    press, cache, logits = (
        VerKVPress(kvzip(), budget_tokens=40, **EXACT, max_tail=math.inf),
        make_cache(model.config),
        [],
    )
    with press(model):
        for start in range(0, 300, 30):
            logits.append(forward(model, ids[:, start : start + 30], cache))
            if start:
                cache.reseal()
    assert press.budget_report().standard_deviation > 1.0
    assert_close(torch.cat(logits, 1), dense, **TOLERANCE)


def test_chunks_of_a_prompt_share_the_budget(tiny_model):
    model, ids = tiny_model("llama"), random_ids(2, 400)
    press = VerKVPress(KnormPress(), budget_tokens=30, sketch="rope_pair", n_sink=4, n_local=4)
    cache = prefill(model, ids, chunk_size=100, press=press)
    sums = sum_of_probs(cache)
    assert (sums <= 30 + 1e-9).all() and (sums > 29.4).all()
    assert press.budget_report(cache).headroom >= 0
    assert press.budget_report(cache).budget == 30  # each sequence's


# --- independence of the draw -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["poissoncomp", "verkv"])
def test_probabilities_do_not_depend_on_what_was_drawn(tiny_model, kind):
    """Keys do, through the model; so the same tokens are scored by hand, and only the seeds differ."""
    model, ids, found = tiny_model("llama"), random_ids(1, 200), []
    generator = torch.Generator().manual_seed(9)
    scores = {i: torch.rand(1, 2, 200, generator=generator) ** 4 for i in range(4)}
    for seed in range(4):
        options = {"budget_tokens": 30, "seed": seed, "n_sink": 4, "n_local": 4, "max_tail": math.inf}
        press = (PoissonCompPress if kind == "poissoncomp" else VerKVPress)(KnormPress(), **options)
        cache = make_cache(model.config)
        with press(model):
            for start in range(0, 200, 50):
                forward(model, ids[:, start : start + 50], cache)
                if start:
                    n_sealed = cache.layers[0].context.n_tokens
                    known = {i: score[:, :, n_sealed : start + 50] for i, score in scores.items()}
                    cache.reseal(scores=known)
        found.append(cache)
    counts = [[segment.counts for segment in cache.layers[2].context.segments] for cache in found]
    for other in counts[1:]:
        for ours, first in zip(other[1:], counts[0][1:], strict=True):  # the first was scored by the press
            assert torch.equal(ours, first)
    sizes = {len(cache.layers[2].context.rows.codes) for cache in found}
    assert len(sizes) > 1


def test_rows_that_scored_best_are_the_last_to_go(tiny_model):
    """Ten tokens with a score far above all others keep r = 1 while the rest is thinned."""
    model, ids = tiny_model("llama"), random_ids(1, 400)
    press, cache = VerKVPress(KnormPress(), budget_tokens=40, alpha=0.0, **SMALL), make_cache(model.config)
    with press(model):
        forward(model, ids[:, :40], cache)
        for start in range(40, 400, 60):
            forward(model, ids[:, start : start + 60], cache)
            n_sealed, n_tail = cache.layers[0].context.n_tokens, cache.layers[0].tail_keys.shape[2]
            scores = torch.full((1, 2, n_tail), 1e-3)
            if start == 40:
                scores[..., 10:20] = 1.0
                best = slice(n_sealed + 10, n_sealed + 20)
            cache.reseal(scores=dict.fromkeys(range(4), scores))
    for layer in cache.layers:
        r = inclusion_probs(layer.context.codes)
        assert (r[:, best] == 1.0).all()
        assert (r[:, best.stop :] < 0.5).all()
    surplus = cache.layers[0].context.rows.surplus
    assert (surplus == PROTECTED).sum() == 2 * 4  # sinks


# --- branches and the way back ----------------------------------------------------------------------------------------


def test_a_branch_and_the_way_back_see_no_thinning_of_the_other(tiny_model):
    model, ids = tiny_model("llama"), random_ids(1, 200)
    press = VerKVPress(KnormPress(), budget_tokens=20, **SMALL)
    cache = grown(model, press, ids, (60, 40))
    before, expected = copy.deepcopy(cache), sum_of_probs(cache)
    context = copy.copy(cache.layers[0].context)
    with press(model):
        forward(model, ids[:, 100:150], cache)
        cache.reseal()
    assert torch.equal(sum_of_probs(before), expected)
    assert torch.equal(context.codes, before.layers[0].context.codes)
    cache.crop(100)
    assert cache.get_seq_length() == 100
    assert (sum_of_probs(cache) < expected).all()  # thinned stays thinned: it must not be drawn again
    assert press.budget_report(cache).headroom > 4
    with press(model):
        forward(model, ids[:, 100:150], cache)
        n_tail = cache.layers[0].tail_keys.shape[2]  # some of whose hidden states were sealed and forgotten
        cache.reseal(scores={i: torch.rand(1, 2, n_tail) for i in range(4)})
    assert (sum_of_probs(cache) <= 20 + 1e-9).all() and (sum_of_probs(cache) > 19.4).all()


@pytest.mark.parametrize("kind", ["poissoncomp", "verkv"])
def test_a_saved_context_goes_on_thinning(tiny_model, kind, tmp_path):
    model, ids = tiny_model("llama"), random_ids(1, 200)
    press = (PoissonCompPress if kind == "poissoncomp" else VerKVPress)(KnormPress(), budget_tokens=20, **options(kind))
    cache = grown(model, press, ids, (60, 40))
    save_context(tmp_path / "context.kvtc", cache, model, press=press)
    loaded = load_context(tmp_path / "context.kvtc", model)
    assert str(press.budget_report(loaded)) == str(press.budget_report(cache))
    for each in (cache, loaded):
        forward(model, ids[:, 100:150], each)
        n_tail = each.layers[0].tail_keys.shape[2]
        press.reseal(model, each, scores={i: torch.full((1, 2, n_tail), 0.1 + i) for i in range(4)})
        assert 19.4 < press.budget_report(each).expected <= 20 + 1e-9
        counts = torch.stack([segment.counts.sum(0) for segment in each.layers[1].context.segments])
        assert counts.sum() == 2 * 146 and counts[:, 255].tolist() == [8, 0, 0]


# --- bad input --------------------------------------------------------------------------------------------------------


def test_options_that_exclude_each_other():
    with pytest.raises(ValueError, match="exclude each other"):
        PoissonCompPress(KnormPress(), 0.5, budget_tokens=10)
    with pytest.raises(ValueError, match="also of the press inside"):
        PoissonCompPress(KVzipPress(compression_ratio=0.5), budget_bytes=10)
    with pytest.raises(ValueError, match="leave one out"):
        VerKVPress(KnormPress(), budget_tokens=10, budget_bytes=1000)
    for name in ("budget_tokens", "budget_bytes"):
        for value in (0, -3, 2.5, "many", True):
            with pytest.raises(ValueError, match=name):
                VerKVPress(KnormPress(), **{name: value})
    with pytest.raises(TypeError, match="budget_tokens"):
        FastKVzipPress(budget_tokens=10)  # eviction is by ratio


@pytest.mark.parametrize("name,value", [("budget_tokens", 3), ("budget_bytes", 2000)])
def test_a_budget_that_is_too_small_from_the_start(tiny_model, name, value):
    model, ids = tiny_model("llama"), random_ids(1, 60)
    press, cache = VerKVPress(KnormPress(), **{name: value}, **SMALL), make_cache(model.config)
    message = f"{name}={value} is too small for a context of 56 tokens.*use {name} >="
    with pytest.raises(BudgetTooSmall, match=message), press(model):
        forward(model, ids, cache)
    assert cache.get_seq_length() == 60 and not any(layer.sealed for layer in cache.layers)
    with torch.no_grad():
        assert_close(
            forward(model, ids[:, :1], cache), model(torch.cat([ids, ids[:, :1]], 1)).logits[:, -1:], **TOLERANCE
        )


def test_a_budget_that_is_exceeded_later_leaves_everything_as_it_was(tiny_model):
    """A sketch and a byte for every token grow; in the end they alone are more than the budget."""
    model, ids = tiny_model("llama"), random_ids(1, 3000)
    press = VerKVPress(KnormPress(), budget_bytes=50_000, sketch="rope_pair", **SMALL)
    cache = make_cache(model.config)
    with press(model):
        forward(model, ids[:, :500], cache)
        state = None
        with pytest.raises(BudgetTooSmall, match="sketches") as raised:
            for start in range(500, 3000, 250):
                forward(model, ids[:, start : start + 250], cache)
                drawn, sums = cache.resealer.generator.get_state(), sum_of_probs(cache)
                state = [vars(layer.context).copy() for layer in cache.layers]
                length, tails = cache.get_seq_length(), [layer.tail_keys for layer in cache.layers]
                cache.reseal()
    assert torch.equal(cache.resealer.generator.get_state(), drawn) and torch.equal(sum_of_probs(cache), sums)
    for layer, context, tail in zip(cache.layers, state, tails, strict=True):
        assert layer.tail_keys is tail and all(vars(layer.context)[name] is value for name, value in context.items())
    assert cache.get_seq_length() == length
    press.budget_bytes = int(str(raised.value).split("budget_bytes >= ")[1].split(",")[0])
    with pytest.raises(BudgetTooSmall):
        press.budget_bytes -= 10
        cache.reseal()
    press.budget_bytes += 10
    cache.reseal()
    assert press.budget_report(cache).headroom < 0.05 * press.budget_bytes


def test_failure_in_the_middle_of_thinning_brings_all_layers_back(tiny_model, monkeypatch):
    model, ids = tiny_model("llama"), random_ids(1, 200)
    press = VerKVPress(KnormPress(), budget_tokens=20, **SMALL)
    cache = grown(model, press, ids, (60, 40))
    with press(model):
        forward(model, ids[:, 100:150], cache)
    sums, length, seal = sum_of_probs(cache), cache.get_seq_length(), type(cache.layers[0]).seal

    def fails(layer, plan, stats):
        if layer is cache.layers[2]:
            raise MemoryError("no more")
        seal(layer, plan, stats)

    monkeypatch.setattr(type(cache.layers[0]), "seal", fails)
    with pytest.raises(MemoryError):
        cache.reseal()
    assert torch.equal(sum_of_probs(cache), sums) and cache.get_seq_length() == length
    monkeypatch.undo()
    cache.reseal()
    assert cache.stats.n_segments == 3


def test_kinds_of_budget_cannot_be_mixed(tiny_model):
    model, ids = tiny_model("llama"), random_ids(1, 150)
    by_size, by_ratio = VerKVPress(KnormPress(), budget_tokens=20, **SMALL), VerKVPress(KnormPress(), 0.5, **SMALL)
    for first, second, message in ((by_size, by_ratio, "by size: go on"), (by_ratio, by_size, "compression_ratio, so")):
        cache = grown(model, first, ids, (60, 40))
        before = sum_of_probs(cache)
        with first(model):
            forward(model, ids[:, 100:150], cache)
        with pytest.raises(ValueError, match=message):
            second.reseal(model, cache)
        assert torch.equal(sum_of_probs(cache), before)
    with pytest.raises(ValueError, match="budget_report needs"):
        by_ratio.budget_report(cache)
    with pytest.raises(ValueError, match="budget_report needs"):
        VerKVPress(KnormPress(), budget_tokens=20).budget_report()


def test_the_smallest_budget_named_is_the_smallest_that_works():
    geometry, lengths = LayerGeometry(2, 64, 64, 2), torch.tensor([[300, 200], [400, 300]])
    args = torch.tensor([10, 10]), geometry, 6, RopePairSketch(), 1
    with pytest.raises(BudgetTooSmall) as raised:
        SizeBudget(None, 10_000).rows(lengths, *args)
    least = int(str(raised.value).split("budget_bytes >= ")[1].split(",")[0])
    assert float(SizeBudget(None, least).rows(lengths, *args)[1]) == pytest.approx(10, abs=0.1)
    with pytest.raises(BudgetTooSmall):
        SizeBudget(None, least - 2).rows(lengths, *args)
    assert SizeBudget(1000, None).rows(lengths, *args).tolist() == [500.0, 700.0]  # no more than there are
