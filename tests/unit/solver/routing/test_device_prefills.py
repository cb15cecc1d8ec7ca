"""Prefill times are predicted and corrected separately for each device."""

import pytest

from shared.contracts.base import InstanceId
from shared.contracts.estimates import LatencyCoefficients
from solver.prediction.prefill.latency_prefills import LatencyPrefills
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


def observe(
    reported: DevicePrefills, instance_id: InstanceId, prefill_s: float, count: int
) -> None:
    for number in range(count):
        request = routed(number)
        candidate = Candidate(instance_id=instance_id)
        (estimate,) = reported.predict(request, [candidate])
        reported.observe(
            Assignment(request=request, candidate=candidate, estimate=estimate, key=0.0), prefill_s
        )


def test_each_candidate_uses_its_own_device_in_order():
    means = [each.mean_s for each in prefills().predict(routed(0), candidates())]

    assert means == pytest.approx([0.1, 0.4, 0.1])


def test_observations_of_a_device_correct_no_other_device():
    reported = prefills()
    observe(reported, B, 0.8, 100)
    means = [each.mean_s for each in reported.predict(routed(0), candidates())]

    assert means == pytest.approx([0.1, 0.8, 0.1], rel=1e-2)


def test_one_untrusted_device_ends_trust_for_all():
    reported = prefills()
    observe(reported, B, 4.0, 100)

    assert not reported.is_trusted
    assert [key for key, each in reported.monitors.items() if not each.trusted] == [SLOW]


def test_only_a_different_model_resets_corrections():
    reported = prefills()
    observe(reported, B, 0.8, 100)
    reported.use(SLOW, latency(9e-4), "s1")
    same = reported.predict(routed(0), candidates())[1].mean_s
    reported.use(SLOW, latency(9e-4), "s2")
    other = reported.predict(routed(0), candidates())[1].mean_s

    assert (same, other) == (pytest.approx(0.8, rel=1e-2), pytest.approx(0.9))


def test_corrections_are_shared_only_for_the_same_model():
    teacher, same, other = prefills(), prefills("two"), prefills("three")
    other.use(SLOW, latency(4e-4), "s2")
    observe(teacher, B, 0.8, 100)
    for snapshot in teacher.snapshots():
        same.adopt(snapshot)
        other.adopt(snapshot)

    assert same.predict(routed(0), candidates())[1].mean_s == pytest.approx(0.8, rel=1e-2)
    assert other.predict(routed(0), candidates())[1].mean_s == pytest.approx(0.4)


def test_an_unknown_device_is_predicted_by_a_prior():
    reported = DevicePrefills(options=VARIANTS["default"], origin="one")
    reported.device_of = {A: FAST}
    (estimate,) = reported.predict(routed(0, tokens=1000), [Candidate(instance_id=A)])

    assert 0 < estimate.mean_s < 1


def test_without_calibration_all_is_trusted_and_uncorrected():
    reported = prefills(policy="no-calibration")
    observe(reported, B, 4.0, 100)

    assert reported.is_trusted
    assert reported.snapshots() == ()
    assert reported.predict(routed(0), candidates())[1].mean_s == pytest.approx(0.4)


def test_devices_that_are_gone_do_not_block_trust():
    reported = prefills()
    observe(reported, B, 4.0, 100)
    del reported.device_of[B]

    assert reported.is_trusted
