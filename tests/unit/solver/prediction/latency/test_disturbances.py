"""Distinction of disturbed observations from new kinds of iterations."""

import numpy as np
import pytest

from solver.prediction.latency.disturbances import kinds_of, trust, weighted_median


def test_requests_are_grouped_into_kinds_by_powers_of_two():
    sizes = np.repeat([1.0, 2.0, 3.0, 4.0, 700.0], 20)
    assert kinds_of(sizes)[::20].tolist() == [0, 1, 1, 2, 3]


def test_rare_kinds_join_their_neighbours():
    sizes = np.concatenate([np.ones(20), [4.0] * 10, [64.0] * 10, [4096.0] * 3])
    assert sorted(set(zip(sizes.tolist(), kinds_of(sizes).tolist(), strict=True))) == [
        (1.0, 0), (4.0, 1), (64.0, 1), (4096.0, 1),
    ]  # fmt: skip


def test_few_observations_are_one_kind():
    assert kinds_of(np.array([1.0, 4000.0, 50.0])).tolist() == [0, 0, 0]


def test_values_unlike_most_of_their_kind_have_no_weight():
    values = np.concatenate([np.linspace(-0.1, 0.1, 21), [0.7, -3.0]])
    trusted = trust(values, np.zeros(23, dtype=np.int64), np.ones(23))
    assert trusted[-2:].tolist() == [0.0, 0.0]
    assert trusted[10] == 1.0
    assert trusted[:21].min() > 0.5


def test_iterations_of_a_kind_that_all_deviate_are_trusted():
    values = np.concatenate([np.zeros(30), np.full(30, 2.0)])
    kinds = np.repeat([0, 1], 30)
    assert trust(values, kinds, np.ones(60)).tolist() == [1.0] * 60


def test_old_observations_with_little_weight_are_not_a_majority():
    values = np.concatenate([np.zeros(30), np.full(20, 2.0)])
    weights = np.concatenate([np.full(30, 0.1), np.ones(20)])
    trusted = trust(values, np.zeros(50, dtype=np.int64), weights)
    assert (trusted[0], trusted[-1]) == (0.0, 1.0)


@pytest.mark.parametrize(("weights", "median"), [((1, 1, 1), 2.0), ((5, 1, 1), 9.0)])
def test_medians_are_weighted(weights: tuple[int, ...], median: float):
    assert weighted_median(np.array([9.0, 1.0, 2.0]), np.array(weights, dtype=float)) == median
