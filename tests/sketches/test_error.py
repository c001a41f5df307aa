"""Moments of a sketch's error, and the tokens it codes worst, against loops."""

import pytest
import torch
from torch.testing import assert_close

from verkv.sketches import RopePairSketch
from verkv.sketches.error import SketchError, worst_sketched
from verkv.sketches.fit import build_sketch, fit_sketch

B, HEADS, GROUP, T, D = 2, 2, 3, 50, 8


def make_keys(seed=0):
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn(B, HEADS, T, D, generator=generator)
    return keys, keys + 0.3 * torch.randn(B, HEADS, T, D, generator=generator) + 0.1


def test_moments_equal_those_of_each_head():
    keys, sketched = make_keys()
    included = torch.rand(B, HEADS, T) < 0.7
    error = SketchError.measure(keys, sketched, included)
    for b in range(B):
        for h in range(HEADS):
            rows = (keys - sketched)[b, h][included[b, h]]
            assert_close(error.mean[b, h], rows.mean(0))
            assert_close(error.covariance[b, h], torch.cov(rows.T, correction=0))


def test_logit_moments_are_those_of_the_logit_errors():
    keys, sketched = make_keys()
    error = SketchError.measure(keys, sketched, torch.ones(B, HEADS, T, dtype=torch.bool))
    rows = torch.randn(B, HEADS, 5, D)
    logit_errors = 0.7 * rows @ (keys - sketched).mT  # (B, Hkv, R, T)
    mean, variance = error.logit_moments(rows, 0.7)
    assert_close(mean, logit_errors.mean(-1), atol=1e-5, rtol=1e-4)
    assert_close(variance, logit_errors.var(-1, correction=0), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("n_included", [0, 1])
def test_none_or_one_token_gives_no_variance(n_included):
    keys, sketched = make_keys()
    included = torch.arange(T).expand(B, HEADS, T) < n_included
    error = SketchError.measure(keys, sketched, included)
    assert_close(error.covariance, torch.zeros(B, HEADS, D, D), atol=1e-12, rtol=0)
    assert torch.isfinite(error.mean).all() and (error.mean != 0).any() == bool(n_included)


def test_views_and_copies_keep_each_heads_moments():
    keys, sketched = make_keys()
    error = SketchError.measure(keys, sketched, torch.ones(B, HEADS, T, dtype=torch.bool))
    flat = error.flat()
    assert flat.mean.shape == (B * HEADS, 1, D)
    assert torch.equal(flat.mean[3, 0], error.mean[1, 1]) and torch.equal(flat.covariance[1, 0], error.covariance[0, 1])
    assert torch.equal(flat.repeat(2).mean[2:4], flat.mean[1:2].expand(2, 1, D))
    assert torch.equal(error.select(torch.tensor([1, 0, 1])).covariance, error.covariance[[1, 0, 1]])
    chosen = error.where(torch.tensor([[True, False], [False, True]]))
    assert torch.equal(chosen.covariance[0, 0], error.covariance[0, 0]) and not chosen.covariance[0, 1].any()
    assert torch.equal(chosen.mean, error.mean)


@pytest.mark.parametrize("with_queries", [False, True])
def test_worst_tokens_are_the_largest_in_the_queries_metric(with_queries):
    keys, sketched = make_keys()
    queries = torch.randn(B, HEADS * GROUP, 7, D) * torch.linspace(0.1, 3.0, D) if with_queries else None
    eligible = torch.rand(B, T) < 0.8
    chosen = worst_sketched(keys, sketched, queries, eligible, torch.tensor([3, 5]))
    for b, count in enumerate((3, 5)):
        for h in range(HEADS):
            error = (keys - sketched)[b, h]
            error = error - error[eligible[b]].mean(0)
            metric = torch.eye(D)
            if with_queries:
                rows = queries[b, h * GROUP : (h + 1) * GROUP].reshape(-1, D)
                metric = rows.T @ rows / len(rows)
                metric = metric + 0.1 * metric.diagonal().mean() * torch.eye(D)
            sizes = [float(e @ metric @ e) if ok else -1.0 for e, ok in zip(error, eligible[b], strict=True)]
            expected = sorted(range(T), key=lambda i: -sizes[i])[:count]
            assert sorted(expected) == chosen[b, h].nonzero().flatten().tolist()


def test_more_outliers_than_eligible_tokens_are_all_of_them():
    keys, sketched = make_keys()
    eligible = torch.arange(T).expand(B, T) < 4
    chosen = worst_sketched(keys, sketched, None, eligible, torch.tensor([9, 0]))
    assert torch.equal(chosen[0], eligible[:1].expand(HEADS, T)) and not chosen[1].any()


def test_scaled_queries_choose_the_same_tokens():
    keys, sketched = make_keys()
    queries, eligible = torch.randn(B, HEADS * GROUP, 7, D), torch.ones(B, T, dtype=torch.bool)
    chosen = [worst_sketched(keys, sketched, f * queries, eligible, torch.tensor([5, 5])) for f in (1.0, 0.01)]
    assert torch.equal(*chosen)


def test_padding_takes_no_part_in_a_fit():
    """A padded row's sketch, error and outliers are those of the row alone, whatever stands in the padding."""
    keys, n_padding = make_keys()[0], torch.tensor([0, 20])
    padded = keys.clone()
    padded[1, :, :20] = torch.nan
    protected = torch.zeros(B, T, dtype=torch.bool)
    recipe = RopePairSketch(fraction=0.5, group_size=10)
    both = fit_sketch(recipe, padded, n_padding, None, protected, torch.tensor([2, 2]), 0.0)
    alone = fit_sketch(recipe, keys[1:, :, 20:], n_padding[:1], None, protected[1:, 20:], torch.tensor([2]), 0.0)
    assert_close(both.error.covariance[1:], alone.error.covariance)
    assert torch.equal(both.outliers[1:, :, 20:], alone.outliers) and not both.outliers[1, :, :20].any()


def test_moments_enter_only_where_the_logit_variance_is_large():
    keys, queries = make_keys()[0], torch.randn(B, HEADS * GROUP, 7, D)
    queries[0, :GROUP] *= 0.01  # the first head's sketched logits are as good as exact
    fit = lambda least: fit_sketch(  # noqa: E731
        RopePairSketch(), keys, torch.zeros(B).long(), queries, torch.zeros(B, T).bool(), torch.zeros(B).long(), least
    )
    every = fit(0.0).error.covariance
    assert every.abs().amax((-1, -2)).gt(0).all()
    large = fit(0.05).error.covariance
    assert not large[0, 0].any() and torch.equal(large[1], every[1])
    assert fit(None).error is None


def test_a_sketch_without_decoded_keys_has_no_error_and_no_outliers():
    class Pages(RopePairSketch):
        is_linear = False

    keys = make_keys()[0]
    found = fit_sketch(Pages(), keys, torch.zeros(B).long(), None, torch.zeros(B, T).bool(), torch.tensor([3, 3]), 0.0)
    assert found.error is None and not found.outliers.any()


def test_positions_are_counted_from_each_rows_first_token():
    class Spy(RopePairSketch):
        def build(self, keys, queries=None, positions=None):
            self.seen = positions
            return self

    spy = build_sketch(Spy(), make_keys()[0], torch.tensor([0, 3]))
    assert spy.seen[0].tolist() == list(range(T)) and spy.seen[1].tolist() == [0, 0, 0, *range(T - 3)]
