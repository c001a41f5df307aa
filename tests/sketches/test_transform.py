"""The transform sketch: RoPE undone and applied again, weights by queries, bases fitted elsewhere, a real model."""

import pytest
import torch
from torch.testing import assert_close

import verkv.sketches.transform
from verkv.rotary import Rotary, rotary_from_config
from verkv.sketches import RopePairSketch, TransformSketch, fit_key_basis

ROTARY = Rotary(1.0 / 10000.0 ** (torch.arange(8) / 8))


def keys_before_rope(n_tokens=400, rank=6, seed=0):
    """Two KV heads, 16 channels, few directions, a little noise, a mean; (2, T, 16)."""
    generator = torch.Generator().manual_seed(seed)
    factors = torch.randn(n_tokens, rank, generator=generator)
    keys = torch.einsum("tr,hrd->htd", factors, torch.randn(2, rank, 16, generator=generator))
    return keys + 0.05 * torch.randn(2, n_tokens, 16, generator=generator) + 1


def squared_error(sketch, keys, rows):
    return float((sketch.logits(rows) - rows @ keys.mT).square().mean())


# --- RoPE -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first,n_padding", [(0, 0), (0, 21), (1000, 3), (100_000, 0)])
@pytest.mark.parametrize("head_dim", [16, 24], ids=["whole head", "partly rotated"])
def test_keys_come_back_to_their_positions(first, n_padding, head_dim):
    """A byte for each channel leaves errors of the range / 256, whatever the positions (float32 angles of 100,000
    radians add 0.004). Single tokens are clipped."""
    positions = first + (torch.arange(300) - n_padding).clamp_min(0)
    before = torch.randn(1, 2, 300, head_dim)
    before[:, :, :n_padding] = before[:, :, n_padding, None]
    keys = ROTARY.apply(before, positions)
    sketch = TransformSketch(ROTARY, bits_per_token=8 * head_dim).build(keys, positions=positions[None])
    error = sketch.decode() - keys
    assert error.abs().amax() < 0.4 and error.square().mean().sqrt() < 0.015


def test_scores_depend_on_relative_positions_only():
    before, rows = keys_before_rope(), torch.randn(1, 2, 5, 16)
    logits = []
    for shift in (0, 77):
        positions = torch.arange(400) + shift
        at = torch.tensor([399, 400, 405, 500, 640]) + shift
        queries = ROTARY.apply(rows, at)
        sketch = TransformSketch(ROTARY).build(ROTARY.apply(before[None], positions), queries, positions[None])
        logits.append(sketch.logits(queries))
    assert_close(logits[1], logits[0], atol=0.02, rtol=0)


def test_undoing_rope_makes_few_components_suffice():
    keys = ROTARY.apply(keys_before_rope()[None], torch.arange(400))
    rows = torch.randn(1, 2, 5, 16)
    errors = [squared_error(TransformSketch(rotary, 18).build(keys), keys, rows) for rotary in (ROTARY, None)]
    assert errors[0] < 0.1 * errors[1]


@pytest.mark.parametrize("chunk_tokens", [64, 128, 192])
@pytest.mark.parametrize("n_padding", [0, 70])
def test_chunks_do_not_matter(monkeypatch, chunk_tokens, n_padding):
    keys, rows = torch.randn(1, 2, 300, 16), torch.randn(1, 2, 5, 16)
    positions = (torch.arange(300) - n_padding).clamp_min(0)[None]
    sketch = TransformSketch(ROTARY).build(keys, positions=positions)
    logits, decoded = sketch.logits(rows), sketch.decode()
    monkeypatch.setattr(verkv.sketches.transform, "CHUNK_BYTES", chunk_tokens * 4 * 2 * 16)
    assert len(list(sketch._decoded(0))) == -(-300 // chunk_tokens)
    assert_close(sketch.logits(rows), logits, atol=1e-4, rtol=1e-4)
    assert_close(sketch.decode(), decoded, atol=1e-4, rtol=1e-4)


def test_rotation_that_does_not_fit():
    with pytest.raises(ValueError, match="rotary has 16 channels"):
        TransformSketch(ROTARY).build(torch.randn(1, 2, 5, 8))


# --- weights and basis ------------------------------------------------------------------------------------------------


def test_channels_that_queries_use_are_coded_best():
    keys = torch.randn(1, 2, 400, 16)
    rows = torch.zeros(1, 2, 50, 16)
    rows[..., [2, 10]] = torch.randn(1, 2, 50, 2)  # one RoPE pair
    weighted = TransformSketch(ROTARY).build(keys, rows)
    assert squared_error(weighted, keys, rows) < 0.2 * squared_error(TransformSketch(ROTARY).build(keys), keys, rows)


def test_kv_heads_share_one_basis():
    """The second head is a function of the first: half of the bits do for both."""
    first = torch.randn(400, 16)
    keys = torch.stack([first, first @ torch.linalg.qr(torch.randn(16, 16))[0]])[None]
    rows = torch.randn(1, 2, 5, 16)
    joint = TransformSketch(None, bits_per_token=16).build(keys)
    alone = TransformSketch(None, bits_per_token=16).build(keys[:, :1])
    assert squared_error(joint, keys, rows) < 0.5 * squared_error(alone, keys[:, :1], rows[:, :1])


def test_basis_of_the_same_context_changes_nothing():
    before, queries, rows = keys_before_rope(), torch.randn(4, 7, 16), torch.randn(1, 2, 5, 16)
    positions = torch.arange(400)
    keys = ROTARY.apply(before[None], positions)
    basis = fit_key_basis(ROTARY.undo(keys[0], positions), queries, ROTARY)
    fitted = TransformSketch(ROTARY).build(keys, queries[None])
    loaded = TransformSketch(ROTARY, basis=basis).build(keys)
    assert_close(loaded.logits(rows), fitted.logits(rows), atol=1e-3, rtol=1e-3)


def test_basis_of_a_like_context_is_nearly_as_good():
    contexts = keys_before_rope(800).chunk(2, dim=1)
    keys, rows = (ROTARY.apply(context[None], torch.arange(400)) for context in contexts), torch.randn(1, 2, 5, 16)
    keys = list(keys)
    basis = fit_key_basis(contexts[0], None, ROTARY)
    errors = [squared_error(TransformSketch(ROTARY, basis=b).build(keys[1]), keys[1], rows) for b in (None, basis)]
    assert errors[1] < 1.3 * errors[0]


def test_basis_of_another_shape_is_refused():
    basis = fit_key_basis(torch.randn(3, 50, 16))
    with pytest.raises(ValueError, match="basis is for 3 KV heads of 16 channels"):
        TransformSketch(None, basis=basis).build(torch.randn(1, 2, 20, 16))


# --- a real model -----------------------------------------------------------------------------------------------------


@pytest.mark.real_model
def test_logit_error_on_a_real_model(demo_model):
    """At the 2-bit sketch's size, the centred error is at most 0.4 of that sketch's, with other queries than fitted."""
    from transformers import DynamicCache

    from verkv.attention import observe_attention
    from verkv.demo import build_task, encode_task

    model, tokenizer = demo_model
    context_ids, question_ids = encode_task(tokenizer, build_task(tokenizer, 700, seed=1), model.device)
    seen = {}
    cache = DynamicCache()
    with torch.inference_mode(), observe_attention(lambda m, q, k, s: seen.setdefault(m.layer_idx, []).append((q, k))):
        model(input_ids=context_ids, past_key_values=cache, logits_to_keep=1)
        model(input_ids=question_ids, past_key_values=cache, logits_to_keep=1)
    recipes = {"transform": TransformSketch(rotary_from_config(model.config)), "rope_pair": RopePairSketch()}
    errors = {name: [] for name in recipes}
    for layer in range(0, 30, 5):
        (fit, keys), (test, _) = seen[layer]
        rows = test.unflatten(1, (3, 3)).flatten(2, 3)
        for name, recipe in recipes.items():
            sketch = recipe.build(keys, fit[:, :, -64:])
            error = (sketch.logits(rows) - rows @ keys.mT)[..., 16:]
            error -= error.mean(-1, keepdim=True)
            errors[name].append(error.square().mean((0, 2, 3)).sqrt())
    mean = {name: float(torch.stack(values).mean()) for name, values in errors.items()}
    assert recipes["transform"].charged_bytes(1024, 64) == recipes["rope_pair"].charged_bytes(1024, 64)
    assert mean["transform"] <= 0.4 * mean["rope_pair"]
