"""The host's copy never changes, and memory goes back to what it was; counted in tensors, not in the process' size."""

import copy
import gc
import hashlib
import mmap
import pickle
import warnings

import pytest
import torch
from press_helpers import SHORT, decode, prefill, random_ids
from transformers import DynamicCache

import verkv.tiers
from verkv.cache import make_cache
from verkv.tiers import HostTier, _host_buffer

N_CONTEXT, PAGE = 100, mmap.PAGESIZE


@pytest.fixture
def model(tiny_model):
    return tiny_model("llama", num_hidden_layers=2)


def make_press(sketch="rope_pair", press_class="VerKVPress", **options):
    """Here and not at the top: what needs no press runs without KVPress, on newer transformers."""
    from kvpress import KnormPress

    import verkv

    if press_class == "VerKVPress":
        options = {"sketch": sketch, "epsilon": 0.05, **options}
    return getattr(verkv, press_class)(KnormPress(), 0.5, seed=0, **{**SHORT, **options})


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


@pytest.mark.parametrize("press_class", ["VerKVPress", "PoissonCompPress"])
@pytest.mark.parametrize("make", [lambda config: DynamicCache(), make_cache], ids=["dynamic", "make_cache"])
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_50_contexts_leave_nothing(tiny_model, kind, make, press_class):
    model = tiny_model(kind, num_hidden_layers=2 if kind == "llama" else 6)
    press = make_press(press_class=press_class)

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


class Cudart:
    """Stands for CUDA's runtime: pins memory by address, no page twice and no more than a limit."""

    def __init__(self):
        self.limit, self.asked, self.pinned = float("inf"), [], {}

    def cudaHostRegister(self, address, size, flags):
        self.asked.append(size)
        if sum(self.pinned.values()) + size > self.limit:
            return 2
        first, last = address // PAGE, (address + size - 1) // PAGE
        if any(first <= (a + n - 1) // PAGE and a // PAGE <= last for a, n in self.pinned.items()):
            return 712
        self.pinned[address] = size
        return 0

    def cudaHostUnregister(self, address):
        del self.pinned[address]
        return 0

    def cudaGetErrorString(self, code):
        return {2: "out of memory\nsecond line", 712: "part or all of the memory is mapped"}[code]

    def holds(self, tensor):
        return any(a <= tensor.data_ptr() < a + n for a, n in self.pinned.items())


@pytest.fixture
def cudart(monkeypatch):
    """A machine with a GPU, as far as host memory goes."""
    fake = Cudart()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: fake)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: fake.holds(tensor))
    monkeypatch.setattr(verkv.tiers, "_said_pageable", False)
    yield fake
    gc.collect()
    assert fake.pinned == {}  # whatever a test does, pages are released with the last tensor on them


@pytest.fixture
def pinning(cudart, monkeypatch):
    """Contexts are pinned although the model is on the CPU."""
    buffer = verkv.tiers._host_buffer
    monkeypatch.setattr(verkv.tiers, "_host_buffer", lambda shape, dtype, pin: buffer(shape, dtype, pin=True))
    return cudart


def both(host):
    return host.keys, host.values


def make_host(n_tokens=129, contexts=2):
    keys = torch.randn(contexts, 2, n_tokens, 16)
    return HostTier.copy_from(keys, keys[..., :8].contiguous()), keys


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("shape", [(1, 2, 128, 64), (1, 2, 129, 64), (2, 8, 1025, 128), (1, 1, 1, 1)], ids=str)
def test_pinned_memory_is_of_the_size_asked_for(cudart, shape, dtype):
    """Just above a power of two, torch's own allocator of pinned memory gives nearly twice as much."""
    shape = torch.Size(shape)
    n_bytes = shape.numel() * dtype.itemsize
    buffers = [_host_buffer(shape, dtype, pin=True) for _ in range(3)]
    assert cudart.asked == list(cudart.pinned.values()) == [n_bytes] * 3
    for i, buffer in enumerate(buffers):
        assert buffer.shape == shape and buffer.dtype == dtype and buffer.is_contiguous() and buffer.is_pinned()
        assert buffer.untyped_storage().nbytes() == n_bytes and buffer.data_ptr() % PAGE == 0
        buffer.fill_(i)
    assert [buffer.unique().tolist() for buffer in buffers] == [[0.0], [1.0], [2.0]]


def test_pages_are_released_with_the_last_tensor_on_them(cudart):
    buffer = _host_buffer(torch.Size((3, 4)), torch.float32, pin=True)
    row, held = buffer.fill_(7.0)[1], list(cudart.pinned)
    del buffer
    gc.collect()
    assert list(cudart.pinned) == held and row.tolist() == [7.0] * 4
    del row
    gc.collect()
    assert cudart.pinned == {}


def test_nothing_is_pinned_for_no_bytes(cudart):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert _host_buffer(torch.Size((0, 2, 5, 4)), torch.float32, pin=True).shape == (0, 2, 5, 4)
    assert cudart.asked == []


def test_pageable_memory_where_pinned_is_refused(cudart):
    cudart.limit = 100
    granted = _host_buffer(torch.Size((2, 3)), torch.bfloat16, pin=True)
    with pytest.warns(UserWarning, match=r"pinned host memory was refused \(out of memory\).*ulimit -l"):
        refused = _host_buffer(torch.Size((2, 30)), torch.bfloat16, pin=True)
    assert refused.shape == (2, 30) and refused.dtype == torch.bfloat16 and refused.device.type == "cpu"
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # once per process
        _host_buffer(torch.Size((40,)), torch.float32, pin=True)
    assert cudart.asked == [12, 120, 160]  # the next may be granted
    assert granted.is_pinned() and not refused.is_pinned()


def test_pageable_memory_where_no_pages_are_to_be_had(cudart, monkeypatch):
    def refuse(*args):
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(verkv.tiers, "_LockedPages", refuse)
    with pytest.warns(UserWarning, match=r"refused \(.*Cannot allocate memory\)"):
        assert _host_buffer(torch.Size((4,)), torch.float32, pin=True).shape == (4,)


@pytest.mark.parametrize("limit", [0, 4 * 2 * 100 * 16 * 4], ids=["nothing", "one_layer"])
def test_a_whole_cache_where_pinned_memory_is_refused(model, pinning, limit):
    """One warning for all layers and contexts; the answers are the same."""
    ids, question = random_ids(1, N_CONTEXT), random_ids(1, 5)
    expected = decode(model, question, prefill(model, ids, make_press()))
    pinning.limit, pinning.asked = limit, []
    gc.collect()
    with pytest.warns(UserWarning) as warned:
        caches = [prefill(model, ids, make_press()) for _ in range(2)]
    assert ["pinned" in str(w.message) for w in warned] == [True]
    assert pinning.asked == [2 * N_CONTEXT * 16 * 4] * (2 * 2 * 2)  # caches, layers, keys and values
    assert sum(pinning.pinned.values()) == limit
    assert torch.equal(decode(model, question, caches[1]), expected)


@pytest.mark.parametrize("end", ["forgotten", "reset", "failed"])
def test_contexts_release_their_pages(model, pinning, end):
    cache = make_cache(model.config)
    for seed in range(3):
        prefill(model, random_ids(1, N_CONTEXT, seed), make_press(), cache=cache)
        decode(model, random_ids(1, 3), cache)
        assert len(pinning.pinned) == 4
        if end == "reset":
            cache.reset()
        elif end == "failed":
            cache.layers[0].unseal()
            assert len(pinning.pinned) == 2
        if end != "reset":
            cache = make_cache(model.config)
        gc.collect()
        assert pinning.pinned == {}


COPIES = {
    "select": lambda host: host.select(torch.tensor([0, 1])),
    "deepcopy": copy.deepcopy,
    "pickle": lambda host: pickle.loads(pickle.dumps(host)),
}


@pytest.mark.parametrize("how", COPIES)
def test_copies_are_pinned_where_the_original_is(cudart, how):
    pageable, keys = make_host()
    assert not any(tensor.is_pinned() for tensor in both(COPIES[how](pageable))) and cudart.asked == []
    host = HostTier(*(_host_buffer(t.shape, t.dtype, pin=True).copy_(t) for t in both(pageable)))
    copied = COPIES[how](host)
    for ours, theirs in zip(both(copied), both(host), strict=True):
        assert ours.is_pinned() and ours.data_ptr() != theirs.data_ptr() and torch.equal(ours, theirs)
    assert cudart.asked == [keys.nbytes, keys.nbytes // 2] * 2
    host.keys.zero_()
    assert torch.equal(copied.keys, keys)


def test_what_refers_to_the_host_tier_refers_to_its_copy(cudart):
    """As the exact sketch does: one copy, not two."""
    host, _ = make_host()
    tier, keys = copy.deepcopy((host, host.keys))
    assert tier.keys is keys


def test_one_context_of_several_is_selected_into_pinned_memory(cudart):
    pageable, keys = make_host(contexts=3)
    host = HostTier(*(_host_buffer(t.shape, t.dtype, pin=True).copy_(t) for t in both(pageable)))
    chosen = host.select(torch.tensor([2]))
    assert torch.equal(chosen.keys, keys[2:]) and chosen.keys.is_pinned() and chosen.values.is_pinned()
    assert cudart.asked[2:] == [keys.nbytes // 3, keys.nbytes // 6]


def test_a_copy_that_is_refused_is_pageable(cudart):
    pageable, keys = make_host()
    host = HostTier(*(_host_buffer(t.shape, t.dtype, pin=True).copy_(t) for t in both(pageable)))
    cudart.limit = 0
    with pytest.warns(UserWarning, match="pinned host memory was refused") as warned:
        copies = [copied(host) for copied in COPIES.values()]
    assert len(warned) == 1
    assert all(torch.equal(copied.keys, keys) and not copied.keys.is_pinned() for copied in copies)


def test_a_pickle_of_pinned_memory_can_be_read_without_a_gpu(cudart, monkeypatch):
    pageable, keys = make_host()
    host = HostTier(*(_host_buffer(t.shape, t.dtype, pin=True).copy_(t) for t in both(pageable)))
    data = pickle.dumps(host)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        copied = pickle.loads(data)
    assert torch.equal(copied.keys, keys) and not copied.keys.is_pinned() and len(cudart.asked) == 2


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
@pytest.mark.parametrize("sketch", ["rope_pair", "exact"])
def test_a_copied_cache_is_pinned_and_answers_alike(model, pinning, sketch, how):
    cache, question = prefill(model, random_ids(1, N_CONTEXT), make_press(sketch)), random_ids(1, 5)
    twin = COPIES[how](cache)
    expected = decode(model, question, cache)
    del cache
    gc.collect()
    tensors = [t for layer in twin.layers for t in both(layer.context.host)]
    assert all(tensor.is_pinned() for tensor in tensors) and len(pinning.pinned) == 4
    assert torch.equal(decode(model, question, twin), expected)


def test_nothing_is_pinned_without_a_gpu(cudart):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        host, keys = make_host()
    assert cudart.asked == [] and torch.equal(host.keys, keys)


def test_host_memory_that_is_used_up_is_an_error(monkeypatch):
    def refuse(*args, **kwargs):
        raise RuntimeError("not enough memory: you tried to allocate 99 bytes")

    monkeypatch.setattr(torch, "empty", refuse)
    with pytest.raises(RuntimeError, match="not enough memory"):
        _host_buffer(torch.Size((4,)), torch.float32, pin=False)


@pytest.mark.parametrize("n_tokens", [128, 129])
def test_host_copies_are_no_larger_than_the_context(n_tokens):
    keys = torch.ones(1, 2, n_tokens, 64)
    host = HostTier.copy_from(keys, keys[..., :32])
    assert host.keys.untyped_storage().nbytes() == keys.nbytes
    assert host.values.untyped_storage().nbytes() == keys.nbytes // 2


@pytest.mark.gpu
def test_pinned_by_a_real_gpu():
    """Not through the allocator that rounds up, and copied to the device from where it is."""
    keys = torch.randn(1, 2, 129, 64, device="cuda")
    before = torch.cuda.host_memory_stats()["allocated_bytes.current"]
    host = HostTier.copy_from(keys, keys[..., :32])
    copies = [copied(host) for copied in COPIES.values() if copied is not COPIES["select"]]
    copies.append(host.select(torch.tensor([0])))
    for tier in (host, *copies):
        assert tier.keys.is_pinned() and tier.values.is_pinned() and torch.equal(tier.keys.cuda(), keys)
    assert torch.cuda.host_memory_stats()["allocated_bytes.current"] == before
