"""The table of bit plans against brute force over all partitions."""

import functools
import itertools

import numpy as np
import pytest
import torch

from verkv.codecs.bit_allocation import Choice, allocate, allocation_kinds, block_energy, make_table
from verkv.codecs.packing import RowCoder
from verkv.codecs.quantiser import fit_steps, plan_bits


def brute_force(energy, choices, n_units):
    """Least error of all partitions of the blocks into dropped ones and groups, by recursion without memory."""

    def best(block, units):
        if block == len(energy):
            return 0.0
        found = energy[block] + best(block + 1, units)
        for choice in choices:
            length, cost = choice.size // 16, choice.cost_bits // 16
            if block + length <= len(energy) and cost <= units:
                found = min(found, choice.errors[block] + best(block + length, units - cost))
        return found

    return best(0, n_units)


def random_case(seed, n_blocks):
    generator = np.random.default_rng(seed)
    energy = generator.exponential(1.0, n_blocks)
    choices = []
    for size, bits in itertools.product((16, 32, 48), (1, 2)):
        n_starts = max(0, n_blocks - size // 16 + 1)
        errors = np.array([energy[j : j + size // 16].sum() for j in range(n_starts)])
        choices.append(Choice(size, bits, 32 + size * bits, errors * generator.uniform(0.0, 1.1, n_starts)))
    return energy, choices


@pytest.mark.parametrize("seed", range(12))
def test_the_table_equals_brute_force_at_every_budget(seed):
    n_blocks = 3 + seed % 3
    energy, choices = random_case(seed, n_blocks)
    table = allocate(energy, choices, max_bits=16 * 14, parameter_bits=32)
    for n_units in range(15):
        assert table.errors[n_units] == pytest.approx(brute_force(energy, choices, n_units), abs=1e-12)


@pytest.mark.parametrize("seed", range(12))
def test_plans_cost_what_they_may_and_give_what_the_table_says(seed):
    energy, choices = random_case(seed, 6)
    table = allocate(energy, choices, max_bits=16 * 20, parameter_bits=32)
    errors = {(choice.size, choice.bits): choice.errors for choice in choices}
    for n_units in range(21):
        plan = table.plan(16 * n_units)
        assert sum(run.cost("dynamic") for run in plan) <= 16 * n_units
        covered = [block for run in plan for block in range(run.start // 16, run.stop // 16)]
        assert covered == sorted(set(covered))  # disjoint and ascending
        dropped = sum(energy[block] for block in range(6) if block not in covered)
        coded = sum(errors[run.size, run.bits][run.start // 16] for run in plan)
        assert table.errors[n_units] == pytest.approx(dropped + coded, abs=1e-12)


@pytest.mark.parametrize("seed", range(4))
def test_more_bits_never_hurt(seed):
    energy, choices = random_case(seed, 6)
    errors = allocate(energy, choices, 16 * 30, 32).errors
    assert (np.diff(errors) <= 0).all()


@functools.cache
def coordinates():
    generator = torch.Generator().manual_seed(0)
    scales = 3.0 * 0.985 ** torch.arange(320)
    return torch.randn(300, 320, generator=generator) * scales


@pytest.mark.parametrize("mode", ["dynamic", "static"])
@pytest.mark.parametrize("budget", [0, 100, 640, 1300, 3000])
def test_expected_error_is_the_error_of_the_quantiser_under_the_plan(mode, budget):
    rows = coordinates()
    steps, step_errors = fit_steps(rows)
    table = make_table(mode, rows, step_errors, 3200)
    plan = table.plan(budget)
    assert plan_bits(plan, mode) <= budget
    coder = RowCoder(plan, mode, steps)
    decoded = torch.zeros_like(rows)
    if plan:
        decoded[:, : coder.width] = coder.dequantise(coder.quantise(rows))
    error = float((decoded - rows).double().square().sum(1).mean())
    assert table.expected_error(budget) == pytest.approx(error, rel=1e-4)


def test_a_budget_beyond_the_table_is_refused():
    energy, choices = random_case(0, 3)
    table = allocate(energy, choices, 160, 32)
    for budget in (-1, 176):
        with pytest.raises(ValueError, match="budget_bits"):
            table.plan(budget)


def test_numbers_in_a_table_mean_what_the_choices_were():
    rows = coordinates()
    steps_errors = fit_steps(rows)[1]
    for mode in ("dynamic", "static"):
        assert make_table(mode, rows, steps_errors, 64).kinds == allocation_kinds(mode)


def test_block_energy_sums_sixteen_coordinates():
    rows = coordinates()
    assert block_energy(rows)[1] == pytest.approx(float(rows[:, 16:32].double().square().mean(0).sum()))
