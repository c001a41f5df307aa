"""Contexts of 0 to 200 tokens against every window and ratio: exact, sealed within the budget, or refused by name."""

import itertools

import pytest
import torch
from kvpress import KnormPress
from press_helpers import decode, full_layers, inclusion_probs, leftovers, prefill, random_ids
from sealing import lengths
from transformers import DynamicCache

from verkv import KVzipPress, PoissonCompPress, VerKVPress, make_cache

LENGTHS = [0, 1, 2, 3, 7, 16, 63, 64, 65, 127, 128, 129, 150, 200]
WINDOWS = [0, 4, 16, 64]
RATIOS = [0.0, 0.1, 0.5, 0.875, 0.9375, 0.99]
N_LAYERS, N_QUESTION = 2, 3
TOLERANCE = {"atol": 2e-4, "rtol": 0.0}


class ByteTokenizer:
    """Enough of a tokenizer for KVzip's replay with a vocabulary of 256."""

    chat_template = None

    def encode(self, text, return_tensors="pt", add_special_tokens=False):
        return torch.tensor([[3 + byte % 250 for byte in text.encode()]])


def make_press(name, ratio, n_sink, n_local):
    if name == "kvzip":  # it protects sinks only
        return KVzipPress(ratio, n_sink=n_sink, tokenizer=ByteTokenizer())
    press_class = {"poissoncomp": PoissonCompPress, "verkv": VerKVPress}[name]
    return press_class(KnormPress(), ratio, n_sink=n_sink, n_local=n_local)


PRESSES = ["poissoncomp", "verkv", "kvzip"]


@pytest.fixture(scope="module")
def model(tiny_model):
    return tiny_model("llama", num_hidden_layers=N_LAYERS)


@pytest.fixture(scope="module")
def contexts(model):
    """By length: keys and values of every layer, and the dense logits of a question."""

    class Contexts(dict):
        def __missing__(self, n_tokens):
            if n_tokens:
                cache = prefill(model, random_ids(1, n_tokens))
                tensors = [(layer.keys, layer.values) for layer in cache.layers]
            else:
                tensors = []
            dense = decode(model, question(), self.copy_of(tensors))
            self[n_tokens] = tensors, dense
            return self[n_tokens]

        @staticmethod
        def copy_of(tensors):
            cache = make_cache(model.config)
            for i, (keys, values) in enumerate(tensors):
                cache.update(keys, values, i)
            return cache

    return Contexts()


def question():
    return random_ids(1, N_QUESTION, seed=7)


def random_scores(n_tokens):
    generator = torch.Generator().manual_seed(n_tokens)
    return {i: torch.rand(1, 2, n_tokens, generator=generator) ** 4 for i in range(N_LAYERS)}


def expected_device_bytes(cache, press):
    """Device bytes with the kept rows replaced by the sum of r, where rows are drawn."""
    total = 0.0
    for layer in cache.layers:
        memory = layer.memory()["device"]
        if isinstance(press, VerKVPress):
            rows = ("row_keys", "row_values", "row_codes")
            fixed = sum(size for part, size in memory.items() if part not in rows)
            r = inclusion_probs(layer.context.codes).sum().item()
            total += fixed + r * (2 * 16 * 4 + 1)
        else:
            total += sum(memory.values())
    return total


def named_ratio(message: str) -> float | None:
    """The largest ratio that an error names; None if it says that there is none."""
    if "leave so short a context as it is" in message:
        return None
    return float(message.split("use compression_ratio <= ")[1].split(",")[0])


def check(model, contexts, name, n_tokens, ratio, n_sink, n_local):
    """One cell; says what became of it."""
    tensors, dense = contexts[n_tokens]
    cache = contexts.copy_of(tensors)
    press = make_press(name, ratio, n_sink, n_local)
    outcome = "sealed"
    try:
        press.seal(model, cache, random_scores(n_tokens))
    except ValueError as error:
        message = str(error)
        assert f"compression_ratio={ratio:g}" in message and f"cache of {n_tokens} tokens" in message
        assert full_layers(cache) == [] and ratio > 0
        largest = named_ratio(message)
        if largest is not None:
            assert 0 < largest < ratio
            press.compression_ratio = largest
            press.seal(model, contexts.copy_of(tensors), random_scores(n_tokens))
        outcome = "refused" if largest is not None else "refused: too short"
    else:
        if full_layers(cache) == []:
            notes = [note for note in press.stats.notes if "not sealed, attention is exact" in note]
            assert len(notes) == 1
            outcome = "exact"
    logits = decode(model, question(), cache)
    assert logits.isfinite().all()
    assert lengths(cache) == [n_tokens + N_QUESTION] * N_LAYERS
    if outcome != "sealed":
        assert torch.equal(logits, dense)
        return outcome
    report = press.memory_report()
    assert report.full_bytes == N_LAYERS * 2 * 2 * n_tokens * 16 * 4
    if name != "poissoncomp":  # its bytes vary with the draw, and r is kept of its sample only
        assert expected_device_bytes(cache, press) <= (1 - ratio) * report.full_bytes
    offsets = torch.stack([layer.context.rows.offsets.diff() for layer in cache.layers])
    n_protected = min(n_tokens, n_sink + (0 if name == "kvzip" else n_local))
    assert (offsets >= n_protected).all() and (offsets <= n_tokens).all()
    return outcome


@pytest.mark.parametrize("n_tokens", LENGTHS)
@pytest.mark.parametrize("name", PRESSES)
def test_every_window_and_ratio(model, contexts, name, n_tokens):
    outcomes = {}
    for n_sink, n_local, ratio in itertools.product(WINDOWS, [0] if name == "kvzip" else WINDOWS, RATIOS):
        outcomes[n_sink, n_local, ratio] = check(model, contexts, name, n_tokens, ratio, n_sink, n_local)
    for (n_sink, n_local, ratio), outcome in outcomes.items():
        if ratio == 0.0 or n_sink + n_local >= n_tokens:
            assert outcome == "exact"
        if n_tokens >= 150 and n_sink + n_local <= 8 and 0 < ratio <= 0.875:
            assert outcome == "sealed"
    if n_tokens >= 127:
        assert {"exact", "sealed"} <= set(outcomes.values())
        assert name == "kvzip" or "refused" in outcomes.values()


@pytest.mark.parametrize(("n_sink", "n_local"), [(0, 0), (4, 0), (0, 4), (16, 16), (64, 64)])
@pytest.mark.parametrize("name", PRESSES)
def test_prefill_inside_the_block(model, contexts, name, n_sink, n_local):
    """The same with the press' own scores, in the model's forward pass and with transformers' cache."""
    for n_tokens, ratio in itertools.product(LENGTHS[1:], [0.5, 0.9375]):
        press, cache = make_press(name, ratio, n_sink, n_local), DynamicCache()
        try:
            prefill(model, random_ids(1, n_tokens), press, cache=cache)
        except ValueError as error:
            assert f"compression_ratio={ratio:g}" in str(error)
            named_ratio(str(error))
        logits = decode(model, question(), cache)
        assert logits.isfinite().all() and leftovers(model) == []
        if full_layers(cache) == []:
            assert torch.equal(logits, contexts[n_tokens][1])


@pytest.mark.parametrize("n_tokens", [1, 3, 16, 64, 129])
@pytest.mark.parametrize("ratio", [0.5, 0.875])
def test_generate_inside_the_block(model, n_tokens, ratio):
    """Without protection nothing is exact by itself; what cannot be sealed says so and does not stop the next call."""
    ids = random_ids(1, n_tokens)
    options = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    press = VerKVPress(KnormPress(), ratio, n_sink=0, n_local=0)
    try:
        with press(model):
            assert model.generate(ids, **options).shape == (1, n_tokens + 4)
    except ValueError as error:
        assert f"compression_ratio={ratio:g}" in str(error)
    assert leftovers(model) == []
    assert model.generate(ids, **options).shape == (1, n_tokens + 4)


# --- no tokens at all -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ratio", [0.0, 0.5])
@pytest.mark.parametrize("make", [lambda config: DynamicCache(), make_cache], ids=["dynamic", "verkv"])
@pytest.mark.parametrize("name", PRESSES)
def test_an_empty_cache_is_left_exact(model, name, make, ratio):
    """There is nothing to compress; what comes later is exact."""
    cache, press = make(model.config), make_press(name, ratio, 4, 4)
    press.seal(model, cache, {})
    assert press.stats.sealed_layers == () and "not sealed, attention is exact" in press.stats.notes[0]
    ids = random_ids(1, 20)
    assert torch.equal(decode(model, ids, cache), decode(model, ids, make(model.config)))


@pytest.mark.parametrize("name", PRESSES)
def test_a_cropped_out_context_is_left_exact(model, name):
    cache, press = prefill(model, random_ids(1, 30), cache=make_cache(model.config)), make_press(name, 0.5, 4, 4)
    cache.crop(0)
    press.seal(model, cache, random_scores(0))
    assert press.stats.sealed_layers == () and "not sealed, attention is exact" in press.stats.notes[0]
    ids = random_ids(1, 20)
    assert torch.equal(decode(model, ids, cache), decode(model, ids, make_cache(model.config)))


# --- longer than the context ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sketch", ["rope_pair", "exact"])
@pytest.mark.parametrize("n_tokens", [16, 40])
def test_question_longer_than_the_context_and_shortlist_larger(model, n_tokens, sketch):
    """Everything that matters is fetched, so logits are dense."""
    ids, tokens = random_ids(1, n_tokens), random_ids(1, 90, seed=4)
    options = {"n_sink": 1, "n_local": 1, "epsilon": 1e-9, "shortlist": 1000, "sketch": sketch}
    press = VerKVPress(KnormPress(), 0.3, **options)
    cache = prefill(model, ids, press)
    assert full_layers(cache) == [0, 1]
    expected = decode(model, tokens, prefill(model, ids))
    torch.testing.assert_close(decode(model, tokens, cache), expected, **TOLERANCE)
    assert (press.stats.shortlisted() > 0) == (sketch == "rope_pair")
    assert press.stats.shortlisted() <= N_LAYERS * 2 * n_tokens and press.stats.fetched() <= N_LAYERS * 2 * n_tokens


@pytest.mark.parametrize("name", PRESSES)
@pytest.mark.parametrize("n_tokens", [16, 40])
def test_long_question_behind_a_lossy_context(model, name, n_tokens):
    press = make_press(name, 0.3, 1, 1)
    cache = contexts_of(model, n_tokens)
    press.seal(model, cache, random_scores(n_tokens))
    assert full_layers(cache) == [0, 1]
    logits = decode(model, random_ids(1, 120, seed=4), cache)
    assert logits.isfinite().all() and lengths(cache) == [n_tokens + 120] * N_LAYERS


def contexts_of(model, n_tokens):
    return prefill(model, random_ids(1, n_tokens), cache=make_cache(model.config))
