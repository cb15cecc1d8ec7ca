"""How many instances the arriving work needs."""

import math
from typing import Any

import pytest

from shared.contracts.base import ModelName
from solver.planning.capacity.demand import (
    ModelDemand,
    instances_for,
    left_for,
    may_be_zero,
)

A, B = ModelName("a"), ModelName("b")
RATES = {A: 100.0, B: 50.0}


def demand(model: ModelName, tokens_per_s: float, least_left_s: float = 60.0) -> ModelDemand:
    return ModelDemand(model=model, tokens_per_s=tokens_per_s, least_left_s=least_left_s)


def needed(*demands: ModelDemand, **changes: Any) -> int | None:
    values: dict[str, Any] = {"rates": RATES, "activate_s": {A: 5.0, B: 5.0}, "busy_share": 0.5}
    return instances_for(demands, **(values | changes))


def test_no_work_needs_no_instance():
    assert needed() == 0
    assert needed(demand(A, 0.0)) == 0


def test_models_with_time_for_swaps_share_instances():
    """A uses 0.2 and B 0.1 of an instance that may be used by half."""
    assert needed(demand(A, 20.0), demand(B, 5.0)) == 1
    assert needed(demand(A, 20.0), demand(B, 15.5)) == 2


def test_model_with_near_deadlines_has_instances_of_its_own():
    assert needed(demand(A, 1.0, 4.0), demand(B, 1.0, 4.0)) == 2
    assert needed(demand(A, 1.0, 4.0), demand(B, 1.0)) == 2
    assert needed(demand(A, 1.0, 5.0), demand(B, 1.0, 5.0)) == 1


def test_lanes_of_one_model_share_its_instances():
    lanes = [demand(A, 1.0, left_s) for left_s in (1.0, 2.0, 60.0, math.inf)]

    assert needed(*lanes) == 1


def test_exact_use_does_not_need_one_more():
    assert needed(demand(A, 50.0)) == 1
    assert needed(demand(A, 150.0)) == 3


def test_number_is_unknown_without_the_throughput_of_a_model_that_has_work():
    assert needed(demand(A, 1.0), rates={B: 50.0}) is None
    assert needed(demand(A, 0.0), rates={B: 50.0}) == 0


def test_other_devices_take_their_part_of_each_demand():
    """Two instances that are twice as fast, used by half, serve two thirds of 300 tokens/s."""
    left = left_for([demand(A, 300.0)], [({A: 200.0}, 2)], busy_share=0.5)

    assert left is not None
    assert left[0].tokens_per_s == pytest.approx(100.0)


def test_nothing_is_left_if_other_devices_suffice():
    left = left_for([demand(A, 100.0), demand(B, 10.0)], [(RATES, 9)], busy_share=0.5)

    assert left == [demand(A, 0.0), demand(B, 0.0)]


def test_what_is_left_is_unknown_if_the_throughput_of_another_device_is():
    assert left_for([demand(A, 100.0)], [({B: 1.0}, 1)], busy_share=0.5) is None


@pytest.mark.parametrize(
    ("deadlines_s", "is_allowed"),
    [([], False), ([60.0], True), ([math.inf, 120.0], True), ([math.inf, 59.0], False)],
)
def test_zero_needs_known_deadlines_that_a_cold_start_meets(
    deadlines_s: list[float],
    is_allowed: bool,  # noqa: FBT001
):
    assert may_be_zero(deadlines_s, cold_start_s=60.0) == is_allowed
