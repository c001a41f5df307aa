"""The basis: what PCA promises, and the file it is read from."""

import pytest
import torch
from torch.testing import assert_close

from verkv.rotary import Rotary
from verkv.sketches import KeyBasis, fit_key_basis, load_key_bases, save_key_bases

safetensors = pytest.importorskip("safetensors.torch")


def keys_and_queries(n_tokens=60):
    mixing = torch.randn(2, 6, 6)
    return torch.randn(2, n_tokens, 6) @ mixing + 3, torch.randn(4, 5, 6)


@pytest.mark.parametrize("rotary", [None, Rotary(torch.tensor([1.0, 0.1]))], ids=["cached", "rope"])
def test_components_are_uncorrelated_and_ordered(rotary):
    keys, queries = keys_and_queries()
    to, back = fit_key_basis(keys, queries, rotary).matrices()
    features = keys.transpose(0, 1).flatten(1)
    components = (features - features.mean(0)) @ to
    covariance = components.mT @ components / len(components)
    variances = covariance.diagonal()
    assert (variances.diff() <= 1e-4 * variances[0]).all()
    assert_close(covariance, variances.diag(), atol=1e-4 * float(variances[0]), rtol=0)
    assert_close(components @ back, features - features.mean(0), atol=1e-3, rtol=1e-3)


def test_fewer_components_lose_least_in_the_metric():
    """Eckart and Young: what the first k components miss of the weighted keys is the rest of its spectrum."""
    keys, queries = keys_and_queries()
    basis = fit_key_basis(keys, queries)
    to, back = basis.matrices()
    features = keys.transpose(0, 1).flatten(1)
    features = features - features.mean(0)
    weight = torch.block_diag(*basis.weights)
    spectrum = torch.linalg.svdvals(features @ weight)
    for k in (1, 4, 9):
        missed = (features - features @ to[:, :k] @ back[:k]) @ weight
        assert_close(missed.square().sum(), spectrum[k:].square().sum(), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("n_tokens", [1, 2, 5], ids=lambda n: f"{n} tokens")
def test_fewer_tokens_than_channels(n_tokens):
    keys, queries = keys_and_queries(n_tokens)
    assert all(matrix.isfinite().all() for matrix in fit_key_basis(keys, queries).matrices())


def test_bases_survive_their_file(tmp_path):
    bases = {layer: fit_key_basis(*keys_and_queries()) for layer in (3, 0, 12)}
    save_key_bases(tmp_path / "bases.safetensors", bases)
    loaded = load_key_bases(tmp_path / "bases.safetensors")
    assert list(loaded) == [0, 3, 12]
    for layer, basis in loaded.items():
        assert torch.equal(basis.weights, bases[layer].weights) and torch.equal(basis.vectors, bases[layer].vectors)


@pytest.mark.parametrize(
    "change,match",
    [
        (lambda t: t.pop("layer.0.weights"), "lacks a tensor of layer 0"),
        (lambda t: t.update({"layer.0.mean": torch.zeros(3)}), "layer.0.mean"),
        (lambda t: t.update({"layer.x.weights": torch.zeros(3)}), "layer.x.weights"),
        (lambda t: t.update({"weights": torch.zeros(3)}), "named 'weights'"),
        (lambda t: t.update({"layer.0.weights": torch.zeros(2, 6, 5)}), "weights must have shape"),
        (lambda t: t.update({"layer.0.weights": torch.eye(4)[None]}), "vectors must have shape"),
        (lambda t: t["layer.0.vectors"].fill_(torch.nan), "finite"),
        (lambda t: t["layer.0.vectors"].mul_(2.0), "orthonormal"),
        (lambda t: t["layer.0.weights"].mul_(-1.0), "positive definite"),
        (lambda t: t["layer.0.weights"][0, 0].add_(1.0), "symmetric"),
    ],
    ids=["missing", "other", "layer", "name", "not square", "sizes", "nan", "scaled", "negative", "asymmetric"],
)
def test_files_that_hold_no_bases_are_refused(tmp_path, change, match):
    basis = fit_key_basis(*keys_and_queries())
    tensors = {"layer.0.weights": basis.weights, "layer.0.vectors": basis.vectors}
    tensors = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()}
    change(tensors)
    safetensors.save_file(tensors, str(tmp_path / "bases.safetensors"))
    with pytest.raises(ValueError, match=match):
        load_key_bases(tmp_path / "bases.safetensors")


def test_empty_weights_are_refused():
    with pytest.raises(ValueError, match="weights must have shape"):
        KeyBasis(torch.zeros(0, 4, 4), torch.zeros(0, 0))
