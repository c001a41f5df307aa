"""Conversations on tiny models: against dense attention, branches, the way back, files, and what is refused."""

import copy
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from kvpress import KnormPress, SnapKVPress
from press_helpers import full_layers
from segment_helpers import EXACT, SHORT, TOLERANCE, kvzip
from tokenizers import Tokenizer, decoders, models
from torch import Tensor
from torch.testing import assert_close
from transformers import DynamicCache, PreTrainedTokenizerFast, TextStreamer

import verkv
from verkv import Conversation, PoissonCompPress, VerKVPress, branching, reading
from verkv.branching import held_tensors
from verkv.codecs import CodecError, CorruptFileError, FormatError, MismatchError
from verkv.demo import prose_paragraphs

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
QUESTIONS = [
    "Who?",
    "What is it, then?",
    "Why",
    "And where?",
    "How",
    "Is that so?",
    "When",
    "Which one?",
    "No!",
    "Yes?",
]
DOCUMENT = "It was a dark and stormy night; the rain fell in torrents, except at occasional intervals. " * 2


@pytest.fixture(scope="module")
def tokenizer():
    """A character for each token of a tiny model's vocabulary, and a chat template."""
    specials = ["<pad>", "<s>", "</s>"]
    characters = ["\n", *map(chr, range(32, 127)), *map(chr, range(0x400, 0x400 + 256 - 3 - 96))]
    vocabulary = {token: i for i, token in enumerate(specials + characters)}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    inner.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="</s>", pad_token="<pad>", chat_template=TEMPLATE
    )


@pytest.fixture
def talk_to(tokenizer):
    """Factory ``talk_to(model, press=None, **options)`` of conversations with short greedy answers."""

    def make(model, press=None, **options):
        options = {"reseal": 1, "max_new_tokens": 3, "do_sample": False} | options
        return Conversation(model, tokenizer, press, **options)

    return make


def exact_press(scorer=KnormPress, **options):
    """Everything is fetched: dense attention, whatever is sealed."""
    return VerKVPress(scorer(), 0.4, **{**EXACT, **options})


class Logits(list):
    """A logits processor that remembers what it is shown."""

    def __call__(self, input_ids, scores):
        self.append(scores.clone())
        return scores


def segments(talk):
    return [s.n_tokens for s in talk.cache.layers[full_layers(talk.cache)[0]].context.segments]


def continuations(talk, n=1):
    """What the conversation would say, without saying it."""
    twin = talk.branch()
    return [twin.ask(question) for question in QUESTIONS[-n:]]


def state(talk) -> dict[str, object]:
    """Everything that the next turns depend on, by place."""
    found = {"turns": talk.turns, "ids": talk._ids}
    resealer = getattr(talk.cache, "resealer", None)
    if resealer is not None:
        found["drawn"], found["next_try"] = resealer.generator.get_state(), resealer.next_try
    if talk.stats is not None:
        found["stats"] = talk.stats.summary()
    for i, layer in enumerate(talk.cache.layers):
        for number, tensor in enumerate(held_tensors(layer).values()):
            found[f"{i}.{number}"] = tensor
        found[f"{i}.length"] = layer.get_seq_length()
    return found


def assert_same(now, then):
    assert list(now) == list(then)
    for name, value in now.items():
        if isinstance(value, Tensor):
            assert torch.equal(value, then[name]), name
        else:
            assert value == then[name], name


# --- against dense attention ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind,chunk_size", [("llama", None), ("llama", 60), ("gemma3", 60), ("qwen3_5", 60), ("ministral", None)]
)
def test_ten_turns_are_dense_attention(tiny_model, talk_to, kind, chunk_size):
    model = tiny_model(kind)
    talks = [talk_to(model), talk_to(model, exact_press(kvzip), chunk_size=chunk_size)]
    logits = [Logits(), Logits()]
    for talk, found in zip(talks, logits, strict=True):
        talk.read(DOCUMENT)
        for question in QUESTIONS:
            talk.ask(question, logits_processor=[found])
    assert_close(torch.cat(logits[1]), torch.cat(logits[0]), **TOLERANCE)
    assert torch.equal(talks[0].token_ids, talks[1].token_ids) and talks[0].turns == talks[1].turns
    assert len(segments(talks[1])) >= 9
    assert type(talks[0].cache) is DynamicCache or kind == "qwen3_5"


@pytest.mark.parametrize("kind", ["llama", "qwen3_5"])
def test_nothing_compressed_is_dense_attention(tiny_model, talk_to, kind):
    model, logits = tiny_model(kind), [Logits(), Logits()]
    for press, found in zip((None, VerKVPress(KnormPress(), 0.0, **SHORT)), logits, strict=True):
        talk = talk_to(model, press, chunk_size=None if press is None else 50)
        for question in QUESTIONS[:4]:
            talk.read(DOCUMENT)
            talk.ask(question, logits_processor=[found])
        assert kind != "llama" or talk.memory.host["earlier_turns"] == 0
    assert_close(torch.cat(logits[1]), torch.cat(logits[0]), **TOLERANCE)


@pytest.mark.parametrize("press", [None, exact_press()], ids=["dense", "sealed"])
def test_the_cache_holds_the_tokens_of_the_conversation(tiny_model, talk_to, tokenizer, press):
    """Also the last of an answer that was cut off, which generate does not forward, and no token twice."""
    model, talk = tiny_model("llama"), talk_to(tiny_model("llama"), press, system="Be brief.")
    messages = [{"role": "system", "content": "Be brief."}]
    for number, question in enumerate(QUESTIONS[:4]):
        if number % 2:
            talk.read(DOCUMENT)
        answer = talk.ask(question, max_new_tokens=3 + number)
        asked = f"{DOCUMENT}\n\n{question}" if number % 2 else question
        messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
        assert talk.cache.get_seq_length() == len(talk.token_ids) - 1
        with torch.no_grad():
            expected = model(talk.token_ids[None], use_cache=False).logits[:, -1]
        twin = talk.branch()
        with torch.no_grad():
            logits = model(talk.token_ids[None, -1:], past_key_values=twin.cache).logits[:, -1]
        assert_close(logits, expected, **TOLERANCE)
        turn = talk.turns[-1]
        assert (turn.text, turn.answer, turn.end) == (question, answer, len(talk.token_ids))
        assert tokenizer.decode(talk.token_ids[turn.answer_start : turn.end], skip_special_tokens=True) == answer
    whole = tokenizer.apply_chat_template(messages, tokenize=False)
    assert whole.startswith(tokenizer.decode(talk.token_ids)) and whole.endswith(answer + "</s>\n")


@pytest.mark.parametrize("template", [TEMPLATE, None], ids=["template", "no template"])
def test_the_token_that_ends_an_answer_is_there_once(tiny_model, talk_to, tokenizer, template):
    """An answer that ends by itself, and the template's end of the turn, are the same token."""
    model = tiny_model("llama")
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = template

    said = []

    class ThreeThenEnd:
        def __call__(self, input_ids, scores):
            said.append(40 if len(said) < 3 else 2)
            return scores.masked_fill(torch.arange(scores.shape[1]) != said[-1], -1e9)

    talk = Conversation(model, tokenizer, reseal=None, do_sample=False, max_new_tokens=9)
    answer = talk.ask("Who?", logits_processor=[ThreeThenEnd()])
    assert said == [40, 40, 40, 2]
    assert answer == tokenizer.decode([40, 40, 40]) and talk.token_ids[-3:].tolist() == [40] * 3
    talk.ask("Why?")
    text = "<user>Who?</s>\n<assistant>AAA</s>\n<user>Why?</s>\n<assistant>" if template else "<s>Who?\nAAA\nWhy?\n"
    text = text.replace("AAA", answer)
    assert tokenizer.decode(talk.token_ids[: talk.turns[-1].answer_start]) == text
    assert tokenizer.encode(text, add_special_tokens=False) == talk.token_ids[: talk.turns[-1].answer_start].tolist()


# --- when the tail is sealed ------------------------------------------------------------------------------------------


def test_tails_are_sealed_between_turns_once_they_are_long_enough(tiny_model, talk_to):
    model, lengths = tiny_model("llama"), {}
    for least in (1, 60, None):
        talk = talk_to(model, exact_press(), reseal=least, max_new_tokens=1)
        for _ in range(5):
            talk.read("And then the rain fell in torrents.")
        lengths[least] = segments(talk)
    assert len(lengths[1]) == 5 and len(lengths[None]) == 1
    assert 1 < len(lengths[60]) < 5 and min(lengths[60][1:]) >= 60


@pytest.mark.parametrize("options", [{"reseal_every": 16}, {"max_tail": 30}])
def test_a_press_that_seals_by_itself_is_left_to_it(tiny_model, talk_to, options):
    talk = talk_to(tiny_model("llama"), exact_press(**options), reseal=1, max_new_tokens=40)
    talk.read(DOCUMENT)
    talk.ask("Who?")
    every = options.get("reseal_every", 30 - 8 + 1)
    assert segments(talk)[1] > 16 and set(segments(talk)[2:]) == {every}  # the question comes at once


def test_what_the_budget_does_not_pay_for_waits(tiny_model, talk_to, recwarn):
    """The first seal must pay for the sinks, of which a short conversation has too many."""
    talk = talk_to(tiny_model("llama"), VerKVPress(KnormPress(), 0.75, n_sink=24, n_local=4))
    waiting = reading.WAITING
    talk.ask("Who?")
    assert waiting not in talk.stats.notes  # all of it is protected
    talk.ask("Why?")
    assert not full_layers(talk.cache) and talk.stats.notes.count(waiting) == 1
    talk.ask("And when?")
    assert not full_layers(talk.cache) and talk.stats.notes.count(waiting) == 1
    talk.read(DOCUMENT)
    assert len(segments(talk)) == 1
    assert not [w for w in recwarn if "not compressed" in str(w.message)]


@pytest.mark.parametrize("chunk_size", [None, 60])
@pytest.mark.parametrize("start", ["ask", "read"])
def test_a_start_that_the_budget_does_not_pay_for_is_exact(tiny_model, talk_to, start, chunk_size):
    """It is sealed, with scores of its own, as soon as there is enough."""
    model, logits = tiny_model("llama"), [Logits(), Logits()]
    press = VerKVPress(KnormPress(), 0.75, **{**EXACT, "n_sink": 14})
    for talk, found in ((talk_to(model), logits[0]), (talk_to(model, press, chunk_size=chunk_size), logits[1])):
        text = "It was a dark and stormy night."
        if talk.press is None:
            getattr(talk, start)(text)
        else:
            with pytest.warns(UserWarning, match="begins uncompressed: compression_ratio=0.75 leaves"):
                getattr(talk, start)(text)
            assert not full_layers(talk.cache) and reading.WAITING in talk.stats.notes
        talk.ask("Who?", logits_processor=[found])
        talk.read(DOCUMENT)
        talk.ask("Why?", logits_processor=[found])
    assert segments(talk)[0] > 60
    assert_close(torch.cat(logits[1]), torch.cat(logits[0]), **TOLERANCE)


def test_a_long_question_is_read_in_chunks(tiny_model, talk_to):
    model, logits = tiny_model("llama"), [Logits(), Logits()]
    for press, found in zip((None, exact_press(kvzip)), logits, strict=True):
        talk = talk_to(model, press, chunk_size=60)
        for text in ("Who?", DOCUMENT + "Who?", "Why?", DOCUMENT + "How?"):
            talk.ask(text, logits_processor=[found])
    assert_close(torch.cat(logits[1]), torch.cat(logits[0]), **TOLERANCE)
    assert max(segments(talk)) <= 70 and len(segments(talk)) >= 7


def test_the_press_of_the_user_is_left_as_it_is(tiny_model, talk_to):
    press = VerKVPress(KnormPress(), 0.5, **SHORT)
    talk = talk_to(tiny_model("llama"), press)
    assert press.max_tail is None and talk.press.max_tail == math.inf
    assert talk_to(tiny_model("llama"), press, reseal=None).press is press


def test_a_text_after_a_short_start_is_read_in_chunks(tiny_model, talk_to):
    """Nothing is sealed yet, so the first chunk is read as any text is."""
    model, logits = tiny_model("llama"), [Logits(), Logits()]
    for press, found in zip((None, exact_press(n_sink=40)), logits, strict=True):
        talk = talk_to(model, press, chunk_size=50)
        talk.ask("Who?", logits_processor=[found])
        assert not full_layers(talk.cache)  # all of it is protected
        talk.read(DOCUMENT)
        talk.ask("Why?", logits_processor=[found])
    assert_close(torch.cat(logits[1]), torch.cat(logits[0]), **TOLERANCE)
    assert len(segments(talk)) >= 3


def test_a_sample_without_host_copy_reads_chunks_through_the_sample(tiny_model, talk_to):
    talk = talk_to(tiny_model("llama"), PoissonCompPress(kvzip(), 0.4, **SHORT), chunk_size=60)
    for _ in range(2):
        talk.read(DOCUMENT)
        talk.ask("Who?")
    assert talk.cache.layers[0].context.host is None and len(segments(talk)) >= 6


# --- branches ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama", "gemma3", "qwen3_5"])
def test_branches_go_on_as_dense_ones(tiny_model, talk_to, kind):
    model, answers = tiny_model(kind), []
    for press in (None, exact_press()):
        talk = talk_to(model, press)
        talk.read(DOCUMENT)
        talk.ask("Who?")
        twin = talk.branch()
        said = [talk.ask("Why?"), twin.ask("How?"), talk.ask("Where?"), twin.ask("When?"), twin.branch().ask("Then?")]
        answers.append((said, talk.token_ids.tolist(), twin.token_ids.tolist()))
    assert answers[0] == answers[1]
    assert len(segments(talk)) == len(segments(twin)) == 4


def test_branches_share_the_host_and_nothing_that_changes(tiny_model, talk_to):
    talk = talk_to(tiny_model("llama"), VerKVPress(kvzip(), 0.5, sketch="rope_pair", **SHORT))
    talk.read(DOCUMENT)
    talk.ask("Who?")
    before = state(talk)
    twin = talk.branch()
    assert_same(state(twin), before)
    parts = [[part for layer in t.cache.layers for part in layer.context.host.parts] for t in (talk, twin)]
    assert all(a.keys.data_ptr() == b.keys.data_ptr() for a, b in zip(*parts, strict=True))
    twin.ask("Why?")
    twin.read(DOCUMENT)
    assert_same(state(talk), before)
    grown = [part for layer in twin.cache.layers for part in layer.context.host.parts[:2]]
    assert [p.values.data_ptr() for p in grown] == [p.values.data_ptr() for p in parts[0]]
    assert twin.stats is not talk.stats and twin.stats.n_passes > talk.stats.n_passes
    assert all(layer.context.stats is talk.stats for layer in talk.cache.layers)


def test_branches_draw_by_themselves_and_reproducibly(tiny_model, talk_to):
    """The same words in both give the same sample; what one draws does not change what the other draws."""
    talk = talk_to(tiny_model("llama"), VerKVPress(KnormPress(), 0.5, sketch="rope_pair", **SHORT))
    talk.read(DOCUMENT)
    twin, other = talk.branch(), talk.branch()
    other.ask("Something else?")
    for t in (talk, twin):
        t.ask("Who?")
        t.read(DOCUMENT)
    assert_same(state(talk), state(twin))
    assert not torch.equal(talk.cache.resealer.generator.get_state(), other.cache.resealer.generator.get_state())


# --- the way back -----------------------------------------------------------------------------------------------------

PRESSES = {
    "dense": lambda: None,
    "verkv": lambda: VerKVPress(kvzip(), 0.5, sketch="rope_pair", **SHORT),
    "transform": lambda: VerKVPress(KnormPress(), 0.3, error_aware=True, **SHORT),
    "output": lambda: VerKVPress(KnormPress(), 0.5, sketch="rope_pair", target="output", record_bounds=True, **SHORT),
    "sample": lambda: PoissonCompPress(kvzip(), 0.5, **SHORT),
    "by size": lambda: VerKVPress(
        kvzip(), budget_tokens=110, sketch="rope_pair", **SHORT
    ),  # earlier samples are thinned
    "audited sample": lambda: PoissonCompPress(kvzip(), 0.5, audit=True, **SHORT),
}


CASES = [("llama", name, name != "output") for name in PRESSES] + [("llama", "verkv", False)]
CASES += [(kind, name, kind == "gemma3") for kind in ("gemma3", "qwen3_5") for name in ("dense", "verkv")]


@pytest.mark.parametrize("kind,press,is_moved", CASES)
def test_a_turn_is_gone_back_to_bit_by_bit(tiny_model, talk_to, monkeypatch, kind, press, is_moved):
    """Also where what is kept is moved to the host, as from a device."""
    if is_moved:
        monkeypatch.setattr(branching, "_is_on_host", lambda tensor: False)
    talk = talk_to(tiny_model(kind), PRESSES[press]())
    states = [state(talk)]
    for number, question in enumerate(QUESTIONS[:3]):
        if number != 1:
            talk.read(DOCUMENT)
            states.append(state(talk))
        talk.ask(question)
        states.append(state(talk))
    twin = talk.branch()
    for turn in (4, 3, 1, 0):
        talk.roll_back(turn)
        assert_same(state(talk), states[turn])
        assert len(talk.turns) == turn
    talk.read(DOCUMENT)
    talk.ask(QUESTIONS[0])
    assert_same(state(talk), states[2])  # draws, too, go on from there
    twin.roll_back(3)  # a branch goes back before it was one
    twin.read(DOCUMENT)
    assert_same(state(twin), states[4])
    twin.undo()
    assert_same(state(twin), states[3])


def test_what_going_back_takes(tiny_model, talk_to):
    """A byte for each token and row, their ids, and some counts, but no keys and values where there is a host copy."""
    talk = talk_to(tiny_model("llama"), VerKVPress(kvzip(), 0.5, sketch="rope_pair", error_aware=False, **SHORT))
    for _ in range(4):
        talk.read(DOCUMENT)
    layers = [layer for moment in talk._moments[1:] for layer in moment.cache.layers]
    assert all(layer.tail_keys is None and layer.context.rows.keys is None for layer in layers)
    assert all(layer.context.rows.values is None for layer in layers)
    report = talk.memory
    of_rows = talk.cache.layers[0].context.rows.codes.numel() / talk.cache.layers[0].context.codes.numel()
    per_token = (1 + of_rows) / (2 * 16 * 4)  # of a token's keys and values; moments have 1, 2 and 3 of 4 texts
    assert 1.0 * per_token < report.host["earlier_turns"] / report.full_bytes < 3.0 * per_token


def test_dense_turns_take_nothing(tiny_model, talk_to):
    talk = talk_to(tiny_model("llama"))
    talk.read(DOCUMENT)
    talk.ask("Who?")
    assert talk.memory.host["earlier_turns"] == 0


@pytest.mark.parametrize("keep_turns", [0, 2])
def test_no_more_is_kept_than_asked_for(tiny_model, talk_to, keep_turns):
    model = tiny_model("llama")
    talk = talk_to(model, exact_press(), keep_turns=keep_turns)
    for question in QUESTIONS[:4]:
        talk.ask(question)
    assert sum(moment is not None for moment in talk._moments) == keep_turns
    with pytest.raises(ValueError, match=f"further back than keep_turns={keep_turns}"):
        talk.roll_back(3 - keep_turns)
    talk.roll_back(4 - keep_turns)
    assert len(talk.turns) == 4 - keep_turns
    before = state(talk)
    handle = model.model.layers[2].register_forward_hook(lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        talk.ask("Why?")  # a turn that fails is undone all the same
    handle.remove()
    assert_same(state(talk), before)


def test_no_turn_can_be_gone_back_to_that_is_not_there(tiny_model, talk_to):
    talk = talk_to(tiny_model("llama"))
    with pytest.raises(ValueError, match="no turn to undo"):
        talk.undo()
    talk.ask("Who?")
    for turn in (2, -1, 0.5):
        with pytest.raises(ValueError, match="turn"):
            talk.roll_back(turn)
    assert len(talk.turns) == 1


# --- what goes wrong --------------------------------------------------------------------------------------------------


FAILURES = [("llama", None, 1), ("llama", None, 3), ("llama", 60, 1), ("llama", 60, 2), ("llama", 60, 3)]
FAILURES += [("gemma3", None, 2), ("gemma3", 60, 2), ("qwen3_5", None, 1), ("qwen3_5", 60, 2)]


@pytest.mark.parametrize("kind,chunk_size,fails_at", FAILURES)
def test_an_interruption_leaves_the_turn_before(tiny_model, talk_to, kind, chunk_size, fails_at):
    model = tiny_model(kind)
    talk = talk_to(model, exact_press(kvzip), chunk_size=chunk_size)
    talk.read(DOCUMENT)
    talk.ask("Who?")
    before, said, n_passes = state(talk), continuations(talk), 0

    def stop(module, args, output):
        nonlocal n_passes
        n_passes += 1
        if n_passes == fails_at:
            raise KeyboardInterrupt

    for turn in (lambda: talk.ask("Why?"), lambda: talk.read(DOCUMENT)):
        handle, n_passes = model.model.layers[2].mlp.register_forward_hook(stop), 0
        with pytest.raises(KeyboardInterrupt):
            turn()
            assert n_passes < fails_at  # a text that is read at once takes one pass, and another to be scored
            raise KeyboardInterrupt
        handle.remove()
        if n_passes < fails_at:
            talk.undo()
        assert_same(state(talk), before)
    assert continuations(talk) == said


def test_an_interrupted_start_leaves_nothing(tiny_model, talk_to):
    model = tiny_model("llama")
    talk = talk_to(model, exact_press())
    handle = model.model.layers[2].register_forward_hook(lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        talk.read(DOCUMENT)
    handle.remove()
    assert talk.turns == () and not len(talk.token_ids) and talk.cache.get_seq_length() == 0
    talk.read(DOCUMENT)
    fresh = talk_to(model, exact_press())
    fresh.read(DOCUMENT)
    assert talk.ask("Who?") == fresh.ask("Who?")


def test_scores_that_a_segment_cannot_have(tiny_model, talk_to):
    """The press says so; the turn is undone, and with reseal=None the conversation goes on."""
    press = VerKVPress(SnapKVPress(window_size=64), 0.4, **EXACT)
    talk = talk_to(tiny_model("llama"), press)
    talk.read(DOCUMENT)
    before = state(talk)
    with pytest.raises(NotImplementedError, match="SnapKVPress cannot score a segment"):
        talk.ask("Who?")
    assert_same(state(talk), before)
    talk.reseal = None
    talk.ask("Who?")
    assert len(segments(talk)) == 1


@pytest.mark.parametrize(
    "text,options,error,match",
    [
        ("", {}, ValueError, "not empty"),
        (" \n", {}, ValueError, "not empty"),
        (["Who?", "What?"], {}, ValueError, "several conversations"),
        ("Who?", {"max_new_tokens": 0}, ValueError, r"read\(text\) adds a text without an answer"),
        ("Who?", {"max_new_tokens": 4000}, ValueError, "window of 4096 tokens does not hold"),
        ("Who?" * 1100, {}, ValueError, "roll back"),
        ("Who?", {"past_key_values": None}, ValueError, "past_key_values is the conversation's own"),
        ("Who?", {"max_length": 10}, ValueError, "max_new_tokens"),
        ("Who?", {"num_beams": 2}, NotImplementedError, "num_beams must be 1"),
        ("Who?", {"num_return_sequences": 2}, NotImplementedError, "num_return_sequences must be 1"),
        ("Who?", {"no_such_option": 1}, ValueError, "no_such_option"),
    ],
)
def test_questions_that_are_refused(tiny_model, talk_to, text, options, error, match):
    model = tiny_model("llama")
    talk = talk_to(model, exact_press())
    talk.read(DOCUMENT)
    before, passes = state(talk), []
    handle = model.register_forward_hook(lambda *args: passes.append(1))
    for ask in (talk.ask, lambda *args, **kwargs: list(talk.stream(*args, **kwargs))):
        with pytest.raises(error, match=match):
            ask(text, **options)
    if not options:
        with pytest.raises(error, match=match):
            talk.read(text)
    handle.remove()
    assert not passes
    assert_same(state(talk), before)


def test_presses_of_others_are_refused(tiny_model, talk_to):
    with pytest.raises(ValueError, match=r"VerKVPress\(SnapKVPress"):
        talk_to(tiny_model("llama"), KnormPress(0.5))


@pytest.mark.parametrize(
    "options", [{"chunk_size": 0}, {"reseal": 0}, {"keep_turns": -1}, {"max_new_tokens": 0}, {"max_length": 9}]
)
def test_settings_out_of_range(tiny_model, talk_to, options):
    with pytest.raises(ValueError, match=next(iter(options))):
        talk_to(tiny_model("llama"), **options)


def test_chunks_not_longer_than_the_window_are_refused(tiny_model, talk_to):
    talk = talk_to(tiny_model("llama"), exact_press(), chunk_size=8)
    with pytest.raises(ValueError, match="chunk_size=8 must be larger than the press' window"):
        talk.read(DOCUMENT)
    assert talk.turns == () and talk.cache.get_seq_length() == 0


@pytest.mark.parametrize("press", [None, exact_press()], ids=["dense", "sealed"])
def test_a_cache_that_was_used_otherwise(tiny_model, talk_to, press):
    model = tiny_model("llama")
    talk = talk_to(model, press)
    talk.read(DOCUMENT)
    before = state(talk)
    talk.ask("Who?")
    model(torch.tensor([[5, 6, 7]]), past_key_values=talk.cache)
    with pytest.raises(ValueError, match="it was used otherwise"):
        talk.ask("Why?")
    talk.undo()
    assert_same(state(talk), before)


def test_another_model_is_refused(tiny_model, talk_to):
    talk = talk_to(tiny_model("llama"), exact_press())
    talk.read(DOCUMENT)
    before, own = state(talk), talk.model
    talk.model = tiny_model("llama", num_key_value_heads=1)
    with pytest.raises(ValueError, match="use the cache with its own model"):
        talk.ask("Who?")
    talk.model = own
    assert_same(state(talk), before)


# --- streams ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("press", [None, exact_press(kvzip)], ids=["dense", "sealed"])
def test_a_stream_gives_the_answer_piece_by_piece(tiny_model, talk_to, tokenizer, press, capsys):
    talks = [talk_to(tiny_model("llama"), press) for _ in range(3)]
    for talk in talks:
        talk.read(DOCUMENT)
    pieces = list(talks[0].stream("Who?", max_new_tokens=9))
    answer = talks[1].ask("Who?", max_new_tokens=9)
    assert "".join(pieces) == answer and talks[0].turns[-1].answer == answer
    assert_same(state(talks[0]), state(talks[1]))
    talks[2].ask("Who?", max_new_tokens=9, streamer=TextStreamer(tokenizer, skip_prompt=True))
    assert capsys.readouterr().out.rstrip("\n") == answer.rstrip("\n")


@pytest.mark.parametrize("n_taken", [0, 1])
def test_a_stream_that_is_broken_off_is_no_turn(tiny_model, talk_to, tokenizer, n_taken):
    """Also if the answer was complete before its pieces were taken."""
    tokenizer = copy.deepcopy(tokenizer)
    talk = talk_to(tiny_model("llama"), exact_press())
    talk.read(DOCUMENT)
    before = state(talk)
    for n_tokens in (3, 400):
        stream = talk.stream("Who?", max_new_tokens=n_tokens, logits_processor=[_Words()])
        for _ in range(n_taken):
            next(stream)
        stream.close()
        assert_same(state(talk), before)


class _Words:
    """Only letters and spaces in turn, so that a streamer has pieces to show."""

    def __call__(self, input_ids, scores):
        shown = 4 if input_ids.shape[1] % 2 else 50
        return scores.masked_fill(torch.arange(scores.shape[1]) != shown, -1e9)


def test_nothing_else_is_done_during_a_stream(tiny_model, talk_to, tmp_path):
    talk = talk_to(tiny_model("llama"))
    stream = talk.stream("Who?", max_new_tokens=2000, logits_processor=[_Words()])
    next(stream)
    for action in (lambda: talk.ask("Why?"), talk.branch, lambda: talk.roll_back(0), lambda: talk.save(tmp_path)):
        with pytest.raises(RuntimeError, match="in the middle of a turn"):
            action()
    stream.close()
    assert talk.turns == () and talk.ask("Why?")


def test_a_stream_fails_where_its_pieces_are_taken(tiny_model, talk_to):
    model = tiny_model("llama")
    talk = talk_to(model)
    handle = model.model.layers[2].register_forward_hook(lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        list(talk.stream("Who?"))
    handle.remove()
    assert talk.turns == () and talk.cache.get_seq_length() == 0


# --- files ------------------------------------------------------------------------------------------------------------

RESUME = """
import json, sys, torch
sys.path.insert(0, {helpers!r})
from segment_helpers import kvzip
from transformers import AutoModelForCausalLM, AutoTokenizer
from verkv import Conversation, VerKVPress
model = AutoModelForCausalLM.from_pretrained({folder!r}, attn_implementation="sdpa").eval()
tokenizer = AutoTokenizer.from_pretrained({folder!r})
press = VerKVPress(kvzip(), 0.5, sketch="rope_pair", n_sink=4, n_local=8)
talk = Conversation.load({saved!r}, model, tokenizer, press)
print(json.dumps([[talk.ask(q) for q in {questions!r}], talk.token_ids.tolist()]))
"""


def test_another_process_goes_on(tiny_model, talk_to, tokenizer, tmp_path):
    """Answers are identical, through further reseals too: draws go on where they were."""
    model = tiny_model("llama")
    talk = talk_to(model, VerKVPress(kvzip(), 0.5, sketch="rope_pair", **SHORT))
    talk.read(DOCUMENT)
    talk.ask("Who?")
    talk.save(tmp_path / "talk")
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    helpers = str(Path(__file__).parents[1] / "helpers")
    code = RESUME.format(
        helpers=helpers, folder=str(tmp_path / "model"), saved=str(tmp_path / "talk"), questions=QUESTIONS[:4]
    )
    source = str(Path(verkv.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    answers, ids = json.loads(done.stdout.strip().splitlines()[-1])
    assert [talk.ask(question) for question in QUESTIONS[:4]] == answers
    assert talk.token_ids.tolist() == ids


@pytest.mark.parametrize("kind", ["llama", "gemma3", "qwen3_5"])
@pytest.mark.parametrize("press", ["dense", "verkv", "transform", "sample", "by size"])
def test_a_loaded_conversation_draws_and_says_the_same(tiny_model, talk_to, tokenizer, tmp_path, kind, press):
    talk = talk_to(tiny_model(kind), PRESSES[press](), system="Be brief.", chunk_size=70)
    talk.read(DOCUMENT)
    talk.ask("Who?")
    talk.save(tmp_path)
    loaded = Conversation.load(tmp_path, tiny_model(kind), tokenizer, PRESSES[press]())
    assert loaded.turns == talk.turns and torch.equal(loaded.token_ids, talk.token_ids)
    assert (loaded.system, loaded.chunk_size, loaded.reseal, loaded.options) == ("Be brief.", 70, 1, talk.options)
    for t in (talk, loaded):
        t.ask("Why?")
        t.read(DOCUMENT)
        t.ask("When?")
    assert loaded.turns == talk.turns
    for one, other in zip(talk.cache.layers, loaded.cache.layers, strict=True):
        if getattr(one, "sealed", False):
            assert torch.equal(one.context.rows.codes, other.context.rows.codes)
            assert torch.equal(one.context.rows.keys, other.context.rows.keys)
    loaded.undo()
    loaded.roll_back(2)
    with pytest.raises(ValueError, match="loaded after it"):
        loaded.roll_back(1)
    assert len(loaded.turns) == 2


def test_a_start_is_saved(tiny_model, talk_to, tokenizer, tmp_path):
    model = tiny_model("llama")
    talk_to(model, exact_press()).save(tmp_path)
    loaded = Conversation.load(tmp_path, model, tokenizer, exact_press(), max_new_tokens=4)
    assert loaded.turns == () and loaded.ask("Who?") == talk_to(model, exact_press(), max_new_tokens=4).ask("Who?")


def test_saving_again_replaces_both_files(tiny_model, talk_to, tokenizer, tmp_path):
    model = tiny_model("llama")
    talk = talk_to(model, exact_press())
    for question in QUESTIONS[:2]:
        talk.ask(question)
        talk.save(tmp_path)
    assert sorted(p.suffix for p in tmp_path.iterdir()) == [".kvtc", ".vkvc"]
    assert Conversation.load(tmp_path, model, tokenizer, exact_press()).turns == talk.turns


def test_files_that_do_not_fit(tiny_model, talk_to, tokenizer, tmp_path):
    model = tiny_model("llama")
    talk = talk_to(model, exact_press())
    talk.read(DOCUMENT)
    talk.save(tmp_path)
    with pytest.raises(MismatchError, match="other weights"):
        Conversation.load(tmp_path, tiny_model("llama", seed=1), tokenizer)
    with pytest.raises(MismatchError, match="other layers"):
        Conversation.load(tmp_path, tiny_model("qwen3"), tokenizer)
    other = copy.deepcopy(tokenizer)
    other.chat_template = None
    with pytest.raises(MismatchError, match="another tokenizer"):
        Conversation.load(tmp_path, model, other)
    with pytest.raises(FormatError, match="no file"):
        Conversation.load(tmp_path / "nothing", model, tokenizer)
    (context,) = tmp_path.glob("*.kvtc")
    with pytest.raises(FormatError, match="no stored conversation"):
        (tmp_path / "other").mkdir()
        (tmp_path / "other/conversation.vkvc").write_bytes(context.read_bytes())
        Conversation.load(tmp_path / "other", model, tokenizer)
    file = tmp_path / "conversation.vkvc"
    data = bytearray(file.read_bytes())
    for place in (60, len(data) - 70):
        damaged = data.copy()
        damaged[place] ^= 1
        file.write_bytes(damaged)
        with pytest.raises(CorruptFileError):
            Conversation.load(tmp_path, model, tokenizer)
    file.write_bytes(data)
    context.unlink()
    with pytest.raises(CodecError):
        Conversation.load(tmp_path, model, tokenizer)


# --- a real model -----------------------------------------------------------------------------------------------------


@pytest.mark.real_model
@pytest.mark.slow
def test_turns_with_a_real_model(demo_model, tmp_path):
    """Told early and asked late, after reseals: dense attention's answers, from a file and after going back, too."""
    model, tokenizer = demo_model
    press = VerKVPress(verkv.KVzipPress(tokenizer=tokenizer), 0.75, sketch="exact", n_sink=16, n_local=16)
    talks = [Conversation(model, tokenizer, p, reseal=40, max_new_tokens=16, do_sample=False) for p in (None, press)]
    asked, answers = "What is the special magic number for tomato?", []
    for talk in talks:
        talk.read("One of the special magic numbers for tomato is: 4711. " + " ".join(prose_paragraphs()[:2]))
        answers.append(["".join(talk.stream("What is this text about?"))])
        talk.ask("Say hello.", max_new_tokens=4)
        talk.roll_back(2)
        answers[-1].append(talk.ask(asked))
    assert answers[0] == answers[1] and "4711" in answers[0][1]
    dense, sealed = talks
    assert torch.equal(dense.token_ids, sealed.token_ids) and len(segments(sealed)) >= 2
    messages = []
    for question, answer in zip([turn.text for turn in sealed.turns[1:]], answers[0], strict=True):
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    messages[0]["content"] = f"{sealed.turns[0].text}\n\n{messages[0]['content']}"
    whole = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
    assert whole[: len(sealed.token_ids)] == sealed.token_ids.tolist()
    sealed.save(tmp_path)
    loaded = Conversation.load(tmp_path, model, tokenizer, press)
    assert loaded.ask(asked) == sealed.ask(asked) == dense.ask(asked)


def test_dense_conversations_need_no_kvpress(tiny_model, talk_to, tokenizer, tmp_path):
    model = tiny_model("llama")
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    code = f"""
import sys
sys.modules["kvpress"] = None
from transformers import AutoModelForCausalLM, AutoTokenizer
from verkv import Conversation
folder = {str(tmp_path)!r}
talk = Conversation(AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder))
talk.read("It was a dark and stormy night.")
talk.ask("Who?", max_new_tokens=3)
talk.branch().undo()
print(talk)
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(verkv.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and "2 turns" in done.stdout, done.stderr
