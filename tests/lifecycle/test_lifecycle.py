"""A model is left as it was found: after errors, with several caches, threads and presses, in every mode of torch."""

import contextlib
import copy
import pickle
import sys
import threading
import time
import warnings
from dataclasses import dataclass

import pytest
import torch
from kvpress import AdaKVPress, ExpectedAttentionPress, KnormPress, ScorerPress, SnapKVPress
from press_helpers import SHORT, decode, full_layers, prefill, random_ids, resident_rows
from torch.testing import assert_close
from transformers import DynamicCache

from verkv import PoissonCompPress, VerKVPress, make_cache
from verkv.presses.hooks import register_hook

N_CONTEXT = 100
EXACT = {"epsilon": 1e-9, "seed": 0, **SHORT}  # everything that was not drawn is fetched
TOLERANCE = {"atol": 1e-4, "rtol": 0.0}


@pytest.fixture
def model(tiny_model):
    return tiny_model("llama")


@pytest.fixture
def ids():
    return random_ids(1, N_CONTEXT)


@pytest.fixture
def question():
    return random_ids(1, 5, seed=7)


def exact_press(scorer=None):
    return VerKVPress(scorer or KnormPress(), 0.5, **EXACT)


def sampling_press(scorer=None, **options):
    return PoissonCompPress(scorer or KnormPress(), 0.5, **{"seed": 0, **SHORT, **options})


def dense_logits(model, *parts):
    with torch.no_grad():
        return model(torch.cat(parts, 1), use_cache=False).logits[:, -parts[-1].shape[1] :]


def everything_on(model):
    """All attributes of all modules by identity, hooks and parameters included, and the class of each."""
    found = {}
    for name, module in model.named_modules():
        attributes = {key: id(value) for key, value in module.__dict__.items()}
        for key, value in module.__dict__.items():
            if isinstance(value, (dict, set, list)):  # hooks, buffers, parameters, submodules
                attributes[key] = [(str(k), id(value[k])) for k in value] if isinstance(value, dict) else list(value)
        found[name] = (type(module), module.training, attributes)
    found["config"] = {k: v for k, v in model.config.__dict__.items() if k != "transformers_version"}
    found["generation_config"] = model.generation_config.to_dict()
    return found


# --- errors leave nothing behind --------------------------------------------------------------------------------------


@dataclass
class Failing(ScorerPress):
    """Raises while the scores of one layer are taken."""

    error: type = KeyError

    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        if module.layer_idx == 2:
            raise self.error
        return keys.norm(dim=-1)


def raise_in_block(model, ids, press, error):
    with press(model):
        raise error


def raise_after_prefill(model, ids, press, error):
    with press(model):
        model.model(ids, past_key_values=DynamicCache())
        raise error


def raise_in_generate(model, ids, press, error):
    def stop(sequence, scores):
        if sequence.shape[1] > N_CONTEXT + 2:
            raise error
        return torch.zeros(len(sequence), dtype=torch.bool)

    with press(model):
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, stopping_criteria=[stop])


def raise_in_a_layer(model, ids, press, error):
    def stop(*args):
        raise error

    with press(model):
        handle = model.model.layers[1].mlp.register_forward_hook(stop)
        try:
            model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8)
        finally:
            handle.remove()


def raise_in_the_scorer(model, ids, press, error):
    press.press = Failing(error=error)
    with press(model):
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8)


def raise_in_a_generator(model, ids, press, error):
    """The block is left by closing what it is in."""

    def tokens():
        with press(model):
            model.model(ids, past_key_values=DynamicCache())
            yield 1

    running = tokens()
    next(running)
    running.close()
    raise error


@pytest.mark.parametrize("error", [KeyError, KeyboardInterrupt, SystemExit, MemoryError])
@pytest.mark.parametrize(
    "fail",
    [
        raise_in_block,
        raise_after_prefill,
        raise_in_generate,
        raise_in_a_layer,
        raise_in_the_scorer,
        raise_in_a_generator,
    ],
)
@pytest.mark.parametrize("press_class", [VerKVPress, PoissonCompPress])
@torch.no_grad()
def test_an_error_leaves_the_model_as_it_was(model, ids, question, press_class, fail, error):
    prefill(model, ids)  # KVPress' wrapper of attention functions notes on the modules that nothing is masked
    before = everything_on(model)
    press = press_class(SnapKVPress(window_size=4), 0.5, **SHORT)
    with pytest.raises(error):
        fail(model, ids, press, error)
    assert everything_on(model) == before
    cache = prefill(model, ids, exact_press())  # and it can be compressed again
    assert_close(decode(model, question, cache), dense_logits(model, ids, question), **TOLERANCE)
    assert everything_on(model) == before


def test_a_block_without_an_error_leaves_the_model_as_it_was(model, ids):
    prefill(model, ids)
    before = everything_on(model)
    for press in (exact_press(), sampling_press(SnapKVPress(window_size=4)), sampling_press(AdaKVPress(KnormPress()))):
        with press(model):
            model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4)
        assert press.stats.sealed_layers and everything_on(model) == before


# --- several caches and threads on one model --------------------------------------------------------------------------


@torch.no_grad()
def test_two_caches_take_turns_on_one_model(model):
    contexts = [random_ids(1, N_CONTEXT, seed=1), random_ids(1, 77, seed=2)]
    presses = [exact_press(), sampling_press()]
    steps = [random_ids(1, 6, seed=3), random_ids(1, 6, seed=4)]
    alone = []
    for context, press, tokens in zip(contexts, presses, steps, strict=True):
        cache = prefill(model, context, press)
        alone.append([decode(model, tokens[:, i : i + 1], cache) for i in range(6)])

    caches = [prefill(model, context, press) for context, press in zip(contexts, presses, strict=True)]
    for i in range(6):
        for logits, tokens, cache in zip(alone, steps, caches, strict=True):
            assert torch.equal(decode(model, tokens[:, i : i + 1], cache), logits[i])
    assert [press.stats.n_passes for press in presses] == [6, 6]
    assert [press.stats.full_bytes for press in presses] == [cache.stats.full_bytes for cache in caches]


@torch.no_grad()
def test_one_cache_sealed_in_the_block_of_another(model, question):
    """Both prefilled in one block, the second while the first is in use."""
    first, second, press = DynamicCache(), DynamicCache(), exact_press()
    contexts = random_ids(1, N_CONTEXT, seed=1), random_ids(1, 77, seed=2)
    with press(model):
        model.model(contexts[0], past_key_values=first)
        decode(model, question[:, :2], first)
        model.model(contexts[1], past_key_values=second)
        assert press.stats is second.stats is not first.stats
        answers = decode(model, question[:, 2:], first), decode(model, question, second)
    assert_close(answers[0], dense_logits(model, contexts[0], question)[:, 2:], **TOLERANCE)
    assert_close(answers[1], dense_logits(model, contexts[1], question), **TOLERANCE)


MAKE_PRESS = {
    "verkv": exact_press,
    "snapkv": lambda: VerKVPress(SnapKVPress(window_size=4), 0.5, **{**EXACT, "epsilon": 0.2}),
    "poisson": sampling_press,
    "adakv": lambda: sampling_press(AdaKVPress(SnapKVPress(window_size=4))),
}


@pytest.fixture
def eager_threads():
    """Threads take turns so often that they meet where they seldom do."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.parametrize("kind", MAKE_PRESS)
def test_threads_generate_at_once_on_one_model(model, kind, eager_threads):
    """Each with its own press and cache; hooks are the model's, so each must tell its own forward passes."""
    prompts = [random_ids(1, 60 + 20 * i, seed=i) for i in range(3)]

    def run(prompt, press):
        cache = DynamicCache()
        with press(model):
            tokens = model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                past_key_values=cache,
                max_new_tokens=10,
                do_sample=False,
                eos_token_id=None,
            )
        rows = torch.cat([resident_rows(cache.layers[i]) for i in full_layers(cache)])
        return tokens.tolist(), rows.tolist(), press.stats.summary()

    expected = [run(prompt, MAKE_PRESS[kind]()) for prompt in prompts]
    before = everything_on(model)
    for _ in range(3):
        found, start = {}, threading.Barrier(len(prompts))

        def work(i, found=found, start=start):
            start.wait()
            try:
                found[i] = run(prompts[i], MAKE_PRESS[kind]())
            except BaseException as error:
                found[i] = error

        threads = [threading.Thread(target=work, args=(i,)) for i in range(len(prompts))]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        assert [found[i] for i in range(len(prompts))] == expected
        assert everything_on(model) == before


@torch.no_grad()
def test_a_hook_that_torch_has_half_registered(model, ids):
    """Between the two steps in which torch adds a hook, another thread's forward pass calls it without kwargs."""
    errors = []

    def other():
        try:
            dense_logits(model, ids)
        except BaseException as error:
            errors.append(error)

    with sampling_press(ExpectedAttentionPress())(model):
        marks = [
            marks
            for module in model.modules()
            for marks in (module._forward_hooks_with_kwargs, module._forward_pre_hooks_with_kwargs)
        ]
        taken = [dict(m) for m in marks]
        assert sum(map(len, taken)) > len(full_layers(make_cache(model.config)))
        [m.clear() for m in marks]
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        [m.update(t) for m, t in zip(marks, taken, strict=True)]
    assert errors == []


def test_hooks_of_threads_that_register_at_once_get_numbers_of_their_own():
    """torch reads and raises one counter in two steps; a thread that is interrupted there would lose its hook."""

    hooks = {}

    def register(hook, *, with_kwargs):
        number = len(hooks)
        time.sleep(0.001)  # the other threads' turn
        hooks[number] = hook

    threads = [threading.Thread(target=register_hook, args=(register, print)) for _ in range(5)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert len(hooks) == 5


def test_the_modules_of_the_model_stay_the_same(model):
    """Another thread may be walking through them."""
    before = list(model.named_modules())
    with sampling_press(ExpectedAttentionPress())(model):
        assert list(model.named_modules()) == before


@torch.no_grad()
def test_blocks_of_two_threads_that_overlap(model, ids):
    """The one that was entered first is left first, while the other still needs what presses need on the modules."""
    entered, left, errors = threading.Event(), threading.Event(), []
    before = everything_on(model)

    def other():
        try:
            with sampling_press(ExpectedAttentionPress())(model):
                entered.set()
                assert left.wait(20)
                model.model(ids, past_key_values=cache)
        except BaseException as error:
            errors.append(error)

    cache, thread = DynamicCache(), threading.Thread(target=other)
    with sampling_press(ExpectedAttentionPress())(model):
        thread.start()
        assert entered.wait(20)
    left.set()
    thread.join()
    assert errors == [] and full_layers(cache) == [0, 1, 2, 3]
    after = everything_on(model)
    [attributes.pop("masked_key_indices", None) for _, _, attributes in list(after.values())[:-2]]  # KVPress' own
    assert after == before


# --- KVPress' presses before and after ours ---------------------------------------------------------------------------

FOREIGN = {
    "knorm": lambda: KnormPress(0.5),
    "snapkv": lambda: SnapKVPress(0.5, window_size=8),
    "adakv": lambda: AdaKVPress(KnormPress(0.5)),
}


@pytest.mark.parametrize("sketch", ["rope_pair", "exact"])
@pytest.mark.parametrize("foreign", FOREIGN)
def test_presses_of_kvpress_before_ours(model, ids, question, foreign, sketch):
    """AdaKV leaves the heads' masked tokens on the modules: they are another cache's."""
    theirs = prefill(model, random_ids(1, 70, seed=9), FOREIGN[foreign]())
    decode(model, question, theirs)
    cache = prefill(model, ids, VerKVPress(KnormPress(), 0.5, sketch=sketch, **EXACT))
    assert_close(decode(model, question, cache), dense_logits(model, ids, question), **TOLERANCE)


@pytest.mark.parametrize("foreign", FOREIGN)
def test_presses_of_kvpress_between_our_prefill_and_our_question(model, ids, question, foreign):
    cache = prefill(model, ids, exact_press())
    theirs = prefill(model, random_ids(1, 70, seed=9), FOREIGN[foreign]())
    decode(model, question, theirs)
    assert_close(decode(model, question, cache), dense_logits(model, ids, question), **TOLERANCE)


@pytest.mark.parametrize("foreign", FOREIGN)
def test_presses_of_kvpress_after_ours(tiny_model, ids, question, foreign):
    """They give what they give on a model that VerKV has never seen."""
    untouched, model = tiny_model("llama"), tiny_model("llama")
    expected = decode(untouched, question, prefill(untouched, ids, FOREIGN[foreign]()))
    with exact_press()(model):
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4)
    theirs = prefill(model, ids, FOREIGN[foreign]())
    assert torch.equal(decode(model, question, theirs), expected)
    ours = prefill(model, random_ids(1, 80, seed=3), exact_press())
    again = prefill(model, ids, FOREIGN[foreign]())
    decode(model, question, ours)  # ours in use between their prefill and their decoding
    assert torch.equal(decode(model, question, again), expected)


# --- attention implementations, compilation, modes --------------------------------------------------------------------


@pytest.mark.parametrize("first,second", [("sdpa", "eager"), ("eager", "sdpa")])
@pytest.mark.parametrize("kind", ["llama", "gemma3", "qwen3_5"])
def test_attention_implementation_is_switched_after_sealing(tiny_model, ids, kind, first, second):
    model = tiny_model(kind, first)
    tokens = random_ids(1, 8, seed=5)
    expected = dense_logits(model, ids, tokens)
    cache = prefill(model, ids, exact_press(), cache=make_cache(model.config))
    logits = [decode(model, tokens[:, :3], cache)]
    model.set_attn_implementation(second)
    logits += [decode(model, tokens[:, 3:5], cache), decode(model, tokens[:, 5:6], cache)]
    model.set_attn_implementation(first)
    logits += [decode(model, tokens[:, 6:], cache)]
    assert_close(torch.cat(logits, 1), expected, **TOLERANCE)


@pytest.mark.slow
def test_compiled_model(tiny_model, ids):
    """Prefilled and sealed by the compiled model, and used by it: sealed attention is left out of its graphs."""
    model, tokens = tiny_model("llama", num_hidden_layers=1), random_ids(1, 5, seed=5)
    torch._dynamo.reset()
    compiled, cache = torch.compile(model, backend="eager"), DynamicCache()
    with torch.no_grad(), exact_press()(compiled):
        compiled(ids, past_key_values=cache)
    assert full_layers(cache) == [0]
    logits = [decode(compiled, part, cache) for part in (tokens[:, :4], tokens[:, 4:])]
    torch._dynamo.reset()
    assert_close(torch.cat(logits, 1), dense_logits(model, ids, tokens), **TOLERANCE)


MODES = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode, "grad": contextlib.nullcontext}


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("decoding", MODES)
@pytest.mark.parametrize("prefilling", MODES)
@pytest.mark.parametrize("sketch", ["rope_pair", "exact"])
def test_modes_of_torch(model, ids, question, prefilling, decoding, training, sketch):
    """Dropout is 0, as it is in all supported models, so that training mode changes nothing but the flag."""
    model.train(training)
    cache, press = make_cache(model.config), VerKVPress(KnormPress(), 0.5, sketch=sketch, **EXACT)
    with MODES[prefilling](), press(model):
        model.model(ids, past_key_values=cache)
    with MODES[decoding]():
        logits = model(question, past_key_values=cache).logits
        twin = copy.deepcopy(cache)
        twin.crop(N_CONTEXT + 2)
        again = model(question[:, 2:], past_key_values=twin).logits
        twin.batch_repeat_interleave(2)
        twin.reorder_cache(torch.tensor([1, 0]))
    expected = dense_logits(model, ids, question)
    assert_close(logits.detach(), expected, **TOLERANCE)
    assert_close(again.detach(), expected[:, 2:], **TOLERANCE)
    assert model.training is training


# --- moving on --------------------------------------------------------------------------------------------------------


def generate(model, ids, press, **options):
    with press(model):
        return model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False, eos_token_id=None, **options
        ).tolist()


@pytest.mark.parametrize("make_press", MAKE_PRESS.values(), ids=MAKE_PRESS)
def test_a_press_is_used_again(model, ids, make_press):
    press, other = make_press(), random_ids(1, 77, seed=8)
    first, first_stats = generate(model, ids, press), press.stats
    second, second_stats = generate(model, other, press), press.stats
    assert first_stats is not second_stats and first_stats.n_passes == second_stats.n_passes == 7
    assert generate(model, ids, press) == first == generate(model, ids, make_press())
    assert generate(model, other, press) == second


def test_two_contexts_in_one_block(model, ids):
    press = exact_press()
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "attention_mask": torch.ones_like(ids)}
    dense = [model.generate(x, **options).tolist() for x in (ids, ids.flip(1))]
    with press(model):
        assert [model.generate(x, **options).tolist() for x in (ids, ids.flip(1))] == dense


def test_options_are_changed_between_contexts(model, ids, question):
    press = VerKVPress(KnormPress(), 0.5, epsilon=0.3, seed=0, **SHORT)
    reports, codes = [], []
    for changes in (
        {},
        {"compression_ratio": 0.2},
        {"epsilon": 1e-9},
        {"seed": 1},
        {"press": SnapKVPress(window_size=4)},
    ):
        for name, value in changes.items():
            setattr(press, name, value)
        cache = prefill(model, ids, press)
        logits = decode(model, question, cache)
        reports.append(press.memory_report().resident_share)
        codes.append(torch.stack([layer.context.codes for layer in cache.layers]))
        assert press.stats.epsilon == press.epsilon
        if press.epsilon == 1e-9:
            assert_close(logits, dense_logits(model, ids, question), **TOLERANCE)
    assert reports[0] < 0.6 < reports[1]
    assert torch.equal(codes[1], codes[2])  # the tolerance has no part in the draw
    assert not torch.equal(codes[2], codes[3]) and not torch.equal(codes[3], codes[4])


def test_options_that_are_changed_do_not_reach_caches_that_are_sealed(model, ids, question):
    press = exact_press()
    cache = prefill(model, ids, press)
    press.epsilon, press.seed, press.compression_ratio = 1e3, 5, 0.0
    assert_close(decode(model, question, cache), dense_logits(model, ids, question), **TOLERANCE)


def test_bad_options_are_refused_at_the_next_block_and_can_be_mended(model, ids):
    press = exact_press()
    prefill(model, ids, press)
    press.epsilon = 0.0
    before = everything_on(model)
    with pytest.raises(ValueError, match="epsilon"):
        prefill(model, ids, press)
    assert everything_on(model) == before
    press.epsilon = 0.1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert full_layers(prefill(model, ids, press)) == [0, 1, 2, 3]


COPIES = {"deepcopy": copy.deepcopy, "pickle": lambda cache: pickle.loads(pickle.dumps(cache))}


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("kind", ["llama", "gemma3", "qwen3_5"])
def test_a_copy_answers_alike_and_shares_nothing_that_changes(tiny_model, ids, question, kind, how):
    """Sliding windows and recurrent states are copied, too, with the way back to the context's end."""
    model = tiny_model(kind)
    cache = prefill(model, ids, exact_press(), cache=make_cache(model.config))
    first = decode(model, question, cache)
    twin = COPIES[how](cache)
    decode(model, random_ids(1, 9, seed=8), cache)  # the original goes on
    after = random_ids(1, 3, seed=9)
    assert_close(decode(model, after, twin), dense_logits(model, ids, question, after), **TOLERANCE)
    for again in (twin, COPIES[how](twin)):
        again.crop(N_CONTEXT)
        assert torch.equal(decode(model, question, again), first)
    assert full_layers(twin) == full_layers(cache) and twin.stats.full_bytes == cache.stats.full_bytes
