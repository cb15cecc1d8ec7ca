"""Scaling advice: required instances of each kind of device."""

from collections.abc import Mapping
from dataclasses import replace
from itertools import count

import pytest

from shared.contracts.base import InstanceId, ModelName
from solver.planning.capacity.advice import AdviceOptions, DeviceAdvice, scale_advice
from solver.planning.problem.grouping import Spread
from solver.planning.problem.snapshot import ClusterSnapshot, InstanceView, ServiceRates
from tests.unit.solver.planning.groups import a_group

A, B = ModelName("a"), ModelName("b")
OPTIONS = AdviceOptions(target=0.95, most=6, start_s=0.0, budget_s=0.02)
NO_FLOORS: Mapping[str, int] = {}


def an_instance(name: str, device: str, *models: ModelName) -> InstanceView:
    return InstanceView(
        instance_id=InstanceId(name),
        device=device,
        active=models[0],
        activate_s=dict.fromkeys(models, 1.0),
    )


def a_snapshot(num_groups: int) -> ClusterSnapshot:
    """Groups of 1000 tokens, 10 s of work each on the fast device, due in 60 s."""
    return ClusterSnapshot(
        now=100.0,
        groups=tuple(a_group(A, number) for number in range(num_groups)),
        instances=(an_instance("f", "fast", A), an_instance("s", "slow", A)),
        rates={
            ("fast", A): ServiceRates(token_rate_per_s=100.0),
            ("slow", A): ServiceRates(token_rate_per_s=25.0),
            ("other", A): ServiceRates(token_rate_per_s=100.0),
        },
    )


def advise(
    snapshot: ClusterSnapshot,
    options: AdviceOptions = OPTIONS,
    floors: Mapping[str, int] = NO_FLOORS,
) -> dict[str, DeviceAdvice]:
    ticks = count()
    advice = scale_advice(
        snapshot,
        importance_weight={"high": 4.0, "low": 1.0},
        options=options,
        floors=floors,
        clock=lambda: 0.001 * next(ticks),
        seed=1,
    )
    return {each.device: each for each in advice}


def test_a_feasible_load_needs_no_further_instance():
    assert {name: each.instances for name, each in advise(a_snapshot(4)).items()} == {
        "fast": 1,
        "slow": 1,
    }


def test_more_slow_devices_than_fast_ones_are_needed():
    """Twelve groups take 120 s on a fast device, of which 60 s are available."""
    advice = advise(a_snapshot(12))

    assert advice["fast"].present == advice["slow"].present == 1
    assert 1 < advice["fast"].instances < advice["slow"].instances
    assert all((each.attainment or 0.0) >= OPTIONS.target for each in advice.values())


def test_no_number_is_advised_when_a_new_instance_would_start_too_late():
    advice = advise(a_snapshot(20), replace(OPTIONS, start_s=500.0))["fast"]

    assert (advice.bound, advice.confirmed, advice.instances) == (None, None, 1)


def test_the_bound_is_advised_if_no_plan_meets_the_target():
    """A group of 100 s is due in 60 s; the bound lets two instances share it, no plan does."""
    whole = replace(a_snapshot(1), groups=(a_group(A, 0, num_requests=100),))
    snapshot = replace(whole, instances=whole.instances[:1])
    advice = advise(snapshot)["fast"]

    assert advice.confirmed is None
    assert advice.bound is not None
    assert 2 <= 1 + advice.bound == advice.instances < 1 + OPTIONS.most


def test_advice_respects_its_maximum():
    advice = advise(a_snapshot(40), replace(OPTIONS, most=2))["fast"]

    assert (advice.confirmed, advice.instances) == (None, 3)


@pytest.mark.parametrize("models", [(B,), (B, A)])
def test_a_device_without_the_model_cannot_help(models: tuple[ModelName, ...]):
    snapshot = a_snapshot(20)
    other = an_instance("o", "other", *models)
    advice = advise(replace(snapshot, instances=(*snapshot.instances, other)))["other"]

    assert (advice.instances > 1) == (A in models)


def four(num_groups: int, **changes: object) -> ClusterSnapshot:
    """Four fast instances; each serves at most six groups in time."""
    instances = tuple(an_instance(f"f{number}", "fast", A) for number in range(4))
    return replace(a_snapshot(num_groups), instances=instances, **changes)


@pytest.mark.parametrize(("num_groups", "enough"), [(4, 1), (9, 2), (20, 4)])
def test_fewer_instances_are_enough_if_their_plan_meets_the_target(num_groups: int, enough: int):
    advice = advise(four(num_groups), floors={"fast": 0})["fast"]

    assert (advice.present, advice.enough, advice.instances) == (4, enough, enough)


def test_fewer_instances_than_the_floor_are_not_tried():
    assert advise(four(4), floors={"fast": 3})["fast"].instances == 3
    assert advise(four(4))["fast"].instances == 4


def test_floor_is_enough_if_nothing_waits():
    advice = advise(four(0), floors={"fast": 0})["fast"]

    assert (advice.enough, advice.instances) == (0, 0)


def test_instances_that_are_free_last_are_kept():
    """One of the idle instances alone would be enough."""
    busy = replace(an_instance("busy", "fast", A), backlog_s=Spread(58.0))
    snapshot = four(4)
    snapshot = replace(snapshot, instances=(busy, *snapshot.instances[1:]))

    assert advise(snapshot, floors={"fast": 0})["fast"].instances == 2
