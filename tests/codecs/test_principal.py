"""Principal axes against float64 singular value decompositions."""

import pytest
import torch

from verkv.codecs.principal import RowSpool, StreamingCovariance, power_iteration


def rows_with_decay(n, p, mean=20.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.linalg.qr(torch.randn(p, p, generator=generator))[0]
    return mean + torch.randn(n, p, generator=generator) * 0.8 ** torch.arange(p) @ mixing


def captured(rows, basis):
    """Share of the centred energy within a basis, float64."""
    centred = (rows - rows.mean(0)).double()
    return float((centred @ basis.double()).square().sum() / centred.square().sum())


def best_share(rows, rank):
    singular = torch.linalg.svdvals((rows - rows.mean(0)).double()).square()
    return float(singular[:rank].sum() / singular.sum())


def stream(rows, sizes=(1, 50, 7)):
    covariance, start = StreamingCovariance(rows.shape[1]), 0
    while start < len(rows):
        for size in sizes:
            covariance.add(rows[start : start + size])
            start += size
    return covariance


def test_streamed_covariance_is_the_covariance_also_far_from_zero():
    rows = rows_with_decay(500, 12, mean=1000.0)
    covariance = stream(rows)
    assert torch.allclose(covariance.mean(), rows.double().mean(0).float(), rtol=1e-6)
    assert torch.allclose(covariance.covariance().double(), rows.double().T.cov(correction=0), atol=1e-4)


@pytest.mark.parametrize("n", [10, 400])  # fewer rows than features, too
def test_axes_are_orthonormal_and_hold_as_much_as_the_best(n):
    rows = rows_with_decay(n, 24)
    principal = stream(rows).principal(12)
    assert torch.allclose(principal.basis.T @ principal.basis, torch.eye(12), atol=1e-5)
    assert captured(rows, principal.basis) == pytest.approx(best_share(rows, 12), abs=1e-5)
    assert (principal.variance.diff() <= 1e-6).all()


def test_tail_is_the_residual_of_every_feature():
    rows = rows_with_decay(300, 20)
    principal = stream(rows).principal(8)
    centred = rows - rows.mean(0)
    residual = centred - centred @ principal.basis @ principal.basis.T
    assert torch.allclose(principal.tail, residual.square().mean(0), atol=1e-4)


def test_power_iteration_finds_the_same_axes_from_a_spool():
    rows = rows_with_decay(400, 40)
    spool = RowSpool(40)
    for chunk in rows.split(64):
        spool.add(chunk)
    stored = torch.cat(list(spool.chunks(100)))
    assert torch.equal(stored, rows.bfloat16().float())
    principal = power_iteration(lambda: spool.chunks(100), rank=10)
    assert torch.allclose(principal.basis.T @ principal.basis, torch.eye(10), atol=1e-4)
    assert captured(stored, principal.basis) == pytest.approx(best_share(stored, 10), abs=1e-4)
    assert torch.allclose(principal.mean, stored.mean(0), atol=1e-4)
