"""The oracle: exact scores, no bytes of its own, charged as the 2-bit sketch."""

import pytest
import torch
from torch.testing import assert_close

from verkv.sketches import ExactSketch, RopePairSketch


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
def test_logits_are_exact(dtype):
    keys, query = torch.randn(2, 3, 50, 16).to(dtype), torch.randn(2, 3, 7, 16).to(dtype)
    logits = ExactSketch().build(keys).logits(query)
    assert logits.dtype == torch.float32
    for context in range(2):
        for head in range(3):
            expected = query[context, head].double() @ keys[context, head].double().mT
            assert_close(logits[context, head].double(), expected, atol=1e-5, rtol=1e-5)


def test_it_keeps_a_reference_and_no_bytes():
    keys = torch.randn(1, 2, 10, 16)
    recipe = ExactSketch()
    sketch = recipe.build(keys)
    assert sketch.is_oracle and sketch.name == "exact"
    assert sketch._keys is keys and not hasattr(recipe, "_keys")
    assert sketch.is_linear and torch.equal(sketch.decode(), keys)
    assert (sketch.nbytes, sketch.uncharged_nbytes, sketch.tensors(), sketch.uncharged_tensors()) == (0, 0, {}, {})


@pytest.mark.parametrize("n_tokens", [1, 128, 1000])
def test_it_is_charged_as_another_sketch(n_tokens):
    for other in (RopePairSketch(), RopePairSketch(fraction=0.5, group_size=32)):
        assert ExactSketch(charged_as=other).charged_bytes(n_tokens, 64) == other.charged_bytes(n_tokens, 64)
    assert ExactSketch().charged_bytes(n_tokens, 64) == RopePairSketch().charged_bytes(n_tokens, 64) > 0


def test_select_reindexes_the_batch():
    keys, query, rows = torch.randn(3, 2, 10, 16), torch.randn(3, 2, 4, 16), torch.tensor([2, 0, 2])
    sketch = ExactSketch(charged_as=RopePairSketch(fraction=0.5)).build(keys)
    selected = sketch.select(rows)
    assert torch.equal(selected.logits(query), ExactSketch().build(keys[rows]).logits(query))
    assert selected.charged_as == sketch.charged_as
