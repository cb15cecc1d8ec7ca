"""Instances of several devices: each predicted and corrected by its own."""

import pytest

from shared.contracts.base import InstanceId
from shared.contracts.estimates import LatencyCoefficients
from solver.prediction.latency_prefills import LatencyPrefills
from solver.routing.admission_queue import Assignment
from solver.routing.device_prefills import LEVELS, DevicePrefills
from solver.routing.options import VARIANTS
from solver.routing.request import Candidate
from tests.routed import routed

FAST, SLOW = ("e", "fast"), ("e", "slow")
A, B, C = (InstanceId(name) for name in "abc")


def latency(linear_s: float) -> LatencyPrefills:
    return LatencyPrefills(LatencyCoefficients(constant_s=0, linear_s=linear_s), LEVELS)


def prefills(origin: str = "one", policy: str = "default") -> DevicePrefills:
    made = DevicePrefills(options=VARIANTS[policy], origin=origin)
    made.device_of = {A: FAST, B: SLOW, C: FAST}
    made.use(FAST, latency(1e-4), "f1")
    made.use(SLOW, latency(4e-4), "s1")
    return made


def candidates() -> list[Candidate]:
    return [Candidate(instance_id=each) for each in (A, B, C)]


def observe(told: DevicePrefills, instance_id: InstanceId, prefill_s: float, count: int) -> None:
    for number in range(count):
        request = routed(number)
        candidate = Candidate(instance_id=instance_id)
        (estimate,) = told.predict(request, [candidate])
        told.observe(
            Assignment(request=request, candidate=candidate, estimate=estimate, key=0.0), prefill_s
        )


def test_each_candidate_is_asked_of_its_own_device_in_order():
    means = [each.mean_s for each in prefills().predict(routed(0), candidates())]

    assert means == pytest.approx([0.1, 0.4, 0.1])


def test_what_one_device_does_corrects_no_other():
    told = prefills()
    observe(told, B, 0.8, 100)
    means = [each.mean_s for each in told.predict(routed(0), candidates())]

    assert means == pytest.approx([0.1, 0.8, 0.1], rel=1e-2)


def test_trust_is_lost_on_one_device_for_all():
    told = prefills()
    observe(told, B, 4.0, 100)

    assert not told.is_trusted
    assert [key for key, each in told.monitors.items() if not each.trusted] == [SLOW]


def test_another_model_begins_without_corrections_and_the_same_one_changes_nothing():
    told = prefills()
    observe(told, B, 0.8, 100)
    told.use(SLOW, latency(9e-4), "s1")
    same = told.predict(routed(0), candidates())[1].mean_s
    told.use(SLOW, latency(9e-4), "s2")
    other = told.predict(routed(0), candidates())[1].mean_s

    assert (same, other) == (pytest.approx(0.8, rel=1e-2), pytest.approx(0.9))


def test_corrections_travel_between_routers_of_the_same_model_only():
    teacher, same, other = prefills(), prefills("two"), prefills("three")
    other.use(SLOW, latency(4e-4), "s2")
    observe(teacher, B, 0.8, 100)
    for snapshot in teacher.snapshots():
        same.adopt(snapshot)
        other.adopt(snapshot)

    assert same.predict(routed(0), candidates())[1].mean_s == pytest.approx(0.8, rel=1e-2)
    assert other.predict(routed(0), candidates())[1].mean_s == pytest.approx(0.4)


def test_a_device_that_nobody_has_told_of_is_predicted_by_a_prior():
    told = DevicePrefills(options=VARIANTS["default"], origin="one")
    told.device_of = {A: FAST}
    (estimate,) = told.predict(routed(0, tokens=1000), [Candidate(instance_id=A)])

    assert 0 < estimate.mean_s < 1


def test_without_calibration_nothing_is_corrected_and_all_is_trusted():
    told = prefills(policy="no-calibration")
    observe(told, B, 4.0, 100)

    assert told.is_trusted
    assert told.snapshots() == ()
    assert told.predict(routed(0), candidates())[1].mean_s == pytest.approx(0.4)


def test_what_is_gone_is_not_distrusted_for_ever():
    told = prefills()
    observe(told, B, 4.0, 100)
    del told.device_of[B]

    assert told.is_trusted
