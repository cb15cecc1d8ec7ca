"""Edges between work classes: where two clusters part, and when that is worth new lanes."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.contracts.base import ModelName
from shared.contracts.lanes import LaneLayout, WorkClass
from solver.planning.lanes import work_class_of
from solver.planning.work_classes import (
    RefitOptions,
    added,
    best_edge_tokens,
    bin_of,
    lower_edge_tokens,
    refitted,
    variance_inside,
)

M, N = ModelName("m"), ModelName("n")
OPTIONS = RefitOptions(least_requests=100, gain=0.2)
histograms = st.dictionaries(st.integers(0, 68), st.integers(1, 1000), max_size=12)


@given(tokens=st.integers(1, 10**6), edge=st.integers(0, 80))
def test_bins_and_edges_agree(tokens: int, edge: int):
    assert (bin_of(tokens) >= edge) == (tokens >= lower_edge_tokens(edge))


def test_four_bins_double_the_work():
    assert [bin_of(tokens) for tokens in (0, 1, 2, 1023, 1024, 2047, 2048)] == [
        *(0, 0, 4, 39, 40, 43, 44)
    ]


def test_mega_prompts_are_parted_from_chat():
    """QLM §8.2, workload C: few prompts that fill the memory stand before many short ones."""
    chat = {bin_of(tokens): 1000 for tokens in (200, 300, 400, 600)}
    mega = {bin_of(tokens): 20 for tokens in (12000, 16000)}
    edge = best_edge_tokens(chat | mega)

    assert edge is not None
    assert work_class_of(600, edge) is WorkClass.SHORT
    assert work_class_of(12000, edge) is WorkClass.LONG


@pytest.mark.parametrize("histogram", [{}, {31: 500}])
def test_one_kind_of_work_has_no_edge(histogram: dict[int, int]):
    assert best_edge_tokens(histogram) is None


@given(histogram=histograms, number=st.integers(0, 70))
def test_no_other_edge_has_less_variance_inside(histogram: dict[int, int], number: int):
    edge = best_edge_tokens(histogram)
    best = variance_inside(histogram, math.inf if edge is None else edge)

    assert best <= variance_inside(histogram, lower_edge_tokens(number)) * (1 + 1e-9) + 1e-6


@given(histogram=histograms, times=st.integers(2, 9))
def test_more_of_the_same_changes_no_edge(histogram: dict[int, int], times: int):
    more = {number: count * times for number, count in histogram.items()}

    assert best_edge_tokens(histogram) == best_edge_tokens(more)


SMALL = {bin_of(100): 400, bin_of(1000): 100}
"""Both kinds short by the operator's edge of 2048."""


class TestRefitting:
    def test_better_edges_are_the_next_version(self):
        better = refitted(LaneLayout(version=3), {M: SMALL}, OPTIONS)

        assert better is not None
        assert (better.version, better.work_version) == (3, 1)
        assert 100 < better.work_edge_of(M) <= 1000
        assert better.work_edge_of(N) == 2048

    def test_edges_that_fit_stay(self):
        better = refitted(LaneLayout(), {M: SMALL}, OPTIONS)

        assert better is not None
        assert refitted(better, {M: SMALL}, OPTIONS) is None

    def test_a_small_gain_is_not_worth_new_lanes(self):
        shifted = {bin_of(100): 390, bin_of(1000): 100, bin_of(250): 10}
        better = refitted(LaneLayout(), {M: SMALL}, OPTIONS)

        assert better is not None
        assert refitted(better, {M: shifted}, OPTIONS) is None

    def test_a_few_requests_prove_nothing(self):
        few = {number: count // 10 for number, count in SMALL.items()}

        assert refitted(LaneLayout(), {M: few}, OPTIONS) is None

    def test_equal_work_needs_no_classes(self):
        assert refitted(LaneLayout(), {M: {bin_of(100): 900}}, OPTIONS) is None

    def test_a_model_keeps_its_edge_while_another_gets_one(self):
        first = refitted(LaneLayout(), {M: SMALL}, OPTIONS)
        assert first is not None
        second = refitted(first, {M: SMALL, N: {20: 300, 30: 300}}, OPTIONS)

        assert second is not None
        assert second.work_version == 2
        assert second.work_edge_of(M) == first.work_edge_of(M)
        assert second.work_edge_of(N) < 2048


@given(many=st.lists(histograms, max_size=4))
def test_the_sum_has_every_request(many: list[dict[int, int]]):
    assert sum(added(many).values()) == sum(sum(each.values()) for each in many)
