"""Intervals by bootstrap over examples, the tasks being fixed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

N_RESAMPLES = 2000
LEVEL = 0.95


@dataclass(frozen=True)
class Estimate:
    """A figure and its interval; ``low`` and ``high`` are None where a task has a single example.

    Attributes
    ----------
    value : float
    low, high : float or None
        Ends of the interval.
    n_examples, n_tasks : int
        What it rests on.
    """

    value: float
    low: float | None
    high: float | None
    n_examples: int
    n_tasks: int


def estimate(
    strata: Sequence[np.ndarray],
    statistic: Callable[[np.ndarray], np.ndarray] | None = None,
    n_resamples: int = N_RESAMPLES,
    level: float = LEVEL,
    seed: int = 0,
) -> Estimate:
    """A statistic of the mean over tasks of the mean over a task's examples, with a percentile interval.

    From a task with n examples, n - 1 are drawn with replacement: with n draws the variance would come out too small
    by (n - 1) / n, a quarter at four examples [1]_. What is measured on one example (a method and dense, say) stays
    together, so that comparisons are paired.

    Parameters
    ----------
    strata : sequence of array, shape (n_examples, k)
        One for each task; k figures of each example. One-dimensional arrays have k = 1.
    statistic : function from (..., k) to (...), optional
        Default: the first figure.
    n_resamples, seed : int
    level : float in (0, 1)
        Of the interval.

    Returns
    -------
    Estimate

    Raises
    ------
    ValueError
        Without tasks, or with a task without examples.

    References
    ----------
    .. [1] Rao, Wu, "Resampling inference with complex survey data", JASA 83, 1988.

    Examples
    --------
    >>> estimate([np.array([0.0, 1.0]), np.array([1.0, 1.0])]).value
    0.75
    """
    if not len(strata) or not all(map(len, strata)):
        raise ValueError("strata must hold at least one task, and every task at least one example")
    tables = [np.asarray(table, dtype=float).reshape(len(table), -1) for table in strata]
    statistic = statistic or (lambda means: means[..., 0])
    with np.errstate(divide="ignore", invalid="ignore"):
        value = float(statistic(np.mean([table.mean(0) for table in tables], axis=0)))
        counts = {"n_examples": sum(map(len, tables)), "n_tasks": len(tables)}
        if any(len(table) == 1 for table in tables):
            return Estimate(value, None, None, **counts)
        resampled = np.asarray(statistic(_resampled_means(tables, n_resamples, seed)))
    return Estimate(value, *_ends(resampled, level), **counts)


def _ends(values: np.ndarray, level: float) -> tuple[float | None, float | None]:
    """Percentiles; None for one that is no number, where a ratio's denominator is 0 too often."""
    numbers = np.sort(values[~np.isnan(values)])
    if not len(numbers):
        return None, None
    places = [round(share * (len(numbers) - 1)) for share in ((1 - level) / 2, (1 + level) / 2)]
    low, high = (float(numbers[place]) if np.isfinite(numbers[place]) else None for place in places)
    return low, high


def _resampled_means(tables: list[np.ndarray], n_resamples: int, seed: int) -> np.ndarray:
    """Means over tasks of means over resampled examples, (n_resamples, k)."""
    rng = np.random.default_rng(seed)
    total = np.zeros((n_resamples, tables[0].shape[1]))
    for table in tables:
        picks = rng.integers(len(table), size=(n_resamples, len(table) - 1))
        total += table[picks].mean(1)
    return total / len(tables)


def ratio(means: np.ndarray) -> np.ndarray:
    """First figure over the second, for :func:`estimate`."""
    return means[..., 0] / means[..., 1]


def difference(means: np.ndarray) -> np.ndarray:
    """First figure minus the second, for :func:`estimate`."""
    return means[..., 0] - means[..., 1]
