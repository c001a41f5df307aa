"""Layers on different devices: every helper tensor is made on its layer's, whatever torch's default device is."""

import dataclasses
import sys

import pytest
import torch
from kvpress import AdaKVPress, KnormPress
from press_helpers import SHORT, decode, full_layers, left_padded, positions, prefill, random_ids
from torch import Tensor
from torch.testing import assert_close
from transformers import DynamicCache

from verkv import PoissonCompPress, VerKVPress, make_cache
from verkv.cache import VerKVLayer
from verkv.presses.scores import unit_scores

N_CONTEXT = 90
EXACT = {"epsilon": 1e-9, "seed": 0, **SHORT}
PRESSES = {
    "rope_pair": lambda: VerKVPress(KnormPress(), 0.5, shortlist=4, **EXACT),
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
