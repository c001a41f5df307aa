"""Calibrated tolerances: which queries calibrate, what is found, what it covers, and when there are too few."""

import pytest
import torch
from kvpress import KnormPress
from press_helpers import SHORT, decode, left_padded, prefill, random_ids
from scipy.stats import binomtest
from sealing import sampled_codes
from transformers import DynamicCache

from verkv import RopePairSketch, VerKVPress, record_queries
from verkv.context import SealedContext, SealPlan
from verkv.kvfetch import FetchConfig
from verkv.presses.tolerance import EXACT, N_CALIBRATION, ToleranceCalibration, split_queries
from verkv.replay import DecodeReplay
from verkv.stats import FetchStats


def tolerances(cache):
    """Of all layers, (layers, C, Hq)."""
    return torch.stack([layer.context.tolerances for layer in cache.layers])


# --- which queries ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_queries", [1, 7, 40, 128])
def test_no_query_both_fits_and_calibrates(n_queries):
    numbered = torch.arange(n_queries).view(1, 1, -1, 1)
    fits, calibrates = (t.flatten().tolist() for t in split_queries(numbered))
    assert sorted(fits + calibrates) == list(range(n_queries))
    expected = range(n_queries - 1, max(-1, n_queries - 1 - 2 * N_CALIBRATION), -2)
    assert calibrates == sorted(expected)


@torch.no_grad()
def test_recorded_queries_are_the_last_ones_that_attention_saw(tiny_model):
    model, ids = tiny_model("llama"), random_ids(2, 50)
    with record_queries(model, 10) as last:
        model.model(ids)
    with record_queries(model, 50) as every:
        model.model(ids)
    assert sorted(last) == [0, 1, 2, 3]
    for i, queries in last.items():
        assert queries.shape == (2, 4, 10, 16) and torch.equal(queries, every[i][:, :, -10:])
    # The logits of attention, from queries and cached keys.
    cache = prefill(model, ids)
    module, states = (
        model.model.layers[0].self_attn,
        model.model.layers[0].input_layernorm(model.model.embed_tokens(ids)),
    )
    q = module.q_proj(states).view(2, 50, 4, 16).transpose(1, 2)
    assert torch.allclose(every[0][:, :, 0], q[:, :, 0] * module.scaling, atol=1e-5)  # position 0 is not rotated
    assert cache.layers[0].keys.shape[2] == 50


# --- what is found ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["denominator", "output"])
@pytest.mark.parametrize("scope", ["head", "layer", "model"])
@torch.no_grad()
def test_heads_of_a_scope_share_a_tolerance(tiny_model, scope, target):
    model, ids = tiny_model("llama"), random_ids(2, 200)
    press = VerKVPress(KnormPress(), 0.6, epsilon=0.1, calibrate=scope, target=target, **SHORT)
    cache = prefill(model, ids, press)
    found = tolerances(cache)
    assert found.shape == (4, 2, 4) and not any("not calibrated" in note for note in press.stats.notes)
    calibration = ToleranceCalibration(0.1, 0.1, target, scope, 8)
    grid = [EXACT, *calibration.tolerances.tolist()]
    assert all(min(abs(t - g) for g in grid) < 1e-6 for t in found.flatten().tolist())
    grouped = found.unflatten(2, (2, 2))  # heads that share a union share a tolerance, whatever the scope
    assert torch.equal(grouped[..., 0], grouped[..., 1])
    spread = {"head": found, "layer": found.amax(2) - found.amin(2), "model": found.amax((0, 2)) - found.amin((0, 2))}
    assert scope == "head" or not spread[scope].any()
    assert torch.isfinite(decode(model, ids[:, :1], cache)).all()


def test_a_calibrated_press_keeps_the_output_unless_told_otherwise():
    assert VerKVPress(KnormPress(), 0.5)._target() == "denominator"
    assert VerKVPress(KnormPress(), 0.5, calibrate="layer")._target() == "output"
    assert VerKVPress(KnormPress(), 0.5, calibrate="layer", target="denominator")._target() == "denominator"
    assert VerKVPress(KnormPress(), 0.5, paper=True)._target() == "denominator"


@torch.no_grad()
def test_calibrated_decode_steps_use_their_heads_tolerance(tiny_model):
    """The tolerance of a head decides what it promotes: at a huge one nothing, at a tiny one everything it may."""
    model, ids = tiny_model("llama"), random_ids(1, 200)
    press = VerKVPress(KnormPress(), 0.6, epsilon=0.1, calibrate="layer", **SHORT)
    cache = prefill(model, ids, press)
    for layer in cache.layers:
        layer.context.tolerances = torch.tensor([[1e6, EXACT, 1e6, EXACT]])
    decode(model, ids[:, :1], cache)
    for record in press.stats.records():
        assert record.promoted[0] == record.promoted[2] == 0 and min(record.promoted[1], record.promoted[3]) > 50


@torch.no_grad()
def test_beams_and_selected_rows_keep_their_tolerances(tiny_model):
    model, ids = tiny_model("llama"), random_ids(2, 200)
    press = VerKVPress(KnormPress(), 0.6, epsilon=0.1, calibrate="head", **SHORT)
    cache = prefill(model, ids, press)
    before = tolerances(cache)
    cache.batch_repeat_interleave(2)
    assert torch.isfinite(decode(model, ids[:1, :1].expand(4, 1), cache)).all()
    cache.reorder_cache(torch.tensor([2, 0, 1, 3]))
    assert torch.equal(tolerances(cache), before[:, [1, 0, 0, 1]])
    assert torch.isfinite(decode(model, ids[:1, :1].expand(4, 1), cache)).all()


# --- too few queries --------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_a_short_prompt_keeps_the_uncalibrated_bound(tiny_model):
    press = VerKVPress(KnormPress(), 0.5, delta=0.05, calibrate="layer", **SHORT)
    cache = prefill(tiny_model("llama"), random_ids(1, 40), press)
    assert all(layer.context.tolerances is None for layer in cache.layers)
    assert any("delta=0.05 needs 19 queries" in note and "uncalibrated" in note for note in press.stats.notes)


@torch.no_grad()
def test_sealing_without_queries_keeps_the_uncalibrated_bound(tiny_model):
    model, ids, cache = tiny_model("llama"), random_ids(1, 200), DynamicCache()
    model.model(ids, past_key_values=cache)
    scores = {i: torch.rand(1, 2, 200) for i in range(4)}
    press = VerKVPress(KnormPress(), 0.6, calibrate="layer", **SHORT)
    press.seal(model, cache, scores)
    assert cache.layers[0].context.tolerances is None
    assert any("needs 9 queries of the prompt, there are 0" in note for note in press.stats.notes)


@torch.no_grad()
def test_a_short_row_of_a_batch_is_left_uncalibrated_by_itself(tiny_model):
    model = tiny_model("llama")
    ids, mask = left_padded([random_ids(1, 200), random_ids(1, 26, seed=2)])
    press = VerKVPress(KnormPress(), 0.5, epsilon=0.07, calibrate="layer", **SHORT)
    cache = prefill(model, ids, press, attention_mask=mask)
    found = tolerances(cache)
    assert (found[:, 1] == 0.07).all() and (found[:, 0] != 0.07).any()
    assert any("needs 9 queries" in note for note in press.stats.notes)


@pytest.mark.parametrize("n_positions", [1, 2])
@torch.no_grad()
def test_a_query_or_two_neither_fit_nor_calibrate(tiny_model, n_positions):
    model, ids, cache = tiny_model("llama"), random_ids(1, 200), DynamicCache()
    with record_queries(model, n_positions) as queries:
        model.model(ids, past_key_values=cache)
    scores = {i: torch.rand(1, 2, 200) for i in range(4)}
    for sketch in ("transform", "query_pca"):
        press = VerKVPress(KnormPress(), 0.6, sketch=sketch, calibrate="layer", **SHORT)
        copied = DynamicCache([(layer.keys, layer.values) for layer in cache.layers])
        press.seal(model, copied, scores, queries=queries)
        assert any(f"there are {n_positions - 1 or 1}" in note for note in press.stats.notes)


@pytest.mark.parametrize("n_positions", [0, -1, 1.5])
def test_a_number_of_positions_that_is_none(tiny_model, n_positions):
    with pytest.raises(ValueError, match="n_positions"), record_queries(tiny_model("llama"), n_positions):
        pass


@pytest.mark.parametrize("shape", [(1, 4, 201, 16), (2, 4, 8, 16), (4, 8, 16)])
@torch.no_grad()
def test_queries_of_another_prompt_are_refused(tiny_model, shape):
    model, ids, cache = tiny_model("llama"), random_ids(1, 200), DynamicCache()
    model.model(ids, past_key_values=cache)
    scores = {i: torch.rand(1, 2, 200) for i in range(4)}
    with pytest.raises(ValueError, match="queries of layer 0"):
        VerKVPress(KnormPress(), 0.6, **SHORT).seal(model, cache, scores, queries={0: torch.zeros(shape)})
    assert not getattr(cache.layers[0], "sealed", False)


# --- what it covers ---------------------------------------------------------------------------------------------------

HEADS, GROUP, T, D = 2, 2, 160, 16
POSITIONS = T - 1 - 2 * torch.arange(N_CALIBRATION - 1, -1, -1)


def random_layer(seed):
    """A sealed layer with a poor sketch, and a source of exchangeable queries."""
    generator = torch.Generator().manual_seed(seed)
    keys, values = (torch.randn(1, HEADS, T, D, generator=generator) for _ in range(2))
    codes = sampled_codes((1, HEADS, T), seed, level=16)
    plan = SealPlan(codes, torch.zeros(1).long(), fetch=FetchConfig(0.1, shortlist=0), sketch=RopePairSketch())
    context = SealedContext(keys, values, plan, 0, FetchStats("test", sealed_layers=(0,)))
    return context, lambda: 0.5 * torch.randn(1, HEADS * GROUP, N_CALIBRATION, D, generator=generator)


@pytest.mark.slow
@pytest.mark.parametrize("target,epsilon", [("denominator", 0.1), ("output", 0.5)])
@pytest.mark.parametrize("delta", [0.1, 0.2])
def test_fresh_queries_stay_within_epsilon_as_often_as_promised(target, epsilon, delta):
    """One head and one fresh query of each layer: independent trials. The uncalibrated tolerance fails or wastes."""
    misses, largest_misses, chosen = 0, 0, []
    n_layers = 150
    for seed in range(n_layers):
        context, queries = random_layer(seed)
        calibration = ToleranceCalibration(epsilon, delta, target, "layer", 4)
        calibration.run({0: context}, {0: queries()}, n_first=0)
        replay = DecodeReplay(context, queries(), POSITIONS, 4)
        m, head = seed % N_CALIBRATION, seed % (HEADS * GROUP)
        at = lambda tolerance: float(getattr(replay.errors(tolerance), target)[0, m, head])  # noqa: E731, B023
        misses += at(context.tolerances) > epsilon
        largest_misses += at(float(calibration.tolerances[-1])) > epsilon
        chosen.append(float(context.tolerances[0, head]))
    assert binomtest(misses, n_layers, delta, alternative="greater").pvalue > 1e-3
    assert binomtest(largest_misses, n_layers, delta, alternative="greater").pvalue < 1e-3  # a wrong choice is noticed
    assert min(chosen) < max(calibration.tolerances.tolist())
    assert sum(t > EXACT for t in chosen) > n_layers / 2


def test_heads_that_always_miss_are_computed_exactly(monkeypatch):
    context, queries = random_layer(0)
    calibration = ToleranceCalibration(0.1, 0.1, "denominator", "layer", 4)
    monkeypatch.setattr(
        calibration,
        "_losses",
        lambda context, queries, positions: torch.ones(N_CALIBRATION, 1, HEADS * GROUP, len(calibration.tolerances)),
    )
    calibration.run({0: context}, {0: queries()}, n_first=0)
    assert (context.tolerances == EXACT).all()
    assert any("4 of 4 heads miss" in note for note in calibration.notes)
    errors = DecodeReplay(context, queries(), POSITIONS, 4).errors(context.tolerances)
    assert errors.denominator.max() < 1e-5 and errors.output.max() < 1e-4


def test_losses_in_blocks_are_the_same(monkeypatch):
    import verkv.presses.tolerance as tolerance

    context, queries = random_layer(3)
    drawn = queries()
    whole = ToleranceCalibration(0.1, 0.1, "denominator", "head", 4)._losses(context, drawn, POSITIONS)
    monkeypatch.setattr(tolerance, "MAX_PLANNED_PAIRS", 5 * HEADS * GROUP * T)
    blocks = ToleranceCalibration(0.1, 0.1, "denominator", "head", 4)._losses(context, drawn, POSITIONS)
    assert torch.equal(whole, blocks)
