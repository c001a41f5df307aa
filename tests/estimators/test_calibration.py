"""The conformal rule against brute force, and that it covers on exchangeable data where rules close to it do not."""

import math

import pytest
import torch
from scipy.stats import binomtest

from verkv.estimators import calibrated_tolerance, monotone_losses, required_queries, tolerance_grid

N_TRIALS = 8_000
EPSILON = 0.1
GRID = torch.linspace(0.0, 0.2, 51, dtype=torch.float64)[1:]


def is_rejected(misses, delta, level=1e-6):
    return binomtest(int(misses.sum()), len(misses), delta, alternative="greater").pvalue < level


class TestMonotoneLosses:
    def test_is_a_miss_here_or_at_any_smaller_tolerance(self):
        errors = torch.rand(50, 3, 12, generator=torch.Generator().manual_seed(0)) * 0.12
        losses = monotone_losses(errors, EPSILON)
        for j in range(12):
            assert torch.equal(losses[..., j], (errors[..., : j + 1] > EPSILON).any(-1))

    def test_error_equal_to_epsilon_is_no_miss(self):
        errors = torch.tensor([0.5, math.nextafter(0.5, 1.0)], dtype=torch.float64)
        assert monotone_losses(errors, 0.5).tolist() == [False, True]

    @pytest.mark.parametrize("poison", [math.nan, math.inf])
    def test_error_that_is_not_finite_is_a_miss(self, poison):
        assert monotone_losses(torch.tensor([0.0, poison, 0.0]), EPSILON).tolist() == [False, True, True]

    @pytest.mark.parametrize("epsilon", [0.0, -1.0, math.nan])
    def test_epsilon_not_positive_raises(self, epsilon):
        with pytest.raises(ValueError, match="epsilon"):
            monotone_losses(torch.zeros(2), epsilon)


class TestRule:
    @pytest.mark.parametrize("delta", [0.02, 0.05, 0.1, 0.3, 0.5])
    @pytest.mark.parametrize("m", [0, 1, 5, 9, 19, 60])
    def test_equals_brute_force(self, m, delta):
        g = torch.Generator().manual_seed(m)
        tolerances = tolerance_grid(EPSILON, 9)
        misses = monotone_losses(0.2 * torch.rand(m, 40, 9, generator=g) * torch.rand(m, 40, 1, generator=g), EPSILON)
        chosen = calibrated_tolerance(misses, tolerances, delta)
        assert chosen.n_queries == m
        for head in range(40):
            rates = [(int(misses[:, head, j].sum()) + 1) / (m + 1) for j in range(9)]
            holding = [j for j, rate in enumerate(rates) if rate <= delta]
            assert bool(chosen.is_calibrated[head]) == bool(holding)
            if holding:
                assert float(chosen.tolerance[head]) == float(tolerances[max(holding)])
                assert float(chosen.miss_rate[head]) == pytest.approx(rates[max(holding)])
            else:
                assert math.isnan(float(chosen.tolerance[head]))
                assert float(chosen.miss_rate[head]) == pytest.approx(rates[0])

    @pytest.mark.parametrize("delta", [0.01, 0.05, 0.07, 0.1, 1 / 3, 0.3, 0.5, 0.99])
    def test_fewest_queries_without_a_miss(self, delta):
        m = required_queries(delta)
        never = lambda n: torch.zeros(n, 3)  # noqa: E731
        assert calibrated_tolerance(never(m), torch.tensor([1.0, 2.0, 3.0]), delta).tolerance == 3.0
        if m > 0:
            assert not bool(calibrated_tolerance(never(m - 1), torch.tensor([1.0, 2.0, 3.0]), delta).is_calibrated)

    @pytest.mark.parametrize("delta", [0.03, 0.1, 1 / 7, 0.2, 0.49])
    def test_required_queries_is_the_least(self, delta):
        m = required_queries(delta)
        assert 1 / (m + 1) <= delta * (1 + 1e-12) and 1 / m > delta

    def test_sum_of_losses_exactly_at_the_limit_holds(self):
        losses = torch.zeros(29, 1)
        losses[:2] = 1
        assert bool(calibrated_tolerance(losses, torch.ones(1), 0.1).is_calibrated)  # (2 + 1) / 30
        losses[2] = 1
        assert not bool(calibrated_tolerance(losses, torch.ones(1), 0.1).is_calibrated)

    def test_heads_pooled_enter_as_the_mean_at_each_position(self):
        g = torch.Generator().manual_seed(0)
        losses = monotone_losses(0.15 * torch.rand(30, 2, 3, 8, generator=g), EPSILON)  # positions, layers, heads, grid
        tolerances = tolerance_grid(EPSILON, 8)
        for dims, shape in [((), (2, 3)), (2, (2,)), (-2, (2,)), ((1, 2), ()), ((2, 1), ())]:
            pooled = calibrated_tolerance(losses, tolerances, 0.4, dims)
            assert pooled.tolerance.shape == pooled.is_calibrated.shape == shape
            assert pooled.n_queries == 30  # not 30 times the number of heads
        by_hand = calibrated_tolerance(losses.double().mean((1, 2)), tolerances, 0.4)
        torch.testing.assert_close(pooled.tolerance, by_hand.tolerance)
        rate = (losses.double().mean((1, 2)).sum(0) + 1) / 31
        assert float(pooled.tolerance) == float(tolerances[rate <= 0.4].max())

    def test_pooled_sum_at_the_limit_is_not_lost_in_rounding(self):
        """Three heads, one of which misses at each of six positions: six thirds are two."""
        losses = torch.zeros(29, 3, 1)
        losses[:6, 0] = 1
        assert bool(calibrated_tolerance(losses, torch.ones(1), 0.1, pooled_dims=1).is_calibrated)

    @pytest.mark.parametrize(
        ("losses", "tolerances", "match"),
        [
            (torch.zeros(5), torch.ones(5), "positions"),
            (torch.zeros(5, 3), torch.ones(2), "tolerances"),
            (torch.zeros(5, 0), torch.ones(0), "tolerances"),
            (torch.zeros(5, 2), torch.tensor([0.2, 0.1]), "ascend"),
            (torch.zeros(5, 2), torch.tensor([0.1, math.nan]), "ascend"),
            (torch.full((5, 2), math.nan), torch.tensor([0.1, 0.2]), "0, 1"),
            (torch.full((5, 2), 2.0), torch.tensor([0.1, 0.2]), "0, 1"),
            (torch.tensor([[1.0, 0.0]]), torch.tensor([0.1, 0.2]), "monotone_losses"),
        ],
    )
    def test_bad_losses_or_grids_raise(self, losses, tolerances, match):
        with pytest.raises(ValueError, match=match):
            calibrated_tolerance(losses, tolerances, 0.1)

    @pytest.mark.parametrize("dims", [0, 2, -1, (1, 2), 5])
    def test_pooling_positions_or_grid_raises(self, dims):
        with pytest.raises(ValueError, match="pooled_dims"):
            calibrated_tolerance(torch.zeros(5, 3, 2), torch.tensor([0.1, 0.2]), 0.1, dims)

    @pytest.mark.parametrize("delta", [0.0, 1.0, math.nan])
    def test_delta_out_of_range_raises(self, delta):
        with pytest.raises(ValueError, match="delta"):
            calibrated_tolerance(torch.zeros(5, 2), torch.tensor([0.1, 0.2]), delta)
        with pytest.raises(ValueError, match="delta"):
            required_queries(delta)


class TestToleranceGrid:
    @pytest.mark.parametrize("epsilon", [0.01, 0.1, 0.3])
    def test_is_geometric_and_holds_epsilon(self, epsilon):
        grid = tolerance_grid(epsilon)
        ratios = grid[1:] / grid[:-1]
        torch.testing.assert_close(ratios, ratios[:1].expand_as(ratios))
        assert float((grid / epsilon - 1).abs().min()) < 1e-12
        assert float(grid[0]) < epsilon < float(grid[-1])

    @pytest.mark.parametrize(
        ("arguments", "match"),
        [({"n_points": 1}, "n_points"), ({"lowest": 0.0}, "lowest"), ({"lowest": 2.0, "highest": 2.0}, "lowest"),
         ({"highest": math.inf}, "highest")],
    )  # fmt: skip
    def test_bad_arguments_raise(self, arguments, match):
        with pytest.raises(ValueError, match=match):
            tolerance_grid(0.1, **arguments)


# --- coverage: calibrate on m positions, test on one more, many times -------------------------------------------------


def growing_errors(n, n_trials=N_TRIALS, n_heads=1, dependence=0.0):
    """Errors (positions, trials, heads, grid) that grow with the tolerance. Each position and head passes epsilon at a
    uniform place, so that the grid, from 0 to 0.2 in steps of 0.004, is also the true miss rate."""
    g = torch.Generator().manual_seed(0)
    shared = torch.randn(n, n_trials, 1, generator=g)
    own = torch.randn(n, n_trials, n_heads, generator=g)
    place = torch.special.ndtr(dependence**0.5 * shared + (1 - dependence) ** 0.5 * own)
    return EPSILON * GRID.float() / place[..., None].clamp_min(1e-6)


def true_misses(errors, chosen_index, is_calibrated):
    """Whether the last position really exceeds epsilon at the tolerance chosen; an uncalibrated step is exact."""
    return (errors.gather(-1, chosen_index[..., None]).squeeze(-1) > EPSILON) & is_calibrated


def index_of(chosen):
    """Grid point of each tolerance; 0 where there is none."""
    return torch.searchsorted(GRID, torch.nan_to_num(chosen.tolerance, nan=0.0))


def chosen_by(rates, delta):
    """Index of the last grid point whose rate is at most delta, even after one that fails; whether there is one."""
    holds = rates <= delta
    last = torch.where(holds, torch.arange(rates.shape[-1]), -1).amax(-1)
    return last.clamp_min(0), last >= 0


# m such that the rule with and without its correction differ: 2 / 46 against 3 / 46, and 2 / 24 against 3 / 24.
@pytest.mark.parametrize(("delta", "m"), [(0.05, 45), (0.1, 23)])
class TestCoverage:
    def test_covers_and_is_not_idle(self, delta, m):
        errors = growing_errors(m + 1).squeeze(2)
        chosen = calibrated_tolerance(monotone_losses(errors[:m], EPSILON), GRID, delta)
        misses = true_misses(errors[m], index_of(chosen), chosen.is_calibrated)
        assert not is_rejected(misses, delta, level=1e-2)
        assert float(misses.double().mean()) > 0.7 * delta
        assert float(chosen.is_calibrated.double().mean()) > 0.9

    def test_without_the_correction_it_does_not(self, delta, m):
        errors = growing_errors(m + 1).squeeze(2)
        losses = monotone_losses(errors[:m], EPSILON).double()
        misses = true_misses(errors[m], *chosen_by(losses.mean(0), delta))
        assert is_rejected(misses, delta)

    def test_without_monotone_losses_it_does_not(self, delta, m):
        """Independent misses, slightly too many at every tolerance: the largest that looks good is luck."""
        g = torch.Generator().manual_seed(1)
        errors = torch.where(torch.rand(m + 1, N_TRIALS, len(GRID), generator=g) < 1.6 * delta, 0.2, 0.0)
        raw = (errors[:m] > EPSILON).double()
        misses = true_misses(errors[m], *chosen_by((raw.sum(0) + 1) / (m + 1), delta))
        assert is_rejected(misses, delta)

        chosen = calibrated_tolerance(monotone_losses(errors[:m], EPSILON), GRID, delta)
        misses = true_misses(errors[m], index_of(chosen), chosen.is_calibrated)
        assert not is_rejected(misses, delta, level=1e-2)

    @pytest.mark.parametrize("dependence", [0.0, 0.5, 1.0])
    def test_pooled_heads_cover_on_average(self, delta, m, dependence):
        errors = growing_errors(m + 1, n_trials=3000, n_heads=4, dependence=dependence)
        chosen = calibrated_tolerance(monotone_losses(errors[:m], EPSILON), GRID, delta, pooled_dims=2)
        misses = true_misses(errors[m], index_of(chosen)[:, None].expand(-1, 4), chosen.is_calibrated[:, None])
        # one head of each trial: the four of one position depend on each other
        of_one_head = misses.gather(1, torch.arange(len(misses))[:, None] % 4).squeeze(1)
        assert not is_rejected(of_one_head, delta, level=1e-2)

    def test_heads_counted_as_positions_do_not(self, delta, m):
        """Four heads that always miss together are one position, not four."""
        errors = growing_errors(m + 1).squeeze(2)
        losses = monotone_losses(errors[:m], EPSILON).double()
        misses = true_misses(errors[m], *chosen_by((4 * losses.sum(0) + 1) / (4 * m + 1), delta))
        assert is_rejected(misses, delta)
