"""Resealing on tiny models: against dense attention, what it needs, what it refuses, copies, beams and the way back."""

import copy
import math
import pickle

import pytest
import torch
from kvpress import KnormPress, SnapKVPress
from press_helpers import full_layers, inclusion_probs, left_padded, positions, random_ids
from segment_helpers import EXACT, SHORT, TOLERANCE, forward, gates, kvzip
from torch.testing import assert_close
from transformers import DynamicCache

import verkv
from verkv import FastKVzipPress, PoissonCompPress, VerKVPress, make_cache
from verkv.presses.budget import BudgetTooSmall
from verkv.presses.session import N_TAIL_QUERIES
from verkv.sketches import RopePairSketch

pytestmark = pytest.mark.usefixtures("each_way")


def talk(model, press, ids, cache, lengths, by_hand=False):
    """Passes of the given lengths inside the block, and resealing after every turn if that is by hand; logits."""
    logits, n = [], cache.get_seq_length()
    with press(model):
        for length in lengths:
            logits.append(forward(model, ids[:, n : n + length], cache))
            n += length
            if by_hand and length > 1 and len(logits) > 1:
                cache.reseal()
    return torch.cat(logits, 1)


def segments(cache):
    return [s.n_tokens for s in cache.layers[full_layers(cache)[0]].context.segments]


def snapshot(cache):
    """What must not change when something is refused."""
    layers = [cache.layers[i] for i in full_layers(cache)]
    states = [(layer.tail_keys, layer.context.codes, layer.context.rows.keys, layer.record) for layer in layers]
    return states, cache.get_seq_length(), cache.stats.full_bytes, cache.resealer.generator.get_state()


def assert_unchanged(cache, before):
    states, length, full_bytes, drawn = snapshot(cache)
    for now, then in zip(states, before[0], strict=True):
        for a, b in zip(now, then, strict=True):
            assert a is b or (a is not None and not hasattr(a, "ids") and torch.equal(a, b)) or vars(a) == vars(b)
    assert (length, full_bytes) == before[1:3] and torch.equal(drawn, before[3])


# --- against dense attention ------------------------------------------------------------------------------------------

TEN_TURNS = (40, 1, 1, 12, 1, 1, 9, 1, 17, 1, 1, 11, 13, 1, 1, 10, 1, 16, 1, 15, 1, 12, 1)


@pytest.mark.parametrize("kind", ["llama", "gemma3", "qwen3_5"])
@pytest.mark.parametrize("scorer", [KnormPress, kvzip])
def test_ten_turns_equal_dense_attention(tiny_model, kind, scorer):
    model, ids = tiny_model(kind), random_ids(2, 200)
    n = sum(TEN_TURNS)
    with torch.no_grad():
        dense = model(ids[:, :n]).logits
    press, cache = VerKVPress(scorer(), 0.4, max_tail=math.inf, **EXACT), make_cache(model.config)
    assert_close(talk(model, press, ids, cache, TEN_TURNS, by_hand=True), dense, **TOLERANCE)
    assert len(segments(cache)) == 10 and cache.layers[full_layers(cache)[0]].tail_keys.shape[2] < 20
    assert cache.stats.n_segments == 10
    assert cache.stats.full_bytes == sum(cache.layers[i].full_bytes for i in full_layers(cache))
    assert (cache.stats.replays is None) == (scorer is KnormPress)


@pytest.mark.parametrize("options,expected", [({"reseal_every": 16}, 8), ({"max_tail": 30}, 30 - 16)])
def test_tails_are_sealed_by_themselves(tiny_model, options, expected):
    model, ids = tiny_model("llama"), random_ids(1, 150)
    with torch.no_grad():
        dense = model(ids[:, :140]).logits
    press, cache = VerKVPress(kvzip(), 0.4, **options, **EXACT), DynamicCache()
    assert_close(talk(model, press, ids, cache, (40, *[1] * 100)), dense, **TOLERANCE)
    every = options.get("reseal_every", 23)  # a tail of 31 is longer than 30; 8 stay
    assert segments(cache) == [32, *[every] * ((140 - 40) // every)]
    assert cache.layers[0].tail_keys.shape[2] == 8 + 100 % every


def test_a_replay_by_hand_inside_the_block_is_no_pass_of_it(tiny_model):
    """Its tokens are not recorded, nor sealed because there are so many of them."""
    model, ids = tiny_model("llama"), random_ids(1, 150)
    with torch.no_grad():
        dense = model(ids[:, :130]).logits
    press, cache = VerKVPress(kvzip(), 0.4, reseal_every=32, **EXACT), make_cache(model.config)
    assert_close(talk(model, press, ids, cache, (50, 30, 30, 20), by_hand=True), dense, **TOLERANCE)
    assert segments(cache) == [42, 30, 30, 20]
    assert torch.equal(cache.layers[0].record.ids, ids[:, :130])
    assert cache.stats.n_passes == 3 and cache.stats.replays.n_passes == 3


def test_a_short_prompt_is_sealed_once_there_is_enough(tiny_model):
    model, ids = tiny_model("llama"), random_ids(1, 100)
    with torch.no_grad():
        dense = model(ids[:, :90]).logits
    press, cache = VerKVPress(kvzip(), 0.4, reseal_every=40, **EXACT), DynamicCache()
    assert_close(talk(model, press, ids, cache, (10, *[1] * 80)), dense, **TOLERANCE)
    assert segments(cache) == [44]  # 4 sinks and 40 more, as soon as 8 others follow


def test_a_budget_that_does_not_suffice_yet_waits(tiny_model):
    """The first seal must pay for the sinks, so 12 of 32 tokens at 4x are too many."""
    model, ids = tiny_model("llama"), random_ids(1, 150)
    press = VerKVPress(KnormPress(), 0.75, reseal_every=4, n_sink=12, n_local=4)
    cache = DynamicCache()
    talk(model, press, ids, cache, (14, *[1] * 100))
    assert segments(cache)[0] > 40 and cache.resealer.next_try > 20


# --- draws ------------------------------------------------------------------------------------------------------------


def test_draws_of_segments_are_independent(tiny_model):
    """A text that repeats itself: with the same random numbers every segment would keep the same places."""
    model = tiny_model("llama")
    ids = random_ids(1, 200).repeat(1, 3)
    agreement = {}
    for redrawn in (False, True):
        press = VerKVPress(KnormPress(), 0.6, alpha=1.0, outliers=0.0, max_tail=math.inf, n_sink=0, n_local=0)
        cache = make_cache(model.config)
        with press(model):
            for start in range(0, 600, 200):
                forward(model, ids[:, start : start + 200], cache)
                if start:
                    if redrawn:
                        cache.resealer.generator.manual_seed(press.seed)
                    cache.reseal()
        parts = [(layer.context.codes & 0x80).view(-1, 3, 200) != 0 for layer in cache.layers]
        same = torch.stack([(part[:, 0] == part[:, i]).float().mean() for part in parts for i in (1, 2)]).mean()
        agreement[redrawn] = float(same)
    r = inclusion_probs(cache.layers[0].context.codes).mean()
    assert abs(agreement[False] - float(r**2 + (1 - r) ** 2)) < 0.04
    assert agreement[True] > 0.95


def test_every_segment_keeps_to_its_share(tiny_model):
    model, ids = tiny_model("llama"), random_ids(1, 600)
    press, cache = VerKVPress(KnormPress(), 0.6, max_tail=math.inf, sketch="rope_pair", **SHORT), None
    cache = make_cache(model.config)
    talk(model, press, ids, cache, (200, 200, 200), by_hand=True)
    assert segments(cache) == [192, 200, 200]
    for layer in cache.layers:
        codes = layer.context.codes
        probs = (inclusion_probs(codes) * (codes > 0)).split(segments(cache), -1)
        for n, part in zip(segments(cache), probs, strict=True):
            spent = part.sum(-1) * (2 * 16 * 4 + 1) + n + RopePairSketch().charged_bytes(n, 16)
            assert (spent <= 0.4 * n * 2 * 16 * 4).all() and (spent >= 0.38 * n * 2 * 16 * 4).all()
    host = cache.memory_report().host
    assert host["host_keys"] + host["host_values"] == cache.stats.full_bytes == 592 * 4 * 2 * 2 * 16 * 4


# --- scores -----------------------------------------------------------------------------------------------------------


def test_gates_score_new_tokens_when_they_come(tiny_model):
    model, ids = tiny_model("llama"), random_ids(2, 90)
    press = VerKVPress(FastKVzipPress(gates=gates(model)), 0.4, max_tail=math.inf, **EXACT)
    taken, cache = {}, make_cache(model.config)

    class Recording(VerKVPress):
        def _plans(self, scores, *args):
            taken.update(scores)
            return super()._plans(scores, *args)

    press = Recording(**{f: getattr(press, f) for f in press.__dataclass_fields__})
    talk(model, press, ids, cache, (40, 9, *[1] * 20, 11), by_hand=False)
    cache.reseal()
    hidden = {}
    handles = [
        layer.input_layernorm.register_forward_hook(lambda m, a, out, i=i: hidden.__setitem__(i, out))
        for i, layer in enumerate(model.model.layers)
    ]
    with torch.no_grad():
        model(ids[:, :80])
    for handle in handles:
        handle.remove()
    assert segments(cache) == [32, 40]
    for i, gate in enumerate(gates(model)):
        expected = torch.cat([gate(row[None]) for row in hidden[i]])
        assert_close(taken[i], expected[:, :, 32:72], atol=1e-4, rtol=0.0)


def test_a_replayed_segment_is_scored_as_kvzips_next_chunk(tiny_model):
    """With a window of nothing, the second segment is what KVzip calls the second chunk of the context."""
    model, ids = tiny_model("llama"), random_ids(2, 100)
    source = kvzip(chunk_size=60).source()
    source.prepare(model)
    dense = DynamicCache()
    forward(model, ids, dense)
    expected = source.after_prefill(model, dense, ids, None)
    taken = {}

    class Recording(VerKVPress):
        def _plans(self, scores, *args):
            taken.update(scores)
            return super()._plans(scores, *args)

    press = Recording(kvzip(chunk_size=60), 0.4, max_tail=math.inf, n_sink=4, n_local=0, epsilon=1e-9)
    cache = make_cache(model.config)
    talk(model, press, ids, cache, (60, 40), by_hand=False)
    cache.reseal()
    assert segments(cache) == [60, 40] and cache.stats.replays.n_passes == 1 and cache.stats.n_passes == 1
    for i in range(4):
        assert_close(taken[i], expected[i][..., 60:], atol=1e-5, rtol=1e-3)


def test_what_was_not_recorded_is_asked_for(tiny_model):
    model, ids = tiny_model("llama"), random_ids(1, 100)
    for scorer, what in ((kvzip(), "ids"), (KnormPress(), "hidden")):
        press, cache = VerKVPress(scorer, 0.4, max_tail=math.inf, **EXACT), make_cache(model.config)
        talk(model, press, ids, cache, (40, 10))
        forward(model, ids[:, 50:80], cache)  # outside the block
        before = snapshot(cache)
        with pytest.raises(ValueError, match=f"{what} of some of the tail's 48 tokens"):
            cache.reseal()
        assert_unchanged(cache, before)
        cache.reseal(scores={i: torch.rand(1, 2, 48) for i in range(4)})
        assert segments(cache) == [32, 40]
    press, cache = VerKVPress(kvzip(), 0.4, **EXACT), make_cache(model.config)  # nothing is remembered
    talk(model, press, ids, cache, (40, 30))
    with pytest.raises(ValueError, match="reseal_every or max_tail"):
        cache.reseal()


def test_scorers_that_need_more_than_a_segment_are_refused(tiny_model):
    model, ids = tiny_model("llama"), random_ids(1, 100)
    press = VerKVPress(SnapKVPress(window_size=32), 0.4, max_tail=math.inf, **EXACT)
    cache = make_cache(model.config)
    talk(model, press, ids, cache, (60, 20))
    before = snapshot(cache)
    with pytest.raises(NotImplementedError, match="SnapKVPress cannot score a segment of 28 tokens"):
        cache.reseal()
    assert_unchanged(cache, before)


# --- refusals ---------------------------------------------------------------------------------------------------------


def sealed(model, press=None, lengths=(60, 30), batch=1):
    press = press or VerKVPress(KnormPress(), 0.4, max_tail=math.inf, **EXACT)
    cache = make_cache(model.config)
    talk(model, press, random_ids(batch, 200), cache, lengths)
    return cache, press


@pytest.mark.parametrize(
    "options,match",
    [
        ({"reseal_every": 0}, "reseal_every"),
        ({"reseal_every": 1.5}, "reseal_every"),
        ({"max_tail": 8}, "larger than n_local=8"),
    ],
)
def test_options_out_of_range(tiny_model, options, match):
    with pytest.raises(ValueError, match=match), VerKVPress(KnormPress(), 0.4, **options, **SHORT)(tiny_model("llama")):
        pass


def test_refusals_leave_the_cache_as_it_was(tiny_model):
    model = tiny_model("llama")
    cache, press = sealed(model)
    before = snapshot(cache)
    for options, error, match in (
        ({"scores": {0: torch.rand(1, 2, 38)}}, ValueError, "layer 1 are missing"),
        ({"scores": {i: torch.rand(1, 2, 7) for i in range(4)}}, ValueError, "have shape"),
        ({"scores": {i: torch.full((1, 2, 38), math.nan) for i in range(4)}}, ValueError, "NaN"),
        ({"attention_mask": torch.ones(1, 50)}, ValueError, "attention_mask must have shape"),
        ({"attention_mask": (torch.arange(90) != 3).long()[None]}, ValueError, "hides other sealed tokens"),
    ):
        with pytest.raises(error, match=match):
            cache.reseal(**options)
        assert_unchanged(cache, before)
    press.compression_ratio = 0.99
    with pytest.raises(BudgetTooSmall, match=r"compression_ratio=0\.99"):
        cache.reseal()
    assert_unchanged(cache, before)
    press.compression_ratio = 0.4
    cache.reseal()
    with pytest.raises(ValueError, match="8 tokens, and its last 8 stay exact"):
        cache.reseal()


def test_sealing_that_fails_half_way_is_undone(tiny_model, monkeypatch):
    model = tiny_model("llama")
    cache, _ = sealed(model)
    before, append = snapshot(cache), verkv.context.SealedContext.append

    def fail(context, *args):
        if context.layer_idx == 2:
            raise MemoryError("no host memory")
        append(context, *args)

    monkeypatch.setattr(verkv.context.SealedContext, "append", fail)
    with pytest.raises(MemoryError):
        cache.reseal()
    assert_unchanged(cache, before)
    monkeypatch.undo()
    expected = forward(model, random_ids(1, 3, seed=9), copy.deepcopy(cache))
    cache.reseal()
    assert_close(forward(model, random_ids(1, 3, seed=9), cache), expected, **TOLERANCE)


def test_half_a_forward_pass_is_refused(tiny_model):
    model = tiny_model("llama")
    cache, _ = sealed(model)
    cache.layers[0].tail_keys = cache.layers[0].tail_keys[:, :, :-1]
    with pytest.raises(ValueError, match="half a forward pass"):
        cache.reseal()
    assert segments(cache) == [52]


def test_caches_without_a_press_are_refused(tiny_model):
    model = tiny_model("llama")
    cache = make_cache(model.config)
    with pytest.raises(ValueError, match="no press"):
        cache.reseal()
    with pytest.raises(ValueError, match="not sealed"):
        VerKVPress(KnormPress(), 0.4).reseal(model, cache)
    forward(model, random_ids(1, 10), cache)
    with pytest.raises(ValueError, match="no press"):
        verkv.reseal(cache)


def test_tokens_of_another_model_are_refused(tiny_model):
    cache, _ = sealed(tiny_model("llama"))
    other = tiny_model("llama", num_key_value_heads=4)
    before = snapshot(cache)
    with pytest.raises(ValueError, match="2 KV heads"):
        forward(other, random_ids(1, 3), cache)
    assert_unchanged(cache, before)


# --- beams, rows, copies ----------------------------------------------------------------------------------------------


def test_beams_that_differ_are_refused(tiny_model):
    model = tiny_model("llama")
    cache, press = sealed(model, lengths=(60, 10))
    cache.batch_repeat_interleave(2)
    with press(model):
        forward(model, random_ids(1, 8).repeat(2, 1), cache)
        cache.reseal()  # so far they are the same
        assert segments(cache) == [52, 18] and cache.layers[0].context.beams == 2
        forward(model, random_ids(2, 10, seed=4), cache)
    before = snapshot(cache)
    with pytest.raises(NotImplementedError, match="batch_select_indices"):
        cache.reseal()
    assert_unchanged(cache, before)
    expected = forward(model, random_ids(2, 4, seed=6), copy.deepcopy(cache))
    cache.batch_select_indices(torch.arange(2))
    cache.reseal()
    assert segments(cache) == [52, 18, 10]
    assert_close(forward(model, random_ids(2, 4, seed=6), cache), expected, **TOLERANCE)


def test_beam_search_goes_on_while_tails_differ(tiny_model):
    model = tiny_model("llama")
    press = VerKVPress(KnormPress(), 0.4, reseal_every=4, **EXACT)
    options = {"max_new_tokens": 16, "num_beams": 3, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    dense = model.generate(random_ids(1, 60), **options)
    with press(model):
        answer = model.generate(random_ids(1, 60), past_key_values=DynamicCache(), **options)
    assert torch.equal(answer, dense)
    assert any("beams" in note for note in press.stats.notes)


def test_rows_that_ended_earlier_are_hidden_and_left_out(tiny_model):
    """Row 0 got 9 tokens, row 1 got 20 and row 0 padding; next turn both go on, each as it would alone."""
    model = tiny_model("llama")
    rows = [random_ids(1, 50, seed=2), random_ids(1, 41, seed=3)]
    more, last = random_ids(2, 20, seed=4), random_ids(2, 30, seed=5)
    ids, mask = left_padded(rows)
    press, cache = VerKVPress(kvzip(), 0.4, max_tail=math.inf, **EXACT), make_cache(model.config)

    def step(new, shown):
        nonlocal mask
        mask = torch.cat([mask, shown], 1)
        place = positions(mask)[:, -new.shape[1] :]
        return forward(model, new, cache, attention_mask=mask, position_ids=place)

    shown = torch.ones_like(more)
    shown[0, 9:] = 0
    with press(model):
        forward(model, ids, cache, attention_mask=mask, position_ids=positions(mask))
        step(more, shown)
        cache.reseal(attention_mask=mask)
        assert segments(cache) == [42, 20]
        step(last, torch.ones_like(last))
        cache.reseal(attention_mask=mask)
        final = step(random_ids(2, 5, seed=7), torch.ones(2, 5, dtype=torch.int64))
    assert segments(cache) == [42, 20, 30] and cache.layers[0].context.hidden.shape == (2, 11)
    assert not cache.layers[0].context.codes.view(2, 2, -1)[0, :, 59:70].any()
    for i, row in enumerate(rows):
        alone = [row, more[i : i + 1][:, shown[i].bool()], last[i : i + 1], random_ids(2, 5, seed=7)[i : i + 1]]
        with torch.no_grad():
            dense = model(torch.cat(alone, 1)).logits[:, -5:]
        assert_close(final[i : i + 1], dense, **TOLERANCE)


@pytest.mark.parametrize("how", ["copy", "pickle", "select"])
def test_copies_reseal_by_themselves(tiny_model, how):
    model = tiny_model("llama")
    cache, press = sealed(model, batch=2)
    cache.reseal()
    if how == "copy":
        twin = copy.deepcopy(cache)
        assert twin.resealer is not cache.resealer and twin.resealer.press is press
    elif how == "pickle":
        twin = pickle.loads(pickle.dumps(cache))
        with pytest.raises(ValueError, match="not known any more"):
            twin.reseal()
        press.take_over(model, twin)
    else:
        twin = copy.deepcopy(cache)
        twin.batch_select_indices(torch.tensor([0, 1]))
    for one in (cache, twin):
        talk(model, press, random_ids(2, 200, seed=8), one, (20,))
        one.reseal()
    assert segments(cache) == segments(twin) == [52, 30, 20]
    for ours, theirs in zip(cache.layers, twin.layers, strict=True):
        assert torch.equal(ours.context.codes, theirs.context.codes)  # from the same state, the same draw
    question = random_ids(2, 4, seed=6)
    assert_close(forward(model, question, twin), forward(model, question, cache))


def test_the_model_is_not_kept_alive(tiny_model):
    import gc
    import weakref

    model = tiny_model("llama")
    cache, _ = sealed(model)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    with pytest.raises(ValueError, match="not known any more"):
        cache.reseal()


# --- the way back -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [95, 82, 75, 60, 52])
def test_going_back_below_segments(tiny_model, length):
    model, ids = tiny_model("llama"), random_ids(1, 200)
    cache, press = sealed(model, lengths=(60, 30))
    cache.reseal()
    talk(model, press, ids, cache, (20,))
    cache.reseal()
    assert segments(cache) == [52, 30, 20] and cache.get_seq_length() == 110
    cache.crop(length)
    kept = [n for n, end in ((52, 52), (30, 82), (20, 102)) if end <= length]
    assert segments(cache) == kept and cache.layers[0].tail_keys.shape[2] == length - sum(kept)
    assert cache.stats.full_bytes == cache.memory_report().full_bytes and cache.stats.n_segments == len(kept)
    dense, question = DynamicCache(), random_ids(1, 40, seed=7)
    forward(model, ids[:, :length], dense)
    with press(model):
        assert_close(forward(model, question, cache), forward(model, question, dense), **TOLERANCE)
    if length in (52, 82):  # otherwise hidden states of tokens that came back are gone
        cache.reseal()
    else:
        with pytest.raises(ValueError, match="hidden of some"):
            cache.reseal()
        cache.reseal(scores={i: torch.rand(1, 2, length - sum(kept) + 40) for i in range(4)})
    assert_close(forward(model, question[:, :3], cache), forward(model, question[:, :3], dense), **TOLERANCE)


def test_not_below_the_first_segment_nor_into_one_without_a_host(tiny_model):
    model = tiny_model("llama")
    cache, _ = sealed(model)
    cache.reseal()
    with pytest.raises(ValueError, match="cuts into the sealed context of 52 tokens"):
        cache.crop(51)
    assert segments(cache) == [52, 30]
    cache, _ = sealed(model, PoissonCompPress(KnormPress(), 0.4, max_tail=math.inf, **SHORT))
    cache.reseal()
    with pytest.raises(ValueError, match=r"can go back to \[52, 82\] tokens"):
        cache.crop(60)
    assert segments(cache) == [52, 30]
    cache.crop(52)
    assert segments(cache) == [52] and cache.layers[0].tail_keys.shape[2] == 0


def test_a_sliding_layer_that_has_forgotten_leaves_all_as_they_were(tiny_model):
    model = tiny_model("gemma3")
    cache, _ = sealed(model, lengths=(60, 30, 30))
    cache.reseal()
    before = snapshot(cache)
    with pytest.raises(ValueError, match="sliding layer cannot go back"):
        cache.crop(75)
    assert_unchanged(cache, before)
    assert {layer.get_seq_length() for layer in cache.layers} == {120}
    cache.crop(60)  # the context's end, which is remembered
    assert segments(cache) == [52]


def test_the_record_is_counted_and_bounded(tiny_model):
    model = tiny_model("llama")
    cache, _ = sealed(model, VerKVPress(kvzip(), 0.4, max_tail=math.inf, **EXACT), lengths=(60, 90, 1))
    report = cache.memory_report()
    assert report.device_uncharged["tail_queries"] == 4 * N_TAIL_QUERIES * 4 * 16 * 4
    assert report.host["token_ids"] == 151 * 8 and "tail_scores" not in report.device_uncharged
