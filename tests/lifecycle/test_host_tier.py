"""The host's copy never changes, and memory goes back to what it was; counted in tensors, not in the process' size."""

import gc
import hashlib
import warnings

import pytest
import torch
from kvpress import KnormPress
from press_helpers import SHORT, decode, prefill, random_ids
from transformers import DynamicCache

import verkv.tiers
from verkv import PoissonCompPress, VerKVPress, make_cache
from verkv.tiers import HostTier, _host_buffer

N_CONTEXT = 100


@pytest.fixture
def model(tiny_model):
    return tiny_model("llama", num_hidden_layers=2)


def make_press(sketch="rope_pair", **options):
    return VerKVPress(KnormPress(), 0.5, sketch=sketch, seed=0, **{"epsilon": 0.05, **SHORT, **options})


# --- rows never change ------------------------------------------------------------------------------------------------


def fixed_tensors(cache):
    """What a sealed cache may never write to, by name."""
    found = {}
    for i, layer in enumerate(cache.layers):
        context = layer.context
        found |= {f"{i} host keys": context.host.keys, f"{i} host values": context.host.values}
        found |= {f"{i} {name}": getattr(context.rows, name) for name in ("keys", "values", "codes", "offsets")}
        found |= {f"{i} codes": context.codes, f"{i} padding": context.n_padding}
        found |= {f"{i} {name}": tensor for name, tensor in context.sketch.tensors().items()}
    return found


def checksums(cache):
    return {
        name: (tensor.data_ptr(), hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest())
        for name, tensor in fixed_tensors(cache).items()
    }


@pytest.mark.parametrize("sketch", ["rope_pair", "exact"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_rows_are_the_same_after_200_steps(tiny_model, dtype, sketch):
    model = tiny_model("llama", num_hidden_layers=2).to(dtype)
    press, tokens = make_press(sketch, epsilon=0.02, shortlist=4), random_ids(1, 200, seed=5)
    cache = prefill(model, random_ids(1, N_CONTEXT), press)
    before = checksums(cache)
    for i in range(200):
        decode(model, tokens[:, i : i + 1], cache)
        if i % 50 == 49:
            assert checksums(cache) == before
    assert press.stats.fetched() > 0
    decode(model, tokens[:, :6], cache)  # another question
    cache.crop(N_CONTEXT)
    cache.batch_repeat_interleave(3)
    cache.reorder_cache(torch.tensor([2, 0, 0]))
    decode(model, tokens[:, :2].repeat(3, 1), cache)
    assert checksums(cache) == before


def test_rows_are_those_of_the_prefill(model):
    ids = random_ids(2, N_CONTEXT)
    dense, cache = prefill(model, ids), prefill(model, ids, make_press())
    decode(model, random_ids(2, 5), cache)
    for ours, theirs in zip(cache.layers, dense.layers, strict=True):
        assert torch.equal(ours.context.host.keys, theirs.keys)
        assert torch.equal(ours.context.host.values, theirs.values)


# --- memory goes back to what it was ----------------------------------------------------------------------------------


def live():
    """Number of live tensors, and bytes of the memory behind them."""
    gc.collect()
    n_tensors, storages = 0, {}
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor) and thing.device.type == "cpu":
            try:
                storages[thing.untyped_storage().data_ptr()] = thing.untyped_storage().nbytes()
            except RuntimeError:  # a compiler's stand-in, left from another test: it has no memory
                continue
            n_tensors += 1
    return n_tensors, sum(storages.values())


@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
def test_500_steps_leave_nothing_but_the_tail(model, grad):
    """Also with gradients on, where every step's graph could be kept."""
    cache = prefill(model, random_ids(1, N_CONTEXT), make_press(), cache=make_cache(model.config))
    tokens = random_ids(1, 500, seed=5)

    def step(i):
        with torch.set_grad_enabled(grad):
            model(tokens[:, i : i + 1], past_key_values=cache)

    step(0)
    step(1)
    n_tensors, n_bytes = live()
    tail_bytes = cache.memory_report().device_uncharged["tail"]
    for i in range(2, 500):
        step(i)
    grown = cache.memory_report().device_uncharged["tail"] - tail_bytes
    assert grown == 498 * 2 * 2 * 2 * 16 * 4  # steps, layers, keys and values, heads, channels, bytes
    assert live() == (n_tensors, n_bytes + grown)
    cache.crop(N_CONTEXT + 2)
    step(2)  # the views of a cropped tail are copied with the next token
    step(3)
    cache.crop(N_CONTEXT + 1)
    step(1)
    assert live() == (n_tensors, n_bytes)


@pytest.mark.parametrize("press_class", [VerKVPress, PoissonCompPress])
@pytest.mark.parametrize("make", [lambda config: DynamicCache(), make_cache], ids=["dynamic", "make_cache"])
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_50_contexts_leave_nothing(tiny_model, kind, make, press_class):
    model, press = (
        tiny_model(kind, num_hidden_layers=2 if kind == "llama" else 6),
        press_class(KnormPress(), 0.5, seed=0, **SHORT),
    )

    def use(seed):
        cache = make(model.config)
        prefill(model, random_ids(1, 40 + seed % 7, seed), press, cache=cache)
        decode(model, random_ids(1, 3, seed), cache)
        cache.crop(cache.get_seq_length() - 3) if kind == "llama" else None
        cache.batch_repeat_interleave(2)
        decode(model, random_ids(2, 1, seed), cache)

    use(0)
    before = live()
    for seed in range(1, 50):
        use(seed)
    use(0)
    assert live() == before


def test_a_cache_that_is_reset_leaves_nothing(model):
    cache = make_cache(model.config)
    empty = live()
    for seed in range(3):
        prefill(model, random_ids(1, N_CONTEXT, seed), make_press(), cache=cache)
        decode(model, random_ids(1, 3), cache)
        cache.reset()
    assert live() == empty


@pytest.mark.parametrize("where", ["prefill", "decode"])
def test_failures_leave_nothing(model, where):
    press, ids = make_press(), random_ids(1, N_CONTEXT)

    def fail():
        cache = DynamicCache()
        if where == "decode":
            prefill(model, ids, press, cache=cache)

        def stop(*args):
            raise KeyboardInterrupt

        handle = model.model.layers[1].mlp.register_forward_hook(stop)
        with pytest.raises(KeyboardInterrupt):
            decode(model, ids, cache) if where == "decode" else prefill(model, ids, press, cache=cache)
        handle.remove()

    fail()
    before = live()
    for _ in range(10):
        fail()
    assert live() == before


# --- pinned memory ----------------------------------------------------------------------------------------------------


@pytest.fixture
def nothing_said(monkeypatch):
    monkeypatch.setattr(verkv.tiers, "_said_pageable", False)


@pytest.fixture
def no_pinned_memory(monkeypatch):
    """A system that refuses to lock memory, and what was asked of it."""
    empty, asked = torch.empty, []

    def refuse(*args, pin_memory=False, **kwargs):
        asked.append(pin_memory)
        if pin_memory:
            raise RuntimeError("CUDA error: out of memory\nCompile with TORCH_USE_CUDA_DSA")
        return empty(*args, **kwargs)

    monkeypatch.setattr(torch, "empty", refuse)
    return asked


def test_pageable_memory_where_pinned_is_refused(nothing_said, no_pinned_memory):
    with pytest.warns(UserWarning, match=r"pinned host memory was refused \(CUDA error: out of memory\).*ulimit -l"):
        buffer = _host_buffer(torch.Size((2, 3)), torch.bfloat16, pin=True)
    assert buffer.shape == (2, 3) and buffer.dtype == torch.bfloat16 and buffer.device.type == "cpu"
    assert no_pinned_memory == [True, False]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # once per process
        _host_buffer(torch.Size((4,)), torch.float32, pin=True)
    assert no_pinned_memory == [True, False, True, False]  # the next may be granted


def test_a_whole_cache_where_pinned_memory_is_refused(model, monkeypatch, nothing_said, no_pinned_memory):
    """One warning for all layers and contexts; the answers are the same."""
    ids, question = random_ids(1, N_CONTEXT), random_ids(1, 5)
    expected = decode(model, question, prefill(model, ids, make_press()))
    buffer = _host_buffer
    monkeypatch.setattr(verkv.tiers, "_host_buffer", lambda shape, dtype, pin: buffer(shape, dtype, pin=True))
    with pytest.warns(UserWarning) as warned:
        caches = [prefill(model, ids, make_press()) for _ in range(2)]
    assert ["pinned" in str(w.message) for w in warned] == [True]
    assert no_pinned_memory.count(True) == 2 * 2 * 2  # caches, layers, keys and values
    assert torch.equal(decode(model, question, caches[1]), expected)


def test_nothing_is_pinned_without_a_gpu(monkeypatch, nothing_said, no_pinned_memory):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        host = HostTier.copy_from(torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3, 4))
    assert True not in no_pinned_memory and torch.equal(host.keys, torch.ones(1, 2, 3, 4))


def test_host_memory_that_is_used_up_is_an_error(monkeypatch, nothing_said):
    def refuse(*args, **kwargs):
        raise RuntimeError("not enough memory: you tried to allocate 99 bytes")

    monkeypatch.setattr(torch, "empty", refuse)
    with pytest.raises(RuntimeError, match="not enough memory"):
        _host_buffer(torch.Size((4,)), torch.float32, pin=False)


@pytest.mark.parametrize("n_tokens", [128, 129])
def test_host_copies_are_no_larger_than_the_context(n_tokens):
    """Pageable ones; torch's allocator of pinned memory rounds up to powers of two by itself."""
    keys = torch.ones(1, 2, n_tokens, 64)
    host = HostTier.copy_from(keys, keys[..., :32])
    assert host.keys.untyped_storage().nbytes() == keys.nbytes
    assert host.values.untyped_storage().nbytes() == keys.nbytes // 2
