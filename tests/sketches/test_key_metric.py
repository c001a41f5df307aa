"""The metric of errors in keys, against averages over queries and positions written out."""

import math

import pytest
import torch
from torch.testing import assert_close

from verkv.rotary import Rotary
from verkv.sketches.key_metric import mean_phase, query_metric, symmetric_roots, unrotated_query_metric

INV_FREQ = torch.tensor([1.0, 0.21, 0.003])


def rotation(position, head_dim):
    """R_m in float64, pairs (i, i + 3), the rest left alone."""
    matrix = torch.eye(head_dim, dtype=torch.float64)
    for i, frequency in enumerate(INV_FREQ.tolist()):
        angle = position * frequency
        matrix[i, i] = matrix[i + 3, i + 3] = math.cos(angle)
        matrix[i, i + 3], matrix[i + 3, i] = -math.sin(angle), math.sin(angle)
    return matrix


@pytest.mark.parametrize("head_dim", [6, 8])
@pytest.mark.parametrize("first_position", [0, 37])
def test_unrotated_metric_is_the_mean_over_queries_and_positions(head_dim, first_position):
    queries = torch.randn(4, 5, head_dim)  # two KV heads of two query heads
    actual = unrotated_query_metric(queries, 2, Rotary(INV_FREQ), first_position, 23, ridge=0.0)
    for head in range(2):
        expected = torch.zeros(head_dim, head_dim, dtype=torch.float64)
        for position in range(first_position, first_position + 23):
            moved = queries[2 * head : 2 * head + 2].flatten(0, 1).double() @ rotation(position, head_dim)
            expected += moved.mT @ moved / 10 / 23
        off = actual[head] - actual[head].diagonal().diag()
        expected_off = expected - expected.diagonal().diag()
        scale = (off * expected_off).sum() / expected_off.square().sum()
        assert_close(off, scale * expected_off, atol=1e-9, rtol=1e-6)
        # What is left on the diagonal is the floor, 1e-3 of the mean energy over the heads, in the same units.
        floor = (actual[head] - scale * expected).diagonal()
        assert_close(floor, floor[:1].expand_as(floor), atol=1e-8, rtol=0)
        assert 0 < float(floor[0]) < 2e-3


def test_metric_as_cached_is_the_second_moment():
    queries = torch.randn(6, 7, 4)
    metric = query_metric(queries, 2, ridge=0.0)
    for head in range(2):
        rows = queries[3 * head : 3 * head + 3].flatten(0, 1).double()
        moment = rows.mT @ rows / 21
        off = ~torch.eye(4, dtype=torch.bool)
        ratio = metric[head][off] / moment[off]
        assert_close(ratio, ratio[:1].expand_as(ratio))
    assert_close(metric.diagonal(dim1=-2, dim2=-1).mean(), torch.tensor(1.0, dtype=torch.float64))


def test_ridge_is_relative_to_the_mean():
    queries = torch.zeros(1, 3, 4)
    queries[..., 0] = 2.0
    metric = query_metric(queries, 1, ridge=0.1)[0]
    assert_close(metric[0, 0] / metric[1, 1], torch.tensor((4 + 0.101) / 0.101, dtype=torch.float64))


def test_heads_without_queries_energy():
    queries = torch.randn(2, 5, 4)
    queries[1] = 0
    assert (torch.linalg.eigvalsh(query_metric(queries, 2)) > 0).all()
    assert torch.equal(query_metric(queries * 0, 2), torch.eye(4, dtype=torch.float64).expand(2, 4, 4))


@pytest.mark.parametrize("speed", [0.0, 1.0, -0.3, 1e-7, 1e-12, 2 * math.pi, -4 * math.pi, 3.0])
@pytest.mark.parametrize("first,count", [(0, 1), (5, 1), (0, 1000), (123, 777)])
def test_mean_phase_is_the_mean(speed, first, count):
    positions = torch.arange(first, first + count, dtype=torch.float64)
    expected = torch.polar(torch.ones_like(positions), speed * positions).mean()
    actual = mean_phase(torch.tensor([speed], dtype=torch.float64), first, count)[0]
    assert_close(actual, expected, atol=1e-8, rtol=0)


def test_roots():
    matrix = torch.randn(3, 5, 5, dtype=torch.float64)
    metric = matrix @ matrix.mT + 0.1 * torch.eye(5, dtype=torch.float64)
    root, inverse = symmetric_roots(metric)
    assert_close(root @ root, metric)
    assert_close(root @ inverse, torch.eye(5, dtype=torch.float64).expand(3, 5, 5), atol=1e-9, rtol=0)


@pytest.mark.parametrize("shape", [(3, 5, 4), (2, 0, 4)])
def test_queries_of_a_wrong_shape(shape):
    with pytest.raises(ValueError, match="queries have shape"):
        query_metric(torch.randn(shape), 2)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_queries_that_are_not_finite(value):
    queries = torch.randn(2, 3, 6)
    queries[0, 1, 2] = value
    with pytest.raises(ValueError, match="queries hold NaN"):
        unrotated_query_metric(queries, 2, Rotary(INV_FREQ), 0, 5)
