"""Sliding layers: transformers' attention window, and the ways back from it."""

import pytest
import torch
from sealing import MASKS_TAKE_POSITIONS
from torch.testing import assert_close
from transformers.cache_utils import DynamicSlidingWindowLayer

from verkv.window import LogicalKV, WindowLayer

WINDOW = 8


def states(n_tokens, batch=1, start=0):
    """Keys and values that say which token they are."""
    keys = torch.arange(start, start + n_tokens, dtype=torch.float32).view(1, 1, -1, 1).expand(batch, 2, -1, 4)
    return keys + 0.1 * torch.arange(batch).view(-1, 1, 1, 1), -keys


def filled(n_tokens, mark=True):
    layer = WindowLayer(WINDOW)
    layer.update(*states(n_tokens))
    if mark:
        layer.mark_context()
    return layer


@pytest.mark.parametrize("steps", [(3, 2, 1), (8, 1), (20, 1, 1), (5, 20, 3), (7, 1, 1)], ids=str)
@pytest.mark.parametrize("marked", [False, True])
def test_updates_are_those_of_transformers(steps, marked):
    ours, theirs, start = WindowLayer(WINDOW), DynamicSlidingWindowLayer(WINDOW), 0
    for n in steps:
        query = torch.arange(start, start + n) if MASKS_TAKE_POSITIONS else n
        assert ours.get_mask_sizes(query) == theirs.get_mask_sizes(query)
        assert_close(ours.update(*states(n, start=start)), theirs.update(*states(n, start=start)))
        start += n
        assert ours.get_seq_length() == theirs.get_seq_length() == start
        if marked:
            ours.mark_context()
        assert_close(ours._keys, theirs.keys)
    assert isinstance(ours.keys, LogicalKV) == isinstance(ours.values, LogicalKV) == marked


@pytest.mark.parametrize("n_context", [3, 7, 8, 20])
@pytest.mark.parametrize("n_after", [1, 4, 30])
@pytest.mark.parametrize("way", ["crop", "negative_crop", "assign", "roll_back_to"])
def test_way_back_to_the_context(n_context, n_after, way):
    layer = filled(n_context)
    keys, values = layer._keys, layer._values
    for i in range(2):
        layer.update(*states(n_after, start=n_context + i * n_after))
    if way == "crop":
        layer.crop(n_context)
    elif way == "negative_crop":
        layer.crop(-2 * n_after)
    elif way == "roll_back_to":
        layer.roll_back_to(n_context)
    else:
        layer.keys = layer.keys[:, :, :n_context]
        layer.values = layer.values[:, :, :n_context]
    assert layer.get_seq_length() == n_context
    assert_close((layer._keys, layer._values), (keys, values))


def test_way_back_before_the_last_update():
    layer = filled(20)
    layer.update(*states(3, start=20))
    keys = layer._keys
    layer.update(*states(5, start=23))
    layer.crop(23)
    assert layer.get_seq_length() == 23
    assert_close(layer._keys, keys)


def test_cropping_to_the_present_length_changes_nothing():
    layer = filled(20)
    layer.update(*states(3, start=20))
    layer.crop(23)
    layer.keys = layer.keys[:, :, :50]
    assert layer.get_seq_length() == 23


def test_forgotten_states_are_refused():
    layer = filled(20)
    layer.update(*states(3, start=20))
    layer.update(*states(5, start=23))
    with pytest.raises(ValueError, match=r"to 22 tokens.*crop to the context's end"):
        layer.crop(22)
    with pytest.raises(ValueError, match="22 tokens"):
        layer.roll_back_to(22)
    with pytest.raises(NotImplementedError, match="not to 22 tokens"):
        layer.keys = layer.keys[:, :, :22]
    assert layer.get_seq_length() == 28
    layer.crop(20)  # and the way back to the context is still open
    assert layer.get_seq_length() == 20


def test_crop_of_an_unfilled_window_is_that_of_transformers():
    layer = filled(5)
    layer.update(*states(2, start=5))
    layer.crop(3)
    assert layer.get_seq_length() == 3
    assert_close(layer._keys, states(3)[0])


@pytest.mark.parametrize("n_rejected", [0, 1, 4])
@pytest.mark.parametrize("n_context", [3, 7, 20])
def test_past_is_recorded_for_assisted_decoding_as_in_transformers(n_context, n_rejected):
    """Newer transformers keep what a window forgets until ``crop``, so that rejected candidates can be taken out."""
    theirs = DynamicSlidingWindowLayer(WINDOW)
    if not hasattr(theirs, "activate_past_recording"):
        pytest.skip("this transformers has no activate_past_recording")
    theirs.update(*states(n_context))
    ours = WindowLayer.adopt(theirs)
    ours.mark_context()
    start = n_context
    for layer in (ours, theirs):
        layer.activate_past_recording()
    for _ in range(3):
        assert ours.get_mask_sizes(4) == theirs.get_mask_sizes(4)
        assert_close(ours.update(*states(4, start=start)), theirs.update(*states(4, start=start)))
        for layer in (ours, theirs):
            layer.crop(-n_rejected)
        start += 4 - n_rejected
        assert ours.get_seq_length() == theirs.get_seq_length() == start
        assert_close((ours._keys, ours._values), (theirs.keys, theirs.values))


@pytest.mark.parametrize("index", [slice(1, 5), slice(0, 5, 2)], ids=str)
def test_stand_in_refuses_other_slices(index):
    with pytest.raises(NotImplementedError, match=r"\[:, :, :n\]"):
        filled(20).keys[:, :, index]


def test_batch_operations_move_the_remembered_context_too():
    layer = WindowLayer(WINDOW)
    layer.update(*states(20, batch=2))
    layer.mark_context()
    layer.update(*states(3, batch=2, start=20))
    layer.batch_repeat_interleave(2)
    layer.reorder_cache(torch.tensor([3, 0, 1, 2]))
    layer.batch_select_indices(torch.tensor([0, 1, 3]))
    rows = torch.tensor([1, 0, 1])
    assert_close(layer._keys, states(7, batch=2, start=16)[0][rows])
    layer.crop(20)
    assert_close(layer._keys, states(7, batch=2, start=13)[0][rows])
    assert_close(layer._values, states(7, batch=2, start=13)[1][rows])


def test_batch_operations_on_an_empty_layer_do_nothing():
    layer = WindowLayer(WINDOW)
    layer.batch_repeat_interleave(2)
    layer.reorder_cache(torch.tensor([0]))
    assert layer.get_seq_length() == 0


def test_reset_forgets_everything():
    layer = filled(20)
    layer.update(*states(3, start=20))
    layer.reset()
    assert layer.get_seq_length() == 0 and not layer.is_initialized
    layer.update(*states(5))
    assert_close(layer.keys, states(5)[0])


def test_adopted_layer_goes_on_where_the_plain_one_stopped():
    plain = DynamicSlidingWindowLayer(WINDOW)
    plain.update(*states(20))
    layer = WindowLayer.adopt(plain)
    assert layer.get_seq_length() == 20 and layer.sliding_window == WINDOW
    assert_close(layer.update(*states(2, start=20)), plain.update(*states(2, start=20)))


def test_memory_counts_every_tensor_once():
    layer = filled(20)
    small, marked = layer._sliding_window_tensor.nbytes, 2 * 7 * 2 * 4 * 4
    assert layer.memory() == {"device": {"unsealed": marked}, "device_uncharged": {"window_states": small}}
    layer.update(*states(3, start=20))  # `before` is the context
    assert layer.memory()["device_uncharged"]["window_states"] == marked + small
    layer.update(*states(3, start=23))
    assert layer.memory()["device_uncharged"]["window_states"] == 2 * marked + small
    layer.crop(20)
    assert layer.memory()["device"]["unsealed"] == marked
