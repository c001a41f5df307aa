"""Prefill in chunks: exact against dense, in bounded memory, blind to what comes later; what it refuses."""

import weakref

import pytest
import torch
from kvpress import KnormPress
from press_helpers import full_layers, left_padded, positions, random_ids
from segment_helpers import EXACT, SHORT, TOLERANCE, forward, gates, kvzip
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache

import verkv
from verkv import FastKVzipPress, PoissonCompPress, VerKVPress, streaming, tiers

pytestmark = pytest.mark.usefixtures("each_way")


def hidden_states_of(model, run):
    """The last hidden states of every forward pass that is as long as a chunk."""
    found = []
    handle = model.model.norm.register_forward_hook(lambda m, a, out: found.append(out))
    try:
        run()
    finally:
        handle.remove()
    return found


@pytest.mark.parametrize("kind", ["llama", "gemma3", "qwen3_5", "ministral"])
def test_chunks_and_question_equal_dense_attention(tiny_model, kind, monkeypatch):
    monkeypatch.setattr(streaming, "BLOCK_BYTES", 4 * 4 * 64 * 7)  # blocks of a few tokens
    monkeypatch.setattr(streaming, "MAX_PAIRS", 500)
    model, ids = tiny_model(kind), random_ids(2, 220)
    with torch.no_grad():
        dense = model(ids).logits
    found = []
    press = VerKVPress(KnormPress(), 0.4, **EXACT)
    states = hidden_states_of(
        model, lambda: found.append(verkv.prefill(model, ids[:, :200], chunk_size=50, press=press))
    )
    with torch.no_grad():
        logits = model.lm_head(torch.cat(states, 1))
    assert_close(logits, dense[:, :200], **TOLERANCE)
    cache = found[0]
    context = cache.layers[full_layers(cache)[0]].context
    assert [s.n_tokens for s in context.segments] == [42, 50, 50, 50]
    assert cache.get_seq_length() == 200 and press.stats is cache.stats
    assert_close(forward(model, ids[:, 200:], cache), dense[:, 200:], **TOLERANCE)
    assert cache.stats.n_passes == 1 and cache.stats.chunks.n_passes == 3
    assert cache.stats.chunks.kv_read_per_forward == 1.0


@pytest.mark.parametrize("attention", ["exact", "verified"])
def test_chunks_of_a_sample_are_exact_only_if_asked_for(tiny_model, attention):
    """Without fetching, the host copy is there for the chunks and gone afterwards."""
    model, ids = tiny_model("llama"), random_ids(1, 150)
    with torch.no_grad():
        dense = model.model(ids).last_hidden_state
    found = []
    press = PoissonCompPress(kvzip(), 0.5, **SHORT)
    run = lambda: found.append(verkv.prefill(model, ids, chunk_size=50, press=press, attention=attention))  # noqa: E731
    states = torch.cat([s for s in hidden_states_of(model, run) if s.shape[1] == 50], 1)
    is_exact = torch.allclose(states, dense, atol=1e-4, rtol=0.0)
    assert is_exact == (attention == "exact")
    assert all(layer.context.host is None for layer in found[0].layers)


@pytest.mark.parametrize("scorer", ["knorm", "kvzip", "gates"])
def test_nothing_later_decides_about_a_chunk(tiny_model, scorer):
    """Other tokens behind a chunk leave its codes as they are."""
    model = tiny_model("llama")
    make = {"knorm": KnormPress, "kvzip": kvzip, "gates": lambda: FastKVzipPress(gates=gates(model))}[scorer]
    codes = []
    for seed in (1, 2):
        ids = torch.cat([random_ids(1, 100), random_ids(1, 50, seed=seed)], 1)
        cache = verkv.prefill(model, ids, chunk_size=50, press=VerKVPress(make(), 0.5, **SHORT))
        codes.append([layer.context.codes for layer in cache.layers])
    for first, second in zip(*codes, strict=True):
        assert torch.equal(first[:, :92], second[:, :92]) and not torch.equal(first[:, 92:], second[:, 92:])


def test_padded_rows(tiny_model):
    model = tiny_model("llama")
    rows = [random_ids(1, 120, seed=2), random_ids(1, 101, seed=3)]
    ids, mask = left_padded(rows)
    cache = verkv.prefill(model, ids, chunk_size=40, press=VerKVPress(kvzip(), 0.4, **EXACT), attention_mask=mask)
    question = random_ids(2, 6, seed=5)
    whole = torch.cat([mask, torch.ones_like(question)], 1)
    ours = forward(model, question, cache, attention_mask=whole, position_ids=positions(whole)[:, -6:])
    for i, row in enumerate(rows):
        with torch.no_grad():
            dense = model(torch.cat([row, question[i : i + 1]], 1)).logits[:, -6:]
        assert_close(ours[i : i + 1], dense, **TOLERANCE)
    with pytest.raises(ValueError, match="19 tokens of left padding, but the first chunk seals 12"):
        verkv.prefill(model, ids, chunk_size=20, press=VerKVPress(kvzip(), 0.4, **EXACT), attention_mask=mask)


def test_a_cache_goes_on(tiny_model):
    model, ids = tiny_model("llama"), random_ids(1, 220)
    with torch.no_grad():
        dense = model(ids).logits[:, 200:]
    press = VerKVPress(kvzip(), 0.4, **EXACT)
    cache = verkv.prefill(model, ids[:, :100], chunk_size=50, press=press)
    assert verkv.prefill(model, ids[:, 100:200], chunk_size=50, press=press, cache=cache) is cache
    assert [s.n_tokens for s in cache.layers[0].context.segments] == [42, 50, 50, 50]
    assert_close(forward(model, ids[:, 200:], cache), dense, **TOLERANCE)


def test_a_first_chunk_that_is_all_protected_is_sealed_with_the_next(tiny_model):
    model, ids = tiny_model("llama"), random_ids(1, 100)
    press = VerKVPress(KnormPress(), 0.3, n_sink=20, n_local=10, epsilon=1e-9)
    cache = verkv.prefill(model, ids[:, :90], chunk_size=30, press=press)
    assert [s.n_tokens for s in cache.layers[0].context.segments] == [50, 30]
    with torch.no_grad():
        assert_close(forward(model, ids[:, 90:], cache), model(ids).logits[:, 90:], **TOLERANCE)


@pytest.mark.parametrize(
    "options,match",
    [
        ({"chunk_size": 8}, "chunk_size=8 must be larger than the press' window of 8"),
        ({"chunk_size": 0}, "chunk_size"),
        ({"attention": "sparse"}, "attention must be one of"),
        ({"press": KnormPress(0.5)}, "press must be one of VerKV's"),
        ({"input_ids": torch.zeros(0, 5, dtype=torch.int64)}, "input_ids"),
        ({"attention_mask": torch.ones(1, 3)}, "attention_mask must have shape"),
    ],
)
def test_arguments_out_of_range(tiny_model, options, match):
    model = tiny_model("llama")
    arguments = {"input_ids": random_ids(1, 100), "chunk_size": 50, "press": VerKVPress(KnormPress(), 0.4, **SHORT)}
    cache = DynamicCache()
    with pytest.raises(ValueError, match=match):
        verkv.prefill(model, **{**arguments, **options}, cache=cache)
    assert cache.get_seq_length() == 0


def test_caches_that_cannot_go_on(tiny_model):
    model, ids = tiny_model("llama"), random_ids(1, 100)
    plain = DynamicCache()
    forward(model, ids[:, :20], plain)
    press = PoissonCompPress(KnormPress(), 0.5, **SHORT)
    with pytest.raises(ValueError, match="are not sealed"):
        verkv.prefill(model, ids, chunk_size=50, press=press, cache=plain)
    cache = verkv.prefill(model, ids, chunk_size=50, press=press)
    with pytest.raises(ValueError, match="needs the sealed tokens on the host"):
        verkv.prefill(model, ids, chunk_size=50, press=press, cache=cache)
    assert (plain.get_seq_length(), cache.get_seq_length()) == (20, 100)


@pytest.mark.parametrize("n_before", [0, 100])
def test_a_prefill_that_fails_leaves_no_half_a_prompt(tiny_model, n_before):
    model, ids, press = tiny_model("llama"), random_ids(1, 300), VerKVPress(KnormPress(), 0.4, **EXACT)
    cache = verkv.make_cache(model.config)
    if n_before:
        verkv.prefill(model, ids[:, :n_before], chunk_size=50, press=press, cache=cache)
    n_chunks = 0

    def stop(module, args, output):
        nonlocal n_chunks
        n_chunks += 1
        if n_chunks == 3:
            raise KeyboardInterrupt

    handle = model.model.layers[2].mlp.register_forward_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        verkv.prefill(model, ids[:, n_before:], chunk_size=50, press=press, cache=cache)
    handle.remove()
    assert cache.get_seq_length() == n_before
    verkv.prefill(model, ids[:, n_before:280], chunk_size=50, press=press, cache=cache)
    with torch.no_grad():
        assert_close(forward(model, ids[:, 280:], cache), model(ids).logits[:, 280:], **TOLERANCE)


# --- memory -----------------------------------------------------------------------------------------------------------


class PeakMemory(TorchDispatchMode):
    """Bytes of all storages that are made and alive at once, but those of host tiers."""

    def __init__(self):
        super().__init__()
        self.host, self.makes_host, self.sizes, self.live, self.peak = set(), False, {}, 0, 0

    def host_buffer(self, shape, dtype, pin):
        """In place of what allocates host tiers."""
        self.makes_host = True
        buffer = torch.empty(shape, dtype=dtype)
        self.makes_host = False
        return buffer

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (list, tuple)) else [result]:
            if isinstance(tensor, torch.Tensor):
                self.count(tensor.untyped_storage())
        return result

    def count(self, storage):
        key = storage._cdata
        if self.makes_host:
            self.host.add(storage.data_ptr())
        if key in self.sizes or storage.data_ptr() in self.host:
            return
        self.sizes[key] = storage.nbytes()
        self.live += self.sizes[key]
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self.free, key)

    def free(self, key):
        self.live -= self.sizes.pop(key, 0)


def peak_of_prefill(model, n_tokens, monkeypatch, **options):
    """Largest bytes beyond the model's own, of a prefill in chunks of 64, and the cache."""
    memory = PeakMemory()
    monkeypatch.setattr(tiers, "_host_buffer", memory.host_buffer)
    press = VerKVPress(KnormPress(), 0.9, n_sink=4, n_local=8, sketch="rope_pair", **options)
    ids = random_ids(1, n_tokens)
    with memory:
        cache = verkv.prefill(model, ids, chunk_size=64, press=press)
    return memory.peak, cache


def test_peak_memory_is_budget_and_chunk(tiny_model, monkeypatch):
    """Reading four times as much costs what the budget grows by, twice while a segment is added, and no more."""
    monkeypatch.setattr(streaming, "BLOCK_BYTES", 2**16)
    model = tiny_model("llama")
    (short, small), (long, large) = (peak_of_prefill(model, n, monkeypatch) for n in (256, 1024))
    budgets = [sum(cache.memory_report().device.values()) for cache in (small, large)]
    full = large.memory_report().full_bytes
    ids_bytes, row_offsets = 8 * (1024 - 256), 2**14
    assert budgets[1] > 3 * budgets[0]
    assert long - short <= 2 * (budgets[1] - budgets[0]) + ids_bytes + row_offsets
    assert long - short < (full - small.memory_report().full_bytes) / 4
    assert long > budgets[1]  # it does count
