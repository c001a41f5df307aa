"""Layers on different devices, and on one that is neither CPU nor CUDA: helper tensors are on their layer's device."""

import contextlib
import dataclasses
import sys

import pytest
import torch
from kvpress import AdaKVPress, KnormPress, SnapKVPress
from kvpress.presses.fastkvzip_press import FastKVzipGate
from press_helpers import SHORT, decode, full_layers, left_padded, leftovers, positions, prefill, random_ids
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from transformers import DynamicCache

from verkv import FastKVzipPress, KVzipPress, PoissonCompPress, VerKVPress, make_cache
from verkv.attention import SealedHandle
from verkv.cache import VerKVLayer
from verkv.presses.budget import solving_device
from verkv.presses.scores import unit_scores

N_CONTEXT = 90
EXACT = {"epsilon": 1e-9, "seed": 0, **SHORT}
PRESSES = {
    "default": lambda: VerKVPress(KnormPress(), 0.5, **EXACT),
    "rope_pair": lambda: VerKVPress(KnormPress(), 0.5, sketch="rope_pair", shortlist=4, **EXACT),
    "exact": lambda: VerKVPress(KnormPress(), 0.5, sketch="exact", **EXACT),
    "optimal": lambda: VerKVPress(KnormPress(), 0.5, shrinkage="optimal", record_bounds=True, audit=True, **EXACT),
    "model": lambda: VerKVPress(KnormPress(), 0.5, budget_scope="model", **EXACT),
    "poisson": lambda: PoissonCompPress(AdaKVPress(KnormPress()), 0.5, seed=0, audit=True, **SHORT),
}


def tensors_of(obj, path="", seen=None):
    """All tensors that an object holds, with the way to each."""
    seen = set() if seen is None else seen
    if id(obj) in seen:
        return
    seen.add(id(obj))
    if isinstance(obj, Tensor):
        yield path, obj
    elif isinstance(obj, dict):
        for key, value in obj.items():
            yield from tensors_of(value, f"{path}[{key}]", seen)
    elif isinstance(obj, (list, tuple)):
        for i, value in enumerate(obj):
            yield from tensors_of(value, f"{path}[{i}]", seen)
    elif hasattr(obj, "__dict__") and type(obj).__module__.startswith("verkv"):
        for key, value in vars(obj).items():
            if key not in ("_siblings", "stats"):
                yield from tensors_of(value, f"{path}.{key}", seen)


def misplaced(cache):
    """Tensors of sealed layers that are neither on the layer's device nor part of its host tier."""
    wrong = []
    for i in full_layers(cache):
        layer = cache.layers[i]
        found = dict(tensors_of(layer))
        assert {".context.rows.keys", ".tail_keys", ".context.n_padding"} <= set(found)
        for path, tensor in found.items():
            on_host = ".host." in path or (getattr(layer.context.sketch, "is_oracle", False) and "._keys" in path)
            if tensor.device.type != ("cpu" if on_host else layer.context.device.type):
                wrong.append(f"layer {i}: {path} is on {tensor.device}")
    return wrong


def use(model, press, device="cpu"):
    """Everything a cache can do; the logits on the way, and the cache."""
    ids, mask = left_padded([random_ids(1, N_CONTEXT, seed=1), random_ids(1, N_CONTEXT - 9, seed=2)])
    ids, mask, steps = ids.to(device), mask.to(device), random_ids(2, 6, seed=3).to(device)
    cache = prefill(model, ids, press, attention_mask=mask, position_ids=positions(mask))
    logits = []

    def step(tokens):
        nonlocal mask
        mask = torch.cat([mask, torch.ones_like(tokens)], 1)
        place = {"attention_mask": mask, "position_ids": positions(mask)[:, -tokens.shape[1] :]}
        logits.append(decode(model, tokens, cache, **place))

    step(steps[:, :4])
    step(steps[:, 4:5])
    cache.crop(N_CONTEXT + 2)
    mask = mask[:, : N_CONTEXT + 2]
    cache.batch_repeat_interleave(2)
    mask = mask.repeat_interleave(2, 0)
    cache.reorder_cache(torch.tensor([1, 0, 2, 2], device=device))
    step(steps[:, :1].repeat_interleave(2, 0))
    cache.reorder_cache(torch.tensor([2, 0, 1, 3], device=device))
    mask = mask[torch.tensor([2, 0, 1, 3], device=device)]
    step(steps[:, :2].repeat_interleave(2, 0))
    cache.batch_select_indices(torch.tensor([1, 2], device=device))
    mask = mask[torch.tensor([1, 2], device=device)]
    step(steps[:, 2:3])
    return logits, cache


@pytest.mark.parametrize("kind", PRESSES)
def test_tensors_are_on_their_layers_device(tiny_model, kind):
    model, press = tiny_model("llama", num_hidden_layers=2), PRESSES[kind]()
    _, cache = use(model, press)
    assert len(full_layers(cache)) == 2 and misplaced(cache) == []
    records = dict(tensors_of(dataclasses.asdict(press.stats)))
    assert records and {t.device.type for t in records.values()} == {"cpu"}


class _DeviceOfFactories(torch.overrides.TorchFunctionMode):
    """Collect the calls that make a tensor without saying on which device, from VerKV's own files."""

    FACTORIES = ("arange", "empty", "eye", "full", "linspace", "ones", "rand", "randn", "tensor", "zeros")

    def __init__(self):
        super().__init__()
        self.made = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in self.FACTORIES and not types and kwargs.get("device") is None:
            frame = sys._getframe(1)
            if "verkv" in frame.f_globals.get("__name__", ""):
                self.made.append(f"{frame.f_globals['__name__']}:{frame.f_lineno}")
        return func(*args, **kwargs)


@pytest.mark.parametrize("kind", PRESSES)
def test_no_tensor_is_made_on_a_default_device(tiny_model, kind):
    """One made on the CPU by default would fail, or be copied at every step, for a layer that is elsewhere."""
    model, press = tiny_model("llama", num_hidden_layers=2), PRESSES[kind]()
    with _DeviceOfFactories() as mode:
        use(model, press)
        press.stats.summary()
    assert sorted(set(mode.made)) == []


@pytest.mark.parametrize("kind", PRESSES)
def test_default_device_is_another(tiny_model, kind):
    """With ``torch.set_default_device``, whatever does not name its device is made elsewhere, and on meta it fails."""
    model = tiny_model("llama", num_hidden_layers=2)
    expected, _ = use(model, PRESSES[kind]())
    ids = random_ids(1, N_CONTEXT, seed=1)
    cache = prefill(model, ids)
    scores = {i: torch.rand(1, 2, N_CONTEXT) for i in range(2)}
    query, tail = torch.randn(1, 4, 3, 16), torch.randn(1, 2, 3, 16)
    with torch.device("meta"):
        press = PRESSES[kind]()
        press.seal(model, cache, scores)
        outputs = []
        for layer in cache.layers:
            layer.update(tail, tail)
            outputs.append(layer.attend(query, None, 0.25))
        cache.batch_repeat_interleave(2)
        for layer in cache.layers:
            layer.reorder_cache(torch.tensor([1, 0], device="cpu"))
            layer.batch_select_indices(torch.tensor([1], device="cpu"))
        summary = press.stats.summary()
    assert {output.device.type for output in outputs} == {"cpu"} and misplaced(cache) == []
    assert summary["question_decisions"] == 2 * 4 * 3
    assert {t.device.type for _, t in tensors_of(dataclasses.asdict(press.stats))} == {"cpu"}
    for before, after in zip(expected, use(model, PRESSES[kind]())[0], strict=True):
        assert torch.equal(before, after)


# --- caches over several devices --------------------------------------------------------------------------------------


def on_meta(layer):
    """An unsealed layer of the same kind and length on another device."""
    other = type(layer)() if isinstance(layer, VerKVLayer) else type(layer)(layer.sliding_window)
    keys = torch.empty(1, 2, N_CONTEXT, 16, device="meta")
    other.update(keys, keys)
    return other


@pytest.mark.parametrize("kind,other", [("llama", 3), ("gemma3", 2)], ids=["full", "sliding"])
def test_a_layer_on_another_device_takes_part_in_batch_operations(tiny_model, kind, other):
    """Sealed layers on the CPU beside one that is elsewhere; indices are on the CPU."""
    model = tiny_model(kind)
    cache = make_cache(model.config)
    prefill(model, random_ids(1, N_CONTEXT), cache=cache)
    press = VerKVPress(KnormPress(), 0.5, **EXACT)
    scores = {i: torch.rand(1, 2, N_CONTEXT) for i, layer in enumerate(cache.layers) if isinstance(layer, VerKVLayer)}
    press.seal(model, cache, scores)
    cache.layers[other] = on_meta(cache.layers[other])
    cache.batch_repeat_interleave(3)
    cache.reorder_cache(torch.tensor([2, 0, 0]))
    cache.batch_select_indices(torch.tensor([0, 2]))
    devices = [layer._keys.device.type for layer in cache.layers if getattr(layer, "_keys", None) is not None]
    assert "meta" in devices and misplaced(cache) == []
    assert {layer.keys.shape[0] for i, layer in enumerate(cache.layers) if i in full_layers(cache)} == {2}
    assert cache.layers[other]._keys.shape[0] == 2
    assert cache.memory_report().device["unsealed"] > 0
    cache.reset()
    assert cache.get_seq_length() == 0


def test_scores_of_layers_on_different_devices_are_checked_where_they_are():
    """The padding mask is made once, and moved to each layer's device."""
    is_token = torch.ones(1, 5, dtype=torch.bool)
    scores = unit_scores({0: torch.full((1, 2, 5), 0.5, dtype=torch.bfloat16), 1: torch.rand(1, 2, 5)}, is_token)
    assert {score.dtype for score in scores.values()} == {torch.float32}


# --- a device that is neither the CPU nor CUDA ------------------------------------------------------------------------

ELSEWHERE = torch.device("meta")  # a name that torch knows without a backend behind it; nothing here is without data


class OnDevice(Tensor):
    """A tensor on a pretended device, which has no float64 and refuses tensors of the CPU, as Apple's MPS does.

    What is computed with it is computed on the CPU, from ``raw``.
    """

    @staticmethod
    def __new__(cls, raw: Tensor):
        if raw.dtype == torch.float64:
            raise TypeError("the pretended device has no float64")
        place = {"strides": raw.stride(), "storage_offset": raw.storage_offset(), "device": ELSEWHERE}
        tensor = Tensor._make_wrapper_subclass(cls, raw.shape, dtype=raw.dtype, **place)
        tensor.raw = raw
        return tensor

    def tolist(self):
        return self.raw.tolist()

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return compute(func, args, kwargs or {})


def compute(func, args, kwargs):
    """One operation of torch, on the CPU; the result is where its arguments are, or where it was asked to be."""
    name, tensors = func._schema.name, [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    here = [t for t in tensors if isinstance(t, OnDevice)]
    if here and name not in ("aten::_to_copy", "aten::copy_"):
        strangers = [tuple(t.shape) for t in tensors if not isinstance(t, OnDevice) and t.dim() > 0]
        if strangers:
            raise RuntimeError(f"{name}: expected all tensors on {ELSEWHERE}, got some of shape {strangers} on the CPU")
    raw_args, raw_kwargs = tree_map(lambda t: t.raw if isinstance(t, OnDevice) else t, (args, kwargs))
    device = kwargs.get("device")
    if device is not None:
        raw_kwargs["device"] = "cpu"
    result = func(*raw_args, **raw_kwargs)
    if func._schema.is_mutable:
        assert all(t.raw.shape == t.shape for t in here), name
        return args[0]
    moves = torch.device(device).type == ELSEWHERE.type if device is not None else bool(here)
    return tree_map(lambda t: OnDevice(t) if isinstance(t, Tensor) else t, result) if moves else result


class _Operations(TorchDispatchMode):
    """Also those that make tensors, and that move them from the CPU."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return compute(func, args, kwargs or {})


class _TensorFunction(torch.overrides.TorchFunctionMode):
    """``torch.tensor`` looks for the device's backend by itself."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        device = kwargs.pop("device", None) if func in (torch.tensor, torch.as_tensor) else None
        made = func(*args, **kwargs)
        return made if device is None else made.to(device)


@pytest.fixture
def elsewhere(monkeypatch):
    """The pretended device; models are put there by ``move``."""

    def wrap(cls, tail, layer):  # a handle cannot be a view of such a tensor; nothing computes with it
        handle = torch.empty(tail.shape, dtype=tail.dtype).as_subclass(cls)
        handle.layer = layer
        return handle

    monkeypatch.setattr(SealedHandle, "wrap", classmethod(wrap))
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *args: False)  # it knows real backends only
    with _Operations(), _TensorFunction():
        yield ELSEWHERE


def move(module):
    """Put a module's weights on the pretended device."""
    for part in module.modules():
        for name, value in part._parameters.items():
            if value is not None:
                part._parameters[name] = nn.Parameter(OnDevice(value.data), requires_grad=False)
        for name, value in part._buffers.items():
            if value is not None:
                part._buffers[name] = OnDevice(value)
    return module


class ByteTokenizer:
    """Enough of a tokenizer for KVzip's replay with a vocabulary of 256."""

    chat_template = None

    def encode(self, text, return_tensors="pt", add_special_tokens=False):
        return torch.tensor([[3 + byte % 250 for byte in text.encode()[::8]]])


def gates(n_layers):
    return [FastKVzipGate(i, 64, 2, 2, torch.float32) for i in range(n_layers)]


PRESSES_ELSEWHERE = {
    **PRESSES,
    "alpha": lambda: VerKVPress(SnapKVPress(window_size=4), 0.5, alpha=0.5, **{**EXACT, "epsilon": 0.1}),
    "paper": lambda: VerKVPress(KnormPress(), 0.5, paper=True, shortlist=4, **{**EXACT, "epsilon": 0.1}),
    "replay": lambda: VerKVPress(KVzipPress(tokenizer=ByteTokenizer(), chunk_size=30), 0.5, **EXACT),
    "gates": lambda: PoissonCompPress(FastKVzipPress(gates=gates(2)), 0.5, seed=0, **SHORT),
    "eviction": lambda: KVzipPress(0.5, tokenizer=ByteTokenizer(), budget_scope="layer", audit=True),
}


def test_the_pretended_device_refuses_what_mps_refuses(elsewhere):
    here = torch.ones(3).to(elsewhere)
    assert here.device == elsewhere and (here + 1).device == elsewhere and (here + 1).tolist() == [2.0] * 3
    with pytest.raises(TypeError, match="no float64"):
        here.double()
    with pytest.raises(TypeError, match="no float64"):
        torch.zeros(2, dtype=torch.float64, device=elsewhere)
    with pytest.raises(RuntimeError, match="expected all tensors on"):
        here + torch.ones(3)
    assert solving_device(elsewhere).type == "cpu" == solving_device(torch.device("cpu")).type


@pytest.mark.parametrize("kind", PRESSES_ELSEWHERE)
def test_a_device_without_float64_gives_what_the_cpu_gives(tiny_model, request, by_torch, kind):
    """The same sample is drawn and the same tokens are fetched; nothing is left on the CPU but the host tier."""
    model = tiny_model("llama", "eager", num_hidden_layers=2)
    torch.manual_seed(0)
    press = PRESSES_ELSEWHERE[kind]()
    expected, _ = use(model, press)
    before = press.stats.summary()
    device = request.getfixturevalue("elsewhere")
    torch.manual_seed(0)
    press = PRESSES_ELSEWHERE[kind]()
    logits, cache = use(move(model), press, device)
    assert len(full_layers(cache)) == 2 and misplaced(cache) == []
    assert {layer.context.device for layer in cache.layers} == {device}
    for ours, theirs in zip(logits, expected, strict=True):
        assert ours.device == device
        assert_close(ours.cpu(), theirs, atol=1e-5, rtol=0.0)
    now = press.stats.summary()
    for name in [name for name in now if name.endswith("promoted")]:
        # Sums in float32 have another order there, so that a token at the very boundary may be promoted for certainty.
        assert now.pop(name) == pytest.approx(before.pop(name), rel=1e-3)
    assert now == before
    records = dict(tensors_of(dataclasses.asdict(press.stats)))
    assert {t.device.type for t in records.values()} == {"cpu"}


@pytest.mark.parametrize("kind", ["gemma3", "qwen3_5"])
def test_other_kinds_of_layers_elsewhere(tiny_model, request, kind):
    model = tiny_model(kind, "eager")
    ids, question = random_ids(1, N_CONTEXT), random_ids(1, 5)
    expected = decode(model, question, prefill(model, ids, cache=make_cache(model.config)))
    device = request.getfixturevalue("elsewhere")
    ids, question = ids.to(device), question.to(device)
    press = VerKVPress(KVzipPress(tokenizer=ByteTokenizer(), chunk_size=30), 0.5, **EXACT)
    cache = prefill(move(model), ids, press, cache=make_cache(model.config))
    for _ in range(2):
        assert_close(decode(model, question, cache).cpu(), expected, atol=1e-4, rtol=0.0)
        cache.crop(N_CONTEXT)
    assert full_layers(cache) and misplaced(cache) == []


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"prompt_lookup_num_tokens": 2}], ids=str)
def test_generate_elsewhere(tiny_model, request, options):
    model, ids = tiny_model("llama", "eager", num_hidden_layers=2), random_ids(1, N_CONTEXT)
    ids[:, -6:] = ids[:, 10:16]  # so that prompt lookup has something to propose
    options = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, **options}
    expected = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    device = request.getfixturevalue("elsewhere")
    press, ids = VerKVPress(KnormPress(), 0.5, **EXACT), ids.to(device)
    with press(move(model)):
        tokens = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    assert tokens.tolist() == expected.tolist() and press.stats.sealed_layers == (0, 1)


# --- device_map -------------------------------------------------------------------------------------------------------


def place(model, layers):
    """Put decoder layers on the pretended device, with hooks that move what comes in and out, as accelerate's do."""
    handles = []
    for i in layers:
        layer = move(model.model.layers[i])
        to = lambda device: lambda t: t.to(device) if isinstance(t, Tensor) else t  # noqa: E731
        enter = lambda module, args, kwargs: tree_map(to(ELSEWHERE), (args, kwargs))  # noqa: B023, E731
        leave = lambda module, args, output: tree_map(to("cpu"), output)  # noqa: B023, E731
        handles.append(layer.register_forward_pre_hook(enter, with_kwargs=True))
        handles.append(layer.register_forward_hook(leave))
    return handles


PRESSES_PLACED = {kind: make for kind, make in PRESSES_ELSEWHERE.items() if kind != "gates"} | {
    "gates": lambda: PoissonCompPress(FastKVzipPress(gates=gates(4)), 0.5, budget_scope="model", seed=0, **SHORT),
}


@pytest.mark.parametrize("kind", PRESSES_PLACED)
def test_layers_on_two_devices(tiny_model, request, by_torch, kind):
    model = tiny_model("llama", "eager")
    torch.manual_seed(0)
    expected, _ = use(model, PRESSES_PLACED[kind]())
    request.getfixturevalue("elsewhere")
    place(model, [1, 2])
    torch.manual_seed(0)
    press = PRESSES_PLACED[kind]()
    logits, cache = use(model, press)
    assert [layer.context.device.type for layer in cache.layers] == ["cpu", "meta", "meta", "cpu"]
    assert misplaced(cache) == []
    for ours, theirs in zip(logits, expected, strict=True):
        assert_close(ours, theirs, atol=1e-5, rtol=0.0)


def test_a_hybrid_on_two_devices(tiny_model, request):
    """Linear and full layers on both."""
    model, ids, question = tiny_model("qwen3_5", "eager"), random_ids(1, N_CONTEXT), random_ids(1, 5)
    expected = decode(model, question, prefill(model, ids, cache=make_cache(model.config)))
    request.getfixturevalue("elsewhere")
    place(model, [0, 3])
    cache = prefill(model, ids, VerKVPress(KnormPress(), 0.5, **EXACT), cache=make_cache(model.config))
    for _ in range(2):
        assert_close(decode(model, question, cache), expected, atol=1e-4, rtol=0.0)
        cache.crop(N_CONTEXT)
    assert full_layers(cache) == [1, 3] and misplaced(cache) == []
    assert [layer.state.conv.device.type for layer in cache.layers[::2]] == ["meta", "cpu"]


OFFLOADED = {"model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "model.norm": "cpu", "lm_head": "cpu"}


def offload(model, folder, layers=(1, 2)):
    """Weights of some layers on disk, on the meta device between their forward passes."""
    from accelerate import dispatch_model

    places = OFFLOADED | {f"model.layers.{i}": "disk" if i in layers else "cpu" for i in range(4)}
    model = dispatch_model(model, places, main_device="cpu", offload_dir=str(folder))
    assert model.model.layers[layers[0]].mlp.up_proj.weight.device.type == "meta"
    return model


@pytest.mark.parametrize("kind", PRESSES_PLACED)
def test_weights_offloaded_to_disk(tiny_model, tmp_path, kind):
    model = tiny_model("llama")
    torch.manual_seed(0)
    expected, _ = use(model, PRESSES_PLACED[kind]())
    model = offload(model, tmp_path)
    torch.manual_seed(0)
    logits, cache = use(model, PRESSES_PLACED[kind]())
    assert len(full_layers(cache)) == 4 and misplaced(cache) == []
    for ours, theirs in zip(logits, expected, strict=True):
        assert_close(ours, theirs, atol=1e-5, rtol=0.0)
    assert leftovers(model) == []


@pytest.mark.parametrize("repaired", [True, False])
def test_a_hybrid_offloaded_to_disk(tiny_model, tmp_path, monkeypatch, repaired):
    """accelerate keeps each module's forward function as it finds it, so the repair must come first."""
    model, ids, question = tiny_model("qwen3_5"), random_ids(1, N_CONTEXT), random_ids(1, 5)
    cache = make_cache(model.config)
    expected = decode(model, question, prefill(model, ids, cache=cache))
    delta_net = type(model.model.layers[0].linear_attn)
    if not repaired:
        monkeypatch.setattr(delta_net, "forward", delta_net.forward.__wrapped__)
    model = offload(model, tmp_path, layers=(0, 1))
    press = VerKVPress(KnormPress(), 0.5, **EXACT)
    hint = "call verkv.make_cache\\(config\\) once before the model is loaded"
    with contextlib.nullcontext() if repaired else pytest.raises(RuntimeError, match=hint):
        cache = prefill(model, ids, press, cache=make_cache(model.config))
        assert_close(decode(model, question, cache), expected, atol=1e-4, rtol=0.0)
        assert full_layers(cache) == [1, 3] and misplaced(cache) == []


@pytest.mark.gpu
@pytest.mark.parametrize("kind", PRESSES)
def test_device_map_over_the_cpu_and_a_gpu(tiny_model, kind):
    from accelerate import dispatch_model

    model = tiny_model("llama", num_hidden_layers=4)
    expected, _ = use(model, PRESSES[kind]())
    places = {"model.embed_tokens": 0, "model.rotary_emb": 0, "model.norm": 0, "lm_head": 0}
    places |= {f"model.layers.{i}": "cpu" if i in (1, 2) else 0 for i in range(4)}
    model = dispatch_model(model, places, main_device=0)
    logits, cache = use(model, PRESSES[kind](), device="cuda:0")
    assert misplaced(cache) == []
    for ours, theirs in zip(logits, expected, strict=True):
        assert_close(ours.cpu(), theirs, atol=1e-3, rtol=0.0)


@pytest.mark.gpu
def test_model_on_a_gpu(tiny_model):
    model = tiny_model("llama").cuda()
    cache = DynamicCache()
    prefill(model, random_ids(1, N_CONTEXT).cuda(), VerKVPress(KnormPress(), 0.5, **EXACT), cache=cache)
    decode(model, random_ids(1, 4).cuda(), cache)
    assert misplaced(cache) == [] and {cache.layers[i].context.device.type for i in full_layers(cache)} == {"cuda"}
