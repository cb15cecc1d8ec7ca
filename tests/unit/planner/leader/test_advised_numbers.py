"""Numbers of instances that the leader advises, upwards, downwards and to zero."""

from typing import Any

from services.planner.leader.scaling import UNKNOWN, Scaling
from services.planner.state import LeaderState
from shared.contracts.estimates import Profile
from shared.contracts.lanes import LaneLayout
from shared.contracts.qos import Slo
from shared.contracts.telemetry import LanesObserved, LaneTotal
from solver.planning.capacity.advice import AdviceOptions, DeviceAdvice
from tests.clocks import NOW
from tests.queued import CHAT, MODEL, lane_of
from tests.unit.planner.leader_rig import status

DEVICE = "simulated simulated"
DOWN_AFTER_S = 100.0
OPTIONS = AdviceOptions(start_s=20.0, busy_share=0.5, down_after_s=DOWN_AFTER_S)
PROFILE = Profile(
    model=MODEL,
    engine="simulated",
    device="simulated",
    version=1,
    at=NOW,
    token_rate_per_s=100.0,
)
SLOW_BATCH = Slo(ttlt_s=600.0)


def a_scaling() -> Scaling:
    return Scaling(options=OPTIONS, layout=LaneLayout())


def a_state(
    num_instances: int, *, slo: Slo = SLOW_BATCH, requests: int = 0, **fields: Any
) -> LeaderState:
    """
    The view of a leader with instances that serve 100 tokens/s each. A request of 100 tokens of
    *slo* came long ago, and *requests* in the last minute.
    """
    state = LeaderState(active_since=NOW)
    for number in range(num_instances):
        state.on_status(status(f"i{number}", **fields), NOW)
    state.on_profile(PROFILE)
    total = LaneTotal(
        lane=lane_of(slo).queue_name,
        requests=1 + requests,
        prompt_tokens=100 * (1 + requests),
        arrivals=((NOW - 1000.0, 1), (NOW - 60.0, 1), (NOW, 1 + requests)),
    )
    state.on_lanes(
        LanesObserved(sender="g", incarnation="1", seq=1, at=NOW, layout=2, lanes=(total,)), NOW
    )
    return state


def number(scaling: Scaling, state: LeaderState, at: float, *advice: DeviceAdvice) -> int:
    (found,) = scaling.advised(state, advice, NOW + at)
    return found.advised


def waiting_needs(present: int, **fields: Any) -> DeviceAdvice:
    values: dict[str, Any] = {"bound": 0, "confirmed": 0, "attainment": 1.0, "most": 8}
    return DeviceAdvice(device=DEVICE, present=present, **(values | fields))


def enough(present: int, count: int) -> DeviceAdvice:
    return waiting_needs(present, enough=count)


def test_the_present_number_is_advised_at_first():
    assert number(a_scaling(), a_state(3), 0.0) == 3


def test_fewer_are_advised_after_the_time_if_arriving_and_waiting_work_need_fewer():
    """60 requests of 100 tokens a minute use one instance, or two of which half may be used."""
    scaling, state = a_scaling(), a_state(5, slo=CHAT, requests=60)
    before = number(scaling, state, 0.0, enough(5, 1))

    assert scaling.floors(state, NOW) == {DEVICE: 2}
    assert (before, number(scaling, state, DOWN_AFTER_S, enough(5, 1))) == (5, 2)


def test_waiting_work_keeps_the_instances_that_its_plan_needs():
    scaling, state = a_scaling(), a_state(5)
    number(scaling, state, 0.0, enough(5, 4))

    assert number(scaling, state, DOWN_AFTER_S, enough(5, 4)) == 4


def test_work_that_can_wait_is_averaged_over_the_time_that_it_can_wait():
    assert a_scaling().floors(a_state(5, slo=CHAT, requests=90), NOW) == {DEVICE: 3}
    assert a_scaling().floors(a_state(5, slo=SLOW_BATCH, requests=90), NOW) == {DEVICE: 2}


def test_number_stays_while_no_plan_says_that_fewer_are_enough():
    scaling, state = a_scaling(), a_state(5)
    number(scaling, state, 0.0)

    assert number(scaling, state, 10 * DOWN_AFTER_S) == 5


def test_more_are_advised_at_once_and_kept_for_the_time():
    scaling, state = a_scaling(), a_state(2)
    late = waiting_needs(2, bound=1, confirmed=3)
    up = number(scaling, state, 1.0, late)
    kept = number(scaling, state, DOWN_AFTER_S, enough(2, 1))

    assert (up, kept) == (5, 5)
    assert number(scaling, state, 1.0 + 2 * DOWN_AFTER_S, enough(2, 1)) == 1


def test_throughput_that_was_never_measured_keeps_the_instances():
    state = a_state(3, slo=CHAT, requests=1)
    state.profiles.clear()

    assert a_scaling().floors(state, NOW) == {}


def test_running_requests_keep_the_instances_that_they_fill():
    assert a_scaling().floors(a_state(4, running=8, max_running=8), NOW) == {}
    assert a_scaling().floors(a_state(4, running=6, max_running=8), NOW) == {DEVICE: 3}
    assert a_scaling().floors(a_state(4, running=2, max_running=8), NOW) == {DEVICE: 1}


def test_zero_is_advised_if_requests_can_wait_for_a_cold_start():
    scaling, state = a_scaling(), a_state(1, slo=SLOW_BATCH)
    number(scaling, state, 0.0)

    assert number(scaling, state, DOWN_AFTER_S) == 0


def test_one_instance_is_kept_if_a_cold_start_would_be_too_late():
    scaling, state = a_scaling(), a_state(1, slo=CHAT)
    number(scaling, state, 0.0)

    assert number(scaling, state, 10 * DOWN_AFTER_S) == 1


def test_one_instance_is_kept_while_requests_wait_or_run():
    for waits, running in ((3, 0), (0, 1)):
        scaling, state = a_scaling(), a_state(1, running=running)
        state.waiting = {"lane": waits}
        number(scaling, state, 0.0)

        assert number(scaling, state, 10 * DOWN_AFTER_S) == 1


def test_one_instance_is_kept_if_no_deadline_is_known():
    scaling, state = a_scaling(), a_state(1)
    state.lanes.clear()
    number(scaling, state, 0.0)

    assert number(scaling, state, 10 * DOWN_AFTER_S) == 1


def test_number_is_known_without_an_instance_and_rises_with_the_first_request():
    scaling, state = a_scaling(), a_state(1)
    number(scaling, state, 0.0)
    number(scaling, state, DOWN_AFTER_S)
    state.instances.clear()
    absent = number(scaling, state, DOWN_AFTER_S + 1.0)
    state.waiting = {"lane": 1}

    assert (absent, number(scaling, state, DOWN_AFTER_S + 2.0)) == (0, 1)


def test_new_leader_learns_of_devices_without_instances_from_profiles():
    scaling, state = a_scaling(), a_state(0)
    (found,) = scaling.advised(state, (), NOW)

    assert (found.device, found.present, found.advised) == (DEVICE, 0, 0)


def test_mesh_that_never_had_an_instance_has_a_number_too():
    scaling, state = a_scaling(), LeaderState(active_since=NOW)
    (found,) = scaling.advised(state, (), NOW)
    state.on_status(status("i1"), NOW)
    (later,) = scaling.advised(state, (), NOW)

    assert (found.device, found.present, found.advised) == (UNKNOWN, 0, 1)
    assert (later.device, later.present, later.advised) == (DEVICE, 1, 1)


def test_draining_instances_are_not_present():
    scaling, state = a_scaling(), a_state(2)
    state.on_status(status("i0", draining=True), NOW)
    (found,) = scaling.advised(state, (), NOW)

    assert found.present == 1
