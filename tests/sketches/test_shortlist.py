"""The shortlist: largest sketch score over a KV head's rows, among the candidates only."""

import pytest
import torch

from verkv.sketches import shortlist


@pytest.mark.parametrize("size", [0, 1, 5, 19, 20, 1000])
def test_it_is_the_best_over_all_rows(size):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4, 3, 20, generator=generator)
    candidates = torch.rand(4, 20, generator=generator) < 0.6
    chosen = shortlist(logits, candidates, size)
    for unit in range(4):
        best = {t: max(float(logits[unit, row, t]) for row in range(3)) for t in range(20) if candidates[unit, t]}
        expected = sorted(best, key=best.get, reverse=True)[:size]
        assert chosen[unit].nonzero().flatten().tolist() == sorted(expected)


def test_tokens_that_are_no_candidates_are_never_chosen():
    logits = torch.tensor([[[9.0, 1.0, 8.0]]])
    assert shortlist(logits, torch.tensor([[False, True, False]]), 3).tolist() == [[False, True, False]]
    assert not shortlist(logits, torch.zeros(1, 3, dtype=torch.bool), 3).any()


def test_absent_tokens_come_last():
    logits = torch.tensor([[[-torch.inf, 1.0, 0.0]]])
    assert shortlist(logits, torch.ones(1, 3, dtype=torch.bool), 2).tolist() == [[False, True, True]]


def test_inputs_are_left_alone():
    logits, candidates = torch.randn(2, 3, 8), torch.rand(2, 8) < 0.5
    before = logits.clone(), candidates.clone()
    shortlist(logits, candidates, 3)
    assert torch.equal(logits, before[0]) and torch.equal(candidates, before[1])


def test_negative_size_is_refused():
    with pytest.raises(ValueError, match="size must be >= 0, got -1"):
        shortlist(torch.zeros(1, 1, 2), torch.ones(1, 2, dtype=torch.bool), -1)
