"""The rotation of keys against what each architecture does to its own."""

import pytest
import torch

from verkv.rotary import Rotary, rotary_dim, rotary_from_config

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
HALF_ROTATED = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
MODELS = [
    ("llama", {}),
    ("llama", {"rope_parameters": LLAMA3}),
    ("llama", {"rope_parameters": LINEAR}),
    ("ministral3", {}),
    ("qwen2", {}),
    ("qwen3", {}),
    ("phi3", {"rope_parameters": HALF_ROTATED}),
    ("gemma3", {}),
    ("qwen3_5", {}),
    ("qwen3_next", {}),
]


def _keys_before_and_after(model, ids):
    """Keys of the last full-attention layer: as the rotation gets them (B, Hkv, T, d), and as they are cached."""
    import importlib

    module = importlib.import_module(type(model).__module__)
    before = []
    original = module.apply_rotary_pos_emb

    def tap(q, k, *args, **kwargs):
        before.append(k)
        return original(q, k, *args, **kwargs)

    module.apply_rotary_pos_emb = tap
    try:
        cache = model(ids, use_cache=True).past_key_values
    finally:
        module.apply_rotary_pos_emb = original
    text = model.config.get_text_config(decoder=True)
    kinds = getattr(text, "layer_types", None) or ["full_attention"] * text.num_hidden_layers
    full = [i for i, kind in enumerate(kinds) if kind == "full_attention"]
    rotated = [i for i, kind in enumerate(kinds) if kind != "linear_attention"]
    layers = getattr(cache, "layers", None)
    keys = layers[full[-1]].keys if layers is not None else cache.key_cache[full[-1]]
    return before[rotated.index(full[-1])], keys


@pytest.mark.parametrize("kind, overrides", MODELS)
@torch.no_grad()
def test_undo_gives_the_keys_before_the_models_rotation(tiny_model, kind, overrides):
    model = tiny_model(kind, **overrides)
    before, cached = _keys_before_and_after(model, torch.randint(5, 60, (2, 150)))
    rotary = rotary_from_config(model.config)
    positions = torch.arange(150)
    assert rotary.rotary_dim == rotary_dim(model.config)
    undone = rotary.undo(cached, positions)
    rotated = slice(rotary.rotary_dim)
    # YaRN's constant factor on cos and sin stays on the rotated channels.
    factor = (undone[..., rotated] * before[..., rotated]).sum() / before[..., rotated].square().sum()
    torch.testing.assert_close(undone[..., rotated], before[..., rotated] * factor, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(undone[..., rotary.rotary_dim :], before[..., rotary.rotary_dim :])
    torch.testing.assert_close(rotary.apply(undone, positions), cached, atol=1e-4, rtol=1e-4)
    if rotary.rotary_dim < 150:  # the rotation is not the identity here
        assert not torch.allclose(undone, cached, atol=1e-2)


def test_positions_of_each_row():
    rotary = Rotary(torch.tensor([0.3, 0.01]))
    states = torch.randn(2, 3, 7, 6)
    positions = torch.stack([torch.arange(7), torch.arange(7) + 40])
    rows = rotary.apply(states, positions[:, None])
    torch.testing.assert_close(rows[1], rotary.apply(states[1], positions[1]))
    torch.testing.assert_close(rows[..., 4:], states[..., 4:])


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_frequencies_that_depend_on_the_length_are_refused(rope_type):
    import transformers

    parameters = {"rope_type": rope_type, "rope_theta": 1e4, "factor": 2.0}
    if rope_type == "longrope":
        parameters |= {
            "short_factor": [1.0] * 4,
            "long_factor": [2.0] * 4,
            "original_max_position_embeddings": 64,
        }
    config = transformers.LlamaConfig(hidden_size=32, num_attention_heads=4, rope_parameters=parameters)
    with pytest.raises(ValueError, match="rope_pair"):
        rotary_from_config(config)


def test_a_model_without_rope_is_refused():
    import transformers

    with pytest.raises(ValueError, match="no rope_theta"):
        rotary_from_config(transformers.GPT2Config())


@pytest.mark.parametrize("inv_freq", [torch.ones(2, 2), torch.empty(0), torch.tensor([1.0, float("nan")])])
def test_bad_frequencies(inv_freq):
    with pytest.raises(ValueError, match="inv_freq"):
        Rotary(inv_freq)


def test_too_few_channels():
    with pytest.raises(ValueError, match="channels"):
        Rotary(torch.ones(4)).apply(torch.randn(3, 6), torch.arange(3))
