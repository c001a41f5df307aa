"""What VerKVPress adds: the sketch it builds for a model, and what happens to passes it cannot compress."""

import copy
import pickle
import threading
import warnings

import pytest
import torch
from kvpress import KnormPress
from press_helpers import SHORT, full_layers, prefill, random_ids
from transformers import DynamicCache

from verkv import ExactSketch, PoissonCompPress, RopePairSketch, VerKVPress, record_queries
from verkv.rotary import rotary_from_config
from verkv.sketches import fit_key_basis, save_key_bases


class TestSketchOfAModel:
    """Pairs of a partially rotated head are (i, i + rotary_dim / 2), not (i, i + head_dim / 2)."""

    @pytest.fixture
    def model(self, tiny_model):
        rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
        return tiny_model("llama", rope_parameters=rope)

    @pytest.mark.parametrize("sketch", ["rope_pair", RopePairSketch(), RopePairSketch(fraction=0.5)])
    def test_rotary_dim_comes_from_the_config(self, model, sketch):
        built = VerKVPress(KnormPress(), 0.5, sketch=sketch)._sketch(model)
        assert built.rotary_dim == model.config.head_dim // 2
        assert built.fraction == getattr(sketch, "fraction", 0.25)

    def test_what_the_user_says_stands(self, model):
        assert VerKVPress(KnormPress(), 0.5, sketch=RopePairSketch(rotary_dim=4))._sketch(model).rotary_dim == 4

    def test_exact_sketch_is_charged_as_the_two_bit_one(self, model):
        built = VerKVPress(KnormPress(), 0.5, sketch="exact")._sketch(model)
        assert isinstance(built, ExactSketch) and built.charged_as.rotary_dim == model.config.head_dim // 2


class TestBasesOfAFile:
    """A basis for each layer, fitted on another prompt."""

    @pytest.fixture
    def model(self, tiny_model):
        return tiny_model("llama")

    @torch.no_grad()
    def bases(self, model):
        with record_queries(model, 50) as queries:
            cache = prefill(model, random_ids(1, 200, seed=7))
            model.model(random_ids(1, 200, seed=7))
        rotary, positions = rotary_from_config(model.config), torch.arange(200)
        undone = {i: rotary.undo(layer.keys[0], positions) for i, layer in enumerate(cache.layers)}
        return {i: fit_key_basis(keys, queries[i][0], rotary, 0) for i, keys in undone.items()}

    @torch.no_grad()
    def test_every_layer_gets_its_own(self, model, tmp_path):
        bases = self.bases(model)
        save_key_bases(tmp_path / "bases.safetensors", bases)
        press = VerKVPress(KnormPress(), 0.5, bases=tmp_path / "bases.safetensors", **SHORT)
        cache = prefill(model, random_ids(1, 200), press)
        for i, layer in enumerate(cache.layers):
            assert torch.equal(layer.context.sketch.basis.vectors, bases[i].vectors)
        assert torch.isfinite(model(random_ids(1, 1), past_key_values=cache).logits).all()

    @torch.no_grad()
    def test_a_layer_without_one_or_another_sketch_is_refused(self, model):
        bases = self.bases(model)
        del bases[2]
        with pytest.raises(ValueError, match="not layer 2"):
            prefill(model, random_ids(1, 200), VerKVPress(KnormPress(), 0.5, bases=bases, **SHORT))
        with pytest.raises(ValueError, match="bases are those of the transform sketch"):
            prefill(model, random_ids(1, 200), VerKVPress(KnormPress(), 0.5, bases={}, sketch="rope_pair", **SHORT))


@torch.no_grad()
def test_later_chunks_of_a_prompt_are_noted(tiny_model):
    model, ids, press, cache = tiny_model("llama"), random_ids(1, 100), VerKVPress(KnormPress(), 0.5, **SHORT), None
    cache = DynamicCache()
    with press(model):
        model.model(ids[:, :60], past_key_values=cache)
        assert not any("chunked prefill" in note for note in press.stats.notes)
        model.model(ids[:, 60:61], past_key_values=cache)
        assert not any("chunked prefill" in note for note in press.stats.notes)
        model.model(ids[:, 61:80], past_key_values=cache)
        model.model(ids[:, 80:], past_key_values=cache)
    assert sum("chunked prefill" in note for note in press.stats.notes) == 1


@torch.no_grad()
def test_a_cache_that_was_filled_before_is_warned_about(tiny_model):
    model, ids, press = tiny_model("llama"), random_ids(1, 100), VerKVPress(KnormPress(), 0.5, **SHORT)
    prefill(model, ids, press)  # statistics of an earlier run must not be taken for this one's
    cache = prefill(model, ids)
    with pytest.warns(UserWarning, match="held 100 tokens before the block"), press(model):
        model.model(ids[:, :5], past_key_values=cache)
    assert press.stats is None and full_layers(cache) == []


@torch.no_grad()
def test_positional_mask_is_seen(tiny_model):
    model, ids = tiny_model("llama"), random_ids(1, 100)
    mask = torch.ones_like(ids)
    mask[:, :30] = 0
    cache = DynamicCache()
    with VerKVPress(KnormPress(), 0.5, **SHORT)(model):
        model.model(ids, mask, None, cache)
    assert cache.layers[0].context.n_padding.tolist() == [30]


@torch.no_grad()
def test_another_threads_forward_passes_are_left_alone(tiny_model):
    model, ids = tiny_model("llama"), random_ids(1, 100)
    others = []
    with VerKVPress(KnormPress(), 0.5, **SHORT)(model):
        thread = threading.Thread(target=lambda: others.append(prefill(model, ids)))
        thread.start()
        thread.join()
        ours = DynamicCache()
        model.model(ids, past_key_values=ours)
    assert full_layers(others[0]) == [] and others[0].get_seq_length() == 100
    assert len(full_layers(ours)) == 4


@torch.no_grad()
def test_another_threads_candidates_do_not_postpone_sealing(tiny_model):
    """They come with logits_to_keep > 1 to the model; the prefill here goes to its backbone, as KVPress' does."""
    model, ids, cache = tiny_model("llama"), random_ids(1, 100), DynamicCache()
    with VerKVPress(KnormPress(), 0.5, **SHORT)(model):
        thread = threading.Thread(target=lambda: model(ids, logits_to_keep=5, use_cache=False))
        thread.start()
        thread.join()
        model.model(ids, past_key_values=cache)
        assert len(full_layers(cache)) == 4


@pytest.mark.parametrize("press_class", [PoissonCompPress, VerKVPress])
def test_a_used_press_can_be_copied_and_pickled(tiny_model, press_class):
    model, ids, press = tiny_model("llama"), random_ids(1, 100), press_class(KnormPress(), 0.5, **SHORT)
    prefill(model, ids, press)
    for again in (copy.deepcopy(press), pickle.loads(pickle.dumps(press))):
        assert again.compression_ratio == 0.5 and again.stats.sealed_layers == press.stats.sealed_layers


@torch.no_grad()
def test_finite_biases_in_a_mask_are_refused(tiny_model):
    """They would change the weights that the certificate is about."""
    model, ids = tiny_model("llama"), random_ids(1, 100)
    cache = prefill(model, ids, VerKVPress(KnormPress(), 0.5, **SHORT))
    mask = torch.zeros(1, 1, 3, 103)
    mask[..., :50] = -3.0
    with pytest.raises(NotImplementedError, match="attention_mask"):
        model(ids[:, :3], past_key_values=cache, attention_mask=mask)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(ids[:, :3], past_key_values=cache)
    assert cache.get_seq_length() == 103
