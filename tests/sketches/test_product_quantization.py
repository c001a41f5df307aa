"""Product quantisation: codes name the nearest centroids, k-means lowers the error, bits are all used."""

import itertools

import pytest
import torch
from torch.testing import assert_close

from verkv.sketches import ProductQuantizationSketch
from verkv.sketches.product_quantization import _nearest


def units(sketch):
    return {(row, head): (codes, books) for row, head, codes, books in sketch._units()}


@pytest.mark.parametrize("offset", [0.0, 300.0])
def test_codes_are_those_of_the_nearest_centroids(offset):
    keys = torch.randn(2, 3, 150, 16) + offset
    sketch = ProductQuantizationSketch(bits_per_token=20).build(keys)
    for (row, head), (codes, books) in units(sketch).items():
        assert [len(book) for book in books] == [128, 128, 64] and sum(book.shape[1] for book in books) == 16
        parts = keys[row, head].double().tensor_split(3, dim=-1)
        for part, code, book in zip(parts, codes, books, strict=True):
            distances = torch.cdist(part, book.double())
            chosen = distances.gather(1, code[:, None].long())[:, 0]
            assert_close(chosen, distances.amin(1), atol=1e-3, rtol=0)
            assert_close(sketch.decode()[row, head].tensor_split(3, dim=-1)[books.index(book)], book[code])
            break


def test_nearest_is_exact_where_points_are_distinct():
    points, centroids = torch.randn(200, 3, dtype=torch.float64), torch.randn(17, 3, dtype=torch.float64)
    assert torch.equal(_nearest(points, centroids), torch.cdist(points, centroids).argmin(1))


def test_rounds_of_k_means_lower_the_error():
    keys = torch.randn(1, 2, 500, 16)
    errors = [
        float((ProductQuantizationSketch(10, rounds).build(keys).decode() - keys).square().mean())
        for rounds in (0, 1, 2, 4, 8)
    ]
    assert all(after < before for before, after in itertools.pairwise(errors))


def test_as_many_clusters_as_centroids_are_found_exactly():
    """Four distinct tokens, two bits, one sub-vector; from four different starting points."""
    tokens = torch.tensor([[0.0, 0], [0, 9], [9, 0], [9, 9]])
    keys = tokens[torch.arange(100) % 4][None, None]
    sketches = [ProductQuantizationSketch(2, seed=seed).build(keys) for seed in range(20)]
    exact = [bool(torch.equal(sketch.decode(), keys)) for sketch in sketches]
    assert any(exact)
    for sketch in sketches:
        assert (sketch.decode() - keys).square().mean() < keys.var()


def test_fewer_tokens_than_centroids_are_kept():
    keys = torch.randn(1, 2, 5, 16)
    assert_close(ProductQuantizationSketch(16).build(keys).decode(), keys)


@pytest.mark.parametrize("n_bits,expected", [(36, [8, 7, 7, 7, 7]), (18, [6, 6, 6]), (72, [8] * 9), (1, [1])])
def test_bits_are_split_evenly_and_all_used(n_bits, expected):
    assert ProductQuantizationSketch(n_bits)._split_bits(64).tolist() == expected


def test_seed_chooses_the_start():
    keys, rows = torch.randn(1, 2, 300, 16), torch.randn(1, 2, 3, 16)
    logits = [ProductQuantizationSketch(16, seed=seed).build(keys).logits(rows) for seed in (0, 0, 1)]
    assert torch.equal(logits[0], logits[1]) and not torch.equal(logits[0], logits[2])


@pytest.mark.parametrize("rounds", [-1, 1.5])
def test_rounds_that_are_no_count(rounds):
    with pytest.raises(ValueError, match="rounds"):
        ProductQuantizationSketch(rounds=rounds)
