"""Intervals: coverage on distributions whose mean is known, and what they refuse."""

import numpy as np
import pytest

from verkv.report.bootstrap import difference, estimate, ratio


def coverage(draw, truth: float, statistic=None, n_trials: int = 300) -> float:
    """Share of trials whose interval holds the truth."""
    rng = np.random.default_rng(7)
    held = 0
    for trial in range(n_trials):
        found = estimate(draw(rng), statistic, n_resamples=400, seed=trial)
        held += found.low <= truth <= found.high
    return held / n_trials


@pytest.mark.parametrize(
    ("sizes", "least"),
    [((40,), 0.91), ((4,) * 8, 0.90), ((4, 20, 8), 0.88)],
    ids=["one task", "eight of four", "uneven"],
)
def test_intervals_cover_a_known_mean(sizes, least):
    centres = np.linspace(10, 90, len(sizes))
    draw = lambda rng: [c + 10 * rng.standard_normal(n) for c, n in zip(centres, sizes, strict=True)]  # noqa: E731
    assert least <= coverage(draw, float(centres.mean())) <= 0.985


def test_plain_resampling_of_small_tasks_would_be_too_narrow():
    """Four examples: n draws of n give three quarters of the variance; n - 1 of n give all of it."""
    rng = np.random.default_rng(0)
    tables = [rng.standard_normal(4) for _ in range(500)]
    found = estimate(tables, n_resamples=4000)
    standard_error = np.sqrt(np.mean([table.var(ddof=1) / 4 for table in tables]) / 500)
    assert (found.high - found.low) / (2 * 1.96) == pytest.approx(standard_error, rel=0.05)


def test_pairs_cover_a_known_ratio_and_are_narrower_than_their_parts():
    def draw(rng):
        dense = 60 + 10 * rng.standard_normal((6, 10))
        return [np.stack([0.9 * d + rng.standard_normal(10), d], -1) for d in dense]

    assert coverage(draw, 0.9, ratio) >= 0.9
    pairs = draw(np.random.default_rng(1))
    paired, alone = estimate(pairs, difference), estimate([table[:, 0] for table in pairs])
    assert paired.high - paired.low < 0.5 * (alone.high - alone.low)


def test_the_value_is_the_mean_over_tasks_of_means_over_examples():
    found = estimate([np.array([0.0, 1.0]), np.array([1.0, 1.0, 1.0, 1.0])])
    assert (found.value, found.n_examples, found.n_tasks) == (0.75, 6, 2)


def test_the_same_seed_gives_the_same_interval():
    tables = [np.arange(9.0)]
    assert estimate(tables, seed=3) == estimate(tables, seed=3)
    assert estimate(tables, seed=3) != estimate(tables, seed=4)


def test_a_single_example_has_no_interval():
    found = estimate([np.array([1.0]), np.array([0.0, 1.0])])
    assert (found.value, found.low, found.high) == (0.75, None, None)


def test_no_tasks_and_empty_tasks_are_refused():
    for tables in ([], [np.array([])]):
        with pytest.raises(ValueError, match="at least one example"):
            estimate(tables)


def test_a_ratio_to_zero_has_no_interval_and_does_not_fail():
    found = estimate([np.array([[1.0, 0.0], [1.0, 0.0]])], ratio)
    assert found.low is None and found.high is None
