"""Presses in KVPress' pipeline, in batches, and inside ``generate``."""

import pytest
import torch
from kvpress import (
    ExpectedAttentionPress,
    KnormPress,
    KVPressTextGenerationPipeline,
    ObservedAttentionPress,
    SnapKVPress,
    TOVAPress,
)
from press_helpers import SHORT, decode, full_layers, left_padded, positions, prefill, random_ids
from transformers import AutoTokenizer, DynamicCache

from verkv import KVzipPress, PoissonCompPress, VerKVPress, make_cache
from verkv.demo_model import demo_model_path

PRESSES = [PoissonCompPress, VerKVPress]
CONTEXT = "The lighthouse keeper counted the ships that passed before dawn and wrote each name in a narrow book. " * 6
QUESTIONS = ["Who counted the ships?", "What is in the book, and how narrow is it?", "Who counted the ships?"]
N_NEW = 6
SCORERS = {
    "knorm": KnormPress,
    "snapkv": lambda: SnapKVPress(window_size=8),
    "expected_attention": lambda: ExpectedAttentionPress(n_future_positions=16),
    "tova": TOVAPress,
    "observed_attention": ObservedAttentionPress,
}
EXACT = {"epsilon": 1e-9, **SHORT}  # VerKV then fetches everything that matters: dense attention through all its parts


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(demo_model_path())


@pytest.fixture(scope="module")
def pipe(tiny_model, tokenizer):
    """``pipe(kind, attn_implementation)``: KVPress' pipeline over a tiny model with SmolLM2's vocabulary."""
    pipelines = {}

    def build(kind, attn_implementation="sdpa"):
        if (kind, attn_implementation) not in pipelines:
            model = tiny_model(kind, attn_implementation, vocab_size=49152, eos_token_id=49151)
            pipelines[kind, attn_implementation] = KVPressTextGenerationPipeline(model=model, tokenizer=tokenizer)
        return pipelines[kind, attn_implementation]

    return build


def ask(pipeline, press, questions=QUESTIONS, **kwargs):
    return pipeline(CONTEXT, questions=questions, press=press, max_new_tokens=N_NEW, **kwargs)["answers"]


# --- KVPress' pipeline ------------------------------------------------------------------------------------------------


def assert_context_is_kept(pipeline, press, n_full, exact=False, **kwargs):
    """Answers do not depend on the questions asked before; the statistics are those of these questions."""
    answers = ask(pipeline, press, **kwargs)
    assert answers[0] == answers[2] != answers[1]
    assert len(press.stats.sealed_layers) == n_full
    assert press.stats.n_passes == 3 * N_NEW  # the question and N_NEW - 1 decode steps
    assert ask(pipeline, press, QUESTIONS[1:2]) == answers[1:2]
    assert press.stats.n_passes == N_NEW
    if exact:
        assert answers == ask(pipeline, None)


@pytest.mark.parametrize("press_class", PRESSES)
@pytest.mark.parametrize("scorer", SCORERS)
def test_questions_about_one_context(pipe, press_class, scorer):
    pipeline = pipe("llama", "eager" if scorer == "observed_attention" else "sdpa")
    assert_context_is_kept(pipeline, press_class(SCORERS[scorer](), 0.6, **SHORT), n_full=4)


@pytest.mark.parametrize("scorer", [s for s in SCORERS if s != "observed_attention"])
def test_questions_about_one_context_of_qwen3(pipe, scorer):
    assert_context_is_kept(pipe("qwen3"), VerKVPress(SCORERS[scorer](), 0.6, **EXACT), n_full=4, exact=True)


@pytest.mark.parametrize("scorer", ["knorm", "snapkv", "tova", "kvzip"])
def test_questions_about_one_context_of_gemma3(pipe, tokenizer, scorer):
    """One full layer beside five sliding ones; the plain cache that the pipeline makes, and ours."""
    press = VerKVPress((SCORERS | {"kvzip": lambda: KVzipPress(tokenizer=tokenizer)})[scorer](), 0.6, **EXACT)
    pipeline = pipe("gemma3")
    assert_context_is_kept(pipeline, press, n_full=1, exact=True)
    assert_context_is_kept(pipeline, press, n_full=1, exact=True, cache=make_cache(pipeline.model.config))


@pytest.mark.parametrize("sketch", ["rope_pair", "exact"])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3"])
def test_replay_and_both_sketches(pipe, tokenizer, kind, sketch):
    press = VerKVPress(KVzipPress(tokenizer=tokenizer, chunk_size=50), 0.6, sketch=sketch, **EXACT)
    assert_context_is_kept(pipe(kind), press, n_full=1 if kind == "gemma3" else 4, exact=True)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3"])
def test_eviction_alone(pipe, tokenizer, kind):
    press = KVzipPress(0.5, tokenizer=tokenizer)
    assert_context_is_kept(pipe(kind), press, n_full=1 if kind == "gemma3" else 4)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3"])
def test_verkv_without_compression_answers_as_dense(pipe, tokenizer, kind):
    """A ratio of 1e-6: everything is sealed, sketched, certified and fetched, and next to nothing is missing."""
    for scorer in (KnormPress(), KVzipPress(tokenizer=tokenizer)):
        press = VerKVPress(scorer, 1e-6, epsilon=1e-4, **SHORT)
        assert ask(pipe(kind), press) == ask(pipe(kind), None)
        assert press.stats.sealed_layers


def test_poissoncomp_without_compression_is_nearly_dense(tiny_model):
    """At a ratio of 1e-6 PoissonComp still pays one byte a row for r: 1 / 129 of the rows here are not drawn.

    With alpha = 1 all tokens are equally likely to be among these. The errors are bounded loosely.
    """
    model = tiny_model("llama")
    ids, question = random_ids(1, 200), random_ids(1, 4, seed=2)
    kept, errors = [], []
    for seed in range(10):
        press = PoissonCompPress(KnormPress(), 1e-6, alpha=1.0, seed=seed, audit=True, **SHORT)
        cache = prefill(model, ids, press)
        decode(model, question, cache)
        kept.append(sum(len(layer.context.rows.keys) for layer in cache.layers) / (4 * 2 * 200))
        errors.append(press.stats.relative_errors().mean())
    assert 0.985 < sum(kept) / 10 < 0.997
    assert sum(errors) / 10 < 0.02


@pytest.mark.parametrize("press_class", PRESSES)
def test_a_registered_press_serves_many_contexts(pipe, press_class):
    """As in KVPress' evaluation: one object, its ratio set later."""
    press = press_class(KnormPress(), **SHORT)
    pipeline = pipe("llama")
    assert press.compression_ratio == 0.0
    assert ask(pipeline, press) == ask(pipeline, None)
    assert press.stats.sealed_layers == () and "compression_ratio is 0" in press.stats.notes[0]

    press.compression_ratio = 0.6
    first, stats = ask(pipeline, press), press.stats
    pipeline("Another context. " * 40, question="What?", press=press, max_new_tokens=2)
    assert press.stats is not stats and press.stats.n_passes == 2 and stats.n_passes == 3 * N_NEW
    assert press.stats.full_bytes != stats.full_bytes
    assert ask(pipeline, press) == first


def test_answer_prefix_and_single_question(pipe):
    press = VerKVPress(KnormPress(), 0.6, **EXACT)
    kwargs = {"question": QUESTIONS[0], "answer_prefix": "It was", "max_new_tokens": 4}
    assert pipe("llama")(CONTEXT, press=press, **kwargs) == pipe("llama")(CONTEXT, press=None, **kwargs)


@pytest.mark.real_model
@pytest.mark.parametrize("press_class", PRESSES)
def test_demo_model(demo_model, press_class):
    model, tokenizer = demo_model
    pipeline = KVPressTextGenerationPipeline(model=model, tokenizer=tokenizer)
    context = CONTEXT * 2 + "\nMaria lives in Lisbon and works as a baker.\n" + CONTEXT
    questions = ["\nIn which city does Maria live?", "\nWhat did the keeper count?", "\nIn which city does Maria live?"]
    kwargs = {"questions": questions, "max_new_tokens": 8}
    dense = pipeline(context, press=None, **kwargs)["answers"]
    assert "Lisbon" in dense[0]
    press = press_class(KVzipPress(tokenizer=tokenizer), 1e-6, n_sink=8, n_local=16)
    assert pipeline(context, press=press, **kwargs)["answers"] == dense
    assert len(press.stats.sealed_layers) == 30

    press.compression_ratio = 0.5
    answers = pipeline(context, press=press, **kwargs)["answers"]
    assert answers[0] == answers[2]
    assert "Lisbon" in answers[0]


# --- batches ----------------------------------------------------------------------------------------------------------


def prompts(padded):
    rows = [random_ids(1, 70 if padded else 100), random_ids(1, 100, seed=2)]
    return left_padded(rows)


@pytest.mark.parametrize("padded", [False, True], ids=["even", "padded"])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3"])
def test_batch_through_the_backbone(tiny_model, kind, padded):
    """Question and decode steps of two rows against the dense cache."""
    model = tiny_model(kind)
    ids, mask = prompts(padded)
    press = VerKVPress(KnormPress(), 0.6, **EXACT)
    options = {"attention_mask": mask, "position_ids": positions(mask)}
    caches = [prefill(model, ids, p, **options) for p in (press, None)]
    assert press.stats.sealed_layers == tuple(full_layers(caches[0])) != ()
    for n_new in (5, 1, 1):
        mask = torch.cat([mask, torch.ones(2, n_new, dtype=torch.long)], 1)
        new = random_ids(2, n_new, seed=n_new)
        options = {"attention_mask": mask, "position_ids": positions(mask)[:, -n_new:]}
        logits, expected = (decode(model, new, cache, **options) for cache in caches)
        torch.testing.assert_close(logits, expected, atol=2e-4, rtol=1e-4)
    assert press.stats.n_passes == 3 and press.stats.fetched() > 0


@pytest.mark.parametrize("padded", [False, True], ids=["even", "padded"])
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_batch_through_generate(tiny_model, kind, padded):
    model = tiny_model(kind)
    ids, mask = prompts(padded)
    inputs = {"input_ids": ids, "attention_mask": mask, "max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
    dense = model.generate(**inputs)
    press = VerKVPress(KnormPress(), 0.6, **EXACT)
    with press(model):
        assert torch.equal(model.generate(**inputs), dense)
    assert press.stats.n_passes == 7  # the first token comes from the prefill
    assert press.stats.decisions() == len(press.stats.sealed_layers) * 2 * 4 * 7


@pytest.mark.parametrize("press_class", PRESSES)
def test_padded_batch_with_sampling_generates(tiny_model, press_class):
    """The sample of a row is not that of the row alone, so only the certificate's own measure can be compared."""
    model = tiny_model("llama")
    ids, mask = prompts(padded=True)
    press = press_class(SnapKVPress(window_size=8), 0.6, audit=True, **SHORT)
    with press(model):
        out = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=6, min_new_tokens=6, do_sample=False)
    assert out.shape == (2, 106)
    if press_class is VerKVPress:
        assert press.stats.violation_rate() <= 0.1


@pytest.mark.parametrize(("press_class", "options"), [(PoissonCompPress, SHORT), (VerKVPress, EXACT)])
def test_same_prompts_share_a_context(tiny_model, press_class, options):
    model = tiny_model("llama")
    row, question = random_ids(1, 100), random_ids(3, 4, seed=5)
    press = press_class(KnormPress(), 0.6, **options)
    cache = prefill(model, row.expand(3, -1), press)
    shared = press.memory_report()
    single = prefill(model, row, press)
    alone = press.memory_report()
    assert (shared.host, shared.full_bytes) == (alone.host, alone.full_bytes)
    assert shared.device == alone.device
    logits = decode(model, question, cache)
    for i in range(3):
        single.crop(100)
        torch.testing.assert_close(logits[i : i + 1], decode(model, question[i : i + 1], single), atol=2e-4, rtol=1e-4)


def test_different_prompts_share_nothing(tiny_model):
    model = tiny_model("llama")
    press = VerKVPress(KnormPress(), 0.6, **SHORT)
    cache = prefill(model, random_ids(2, 100), press)
    assert cache.layers[0].context.beams == 1
    assert press.memory_report().full_bytes == 4 * 2 * 2 * 2 * 100 * 16 * 4


# --- generate ---------------------------------------------------------------------------------------------------------


MODES = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "beams_several": {"num_beams": 4, "num_return_sequences": 2},
    "prompt_lookup": {"prompt_lookup_num_tokens": 3},
    "chunked_prefill": {"prefill_chunk_size": 60},
}


def repeating_prompt():
    """Its end has been seen before, so prompt lookup guesses tokens before the prefill, wrong ones."""
    part = random_ids(1, 50)
    return torch.cat([part, part, part[:, :10]], 1)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("make", [None, lambda config: DynamicCache(), make_cache], ids=["own", "dynamic", "verkv"])
def test_generate_inside_the_block(tiny_model, make, mode):
    model, ids = tiny_model("llama"), repeating_prompt()
    options = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False, **MODES[mode]}
    dense = model.generate(ids, **options)
    press = VerKVPress(KnormPress(), 0.6, **EXACT)
    kwargs = {} if make is None else {"past_key_values": make(model.config)}
    with press(model):
        assert torch.equal(model.generate(ids, **options, **kwargs), dense)
    assert press.stats.sealed_layers == (0, 1, 2, 3)
    assert press.stats.n_passes > 0
    n_sealed = 60 if mode == "chunked_prefill" else 110  # later chunks are new tokens, and exact
    assert press.stats.full_bytes == 4 * 2 * 2 * n_sealed * 16 * 4


@pytest.mark.parametrize("press_class", PRESSES)
def test_prompt_lookup_gives_what_greedy_decoding_gives(tiny_model, press_class):
    model, ids = tiny_model("llama"), repeating_prompt()
    options = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}
    # Nothing is fetched: what is fetched for one of several candidates is exact for the others, too.
    press = press_class(KnormPress(), 0.5, **SHORT, **({"epsilon": 50.0} if press_class is VerKVPress else {}))
    with press(model):
        greedy = model.generate(ids, **options)
        assert press.stats.fetch_rate() == 0.0
        full_bytes = press.stats.full_bytes
        assert torch.equal(model.generate(ids, prompt_lookup_num_tokens=3, **options), greedy)
    assert press.stats.full_bytes == full_bytes


@pytest.mark.parametrize("scorer", ["knorm", "kvzip"])
def test_prefill_with_logits_for_several_tokens_is_sealed_in_the_end(tiny_model, tokenizer, scorer):
    """They are kept back until it is known that no candidate is among them."""
    model = tiny_model("llama", vocab_size=49152)
    inner = KVzipPress(tokenizer=tokenizer) if scorer == "kvzip" else KnormPress()
    ids, question = random_ids(1, 100), random_ids(1, 4, seed=3)
    press = VerKVPress(inner, 0.5, **SHORT)
    cache = DynamicCache()
    with torch.no_grad(), press(model):
        model(input_ids=ids, past_key_values=cache, logits_to_keep=10)
        assert not full_layers(cache)
    assert full_layers(cache) == [0, 1, 2, 3]
    assert torch.equal(decode(model, question, cache), decode(model, question, prefill(model, ids, press)))


def test_candidates_of_one_prefill_do_not_delay_the_next(tiny_model):
    model, ids = tiny_model("llama"), random_ids(1, 100)
    press = VerKVPress(KnormPress(), 0.5, **SHORT)
    caches = [DynamicCache() for _ in range(3)]
    with torch.no_grad(), press(model):
        model(input_ids=ids, past_key_values=caches[0], logits_to_keep=10)
        model.model(input_ids=ids, past_key_values=caches[1])  # the first is sealed now
        assert full_layers(caches[0]) == full_layers(caches[1]) == [0, 1, 2, 3]
        model(input_ids=ids[:, :1], past_key_values=caches[1], logits_to_keep=2)
        model.model(input_ids=ids, past_key_values=caches[2])
        assert full_layers(caches[2]) == [0, 1, 2, 3]


def test_beams_share_the_context(tiny_model):
    model, ids = tiny_model("llama"), random_ids(1, 100)
    press = VerKVPress(KnormPress(), 0.6, **SHORT)
    cache = make_cache(model.config)
    with press(model):
        model.generate(ids, num_beams=3, max_new_tokens=5, past_key_values=cache)
    for layer in cache.layers:
        assert (layer.context.n_contexts, layer.context.beams, layer.tail_keys.shape[0]) == (1, 3, 3)
    assert sum(press.memory_report().host.values()) == 4 * 2 * 2 * 100 * 16 * 4


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
@pytest.mark.parametrize("make", [lambda config: DynamicCache(config=config), make_cache], ids=["dynamic", "verkv"])
def test_cache_can_be_reset_and_used_again(tiny_model, make, kind):
    model = tiny_model(kind)
    press = VerKVPress(KnormPress(), 0.6, **EXACT)
    cache = prefill(model, random_ids(1, 130, seed=8), press, cache=make(model.config))
    decode(model, random_ids(1, 3), cache)
    cache.reset()
    assert cache.get_seq_length() == 0
    ids, question = random_ids(1, 90), random_ids(1, 4, seed=2)
    prefill(model, ids, press, cache=cache)
    assert full_layers(cache) and press.stats.n_passes == 0
    expected = decode(model, question, prefill(model, ids))
    torch.testing.assert_close(decode(model, question, cache), expected, atol=2e-4, rtol=1e-4)


def test_only_the_first_pass_over_an_empty_cache_is_a_prefill(tiny_model):
    """Inside the block, later passes add exact tokens and neither score nor seal again."""
    model = tiny_model("llama")
    press = VerKVPress(KnormPress(), 0.6, **EXACT)
    cache = DynamicCache()
    ids = random_ids(1, 100)
    with torch.no_grad(), press(model):
        model.model(input_ids=ids[:, :70], past_key_values=cache)
        contexts = [layer.context for layer in cache.layers]
        logits = model(input_ids=ids[:, 70:], past_key_values=cache).logits
    assert all(layer.context is context for layer, context in zip(cache.layers, contexts, strict=True))
    assert cache.get_seq_length() == 100
    with torch.no_grad():
        torch.testing.assert_close(logits, model(input_ids=ids).logits[:, 70:], atol=2e-4, rtol=1e-4)


def test_a_filled_cache_is_left_alone(tiny_model):
    """A cache that was prefilled outside the block is not compressed."""
    model = tiny_model("llama")
    cache = prefill(model, random_ids(1, 100))
    press = VerKVPress(KnormPress(), 0.6, **SHORT)
    with torch.no_grad(), press(model):
        model(input_ids=random_ids(1, 4), past_key_values=cache)
    assert full_layers(cache) == [] and press.stats is None
