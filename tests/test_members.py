"""Layers of a cache know each other without keeping each other alive."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from sealing import forward, prompt_ids, sampled_codes, seal
from transformers import Cache, DynamicCache

from verkv.cache import make_cache
from verkv.kvfetch import FetchConfig
from verkv.members import Member, join_layers
from verkv.sketches import RopePairSketch


def by_hand(model, cache, n_tokens=100):
    forward(model, prompt_ids(1, n_tokens), cache)
    seal(model, cache, sampled_codes, fetch=FetchConfig(0.05), sketch=RopePairSketch())
    return cache


def by_press(model, cache):
    from kvpress import KnormPress

    from verkv import VerKVPress

    with VerKVPress(KnormPress(), 0.5, n_sink=4, n_local=8)(model):
        forward(model, prompt_ids(1, 100), cache)
    return cache


@pytest.mark.parametrize("sealed", [by_hand, by_press])
@pytest.mark.parametrize("make", [DynamicCache, None], ids=["DynamicCache", "make_cache"])
@pytest.mark.parametrize("kind", ["llama", "gemma3", "qwen3_5"])
def test_a_dropped_cache_is_freed_at_once(tiny_model, kind, make, sealed):
    """Not by the garbage collector: a context holds gigabytes that no allocator knows how to ask for."""
    model = tiny_model(kind)
    if kind == "qwen3_5" and make is not None:
        pytest.skip("hybrid models need make_cache")
    if kind == "qwen3_5" and hasattr(Cache, "update_conv_state"):
        pytest.skip("hybrid models need transformers 5.2 to 5.4")
    cache = sealed(model, make_cache(model.config) if make is None else make())
    forward(model, prompt_ids(1, 5), cache)
    layers = [weakref.ref(layer) for layer in cache.layers]
    contexts = [weakref.ref(layer.context) for layer in cache.layers if getattr(layer, "context", None) is not None]
    assert contexts
    gc.disable()
    try:
        del cache
        assert all(reference() is None for reference in layers + contexts)
    finally:
        gc.enable()


@pytest.mark.parametrize(
    "again", [copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))], ids=["copy", "pickle"]
)
def test_copies_know_their_own_layers(tiny_model, again):
    model = tiny_model("llama")
    cache = by_hand(model, make_cache(model.config))
    other = again(cache)
    assert all([sibling for _, sibling in layer._siblings] == other.layers for layer in other.layers)
    question = prompt_ids(1, 5)
    logits = forward(model, question, cache)
    del cache
    assert torch.equal(forward(model, question, other), logits)


def test_copying_many_layers_does_not_recurse(tiny_model):
    model = tiny_model("llama", num_hidden_layers=120)
    cache = by_hand(model, make_cache(model.config), n_tokens=60)
    assert len(copy.deepcopy(cache).layers) == len(pickle.loads(pickle.dumps(cache)).layers) == 120


class Length(Member):
    def __init__(self, length):
        self.get_seq_length = lambda: length


@pytest.mark.parametrize(
    "lengths,index,n_new,refused",
    [
        ((10, 10, 10), 0, 2, False),
        ((12, 10, 10), 1, 2, False),
        ((12, 12, 10), 2, 2, False),
        ((12, 10, 10), 0, 2, True),
        ((12, 10, 10), 1, 1, True),
        ((12, 12, 10), 1, 2, True),
        ((10, 10, 12), 0, 1, True),
    ],
)
def test_half_a_forward_pass_is_refused(lengths, index, n_new, refused):
    layers = [Length(n) for n in lengths]
    join_layers(layers)
    if refused:
        with pytest.raises(ValueError, match=r"half a forward pass.*cache\.crop\(10\)"):
            layers[index].refuse_half_a_forward(n_new)
    else:
        layers[index].refuse_half_a_forward(n_new)
