"""The demo's load is seeded, equal for the two arms, and above capacity only in the burst."""

import itertools

import pytest

from ops.demo.arms import ARMS, ENGINE_LIMITS, FCFS, HEADWAY, MODELS, NUM_AGENTS, UNIFORM_TARGET_S
from ops.demo.workload import (
    BURST,
    BURST_FACTOR,
    CALM_FACTOR,
    CLASSES,
    KILL_AT,
    MAX_REQUESTS,
    endless_requests,
    mean_output_tokens,
    plan_workload,
)
from shared.contracts.qos import Importance, Slo
from solver.planning.lanes import lane_for

DURATION_S = 100.0


def load(seed=0, capacity_rps=20.0, duration_s=DURATION_S):
    return plan_workload(MODELS, duration_s=duration_s, capacity_rps=capacity_rps, seed=seed)


def rate_between(workload, start, end):
    count = sum(start * DURATION_S <= p.at_s < end * DURATION_S for p in workload)
    return count / ((end - start) * DURATION_S)


def test_equal_seeds_give_equal_loads_and_different_seeds_different_loads():
    assert load(seed=3) == load(seed=3)
    assert load(seed=3) != load(seed=4)


@pytest.mark.parametrize("seed", range(5))
def test_arrivals_exceed_the_capacity_during_the_burst_only(seed):
    workload = load(seed)

    assert rate_between(workload, *BURST) == pytest.approx(20 * BURST_FACTOR, rel=0.15)
    assert rate_between(workload, 0, BURST[0]) == pytest.approx(20 * CALM_FACTOR, rel=0.25)
    assert rate_between(workload, BURST[1], 1) == pytest.approx(20 * CALM_FACTOR, rel=0.25)
    assert BURST_FACTOR > 1 > CALM_FACTOR
    assert BURST[0] < KILL_AT < BURST[1]


def test_arrivals_are_ordered_and_within_the_load():
    times = [planned.at_s for planned in load()]

    assert times == sorted(times)
    assert 0 <= times[0] <= times[-1] < DURATION_S


def test_the_load_moves_from_the_first_model_to_the_second():
    workload = load()
    early = [p.body.model for p in workload if p.at_s < 0.2 * DURATION_S]
    late = [p.body.model for p in workload if p.at_s > 0.8 * DURATION_S]

    assert set(early) == {MODELS[0]}
    assert late.count(MODELS[1]) > 2 * late.count(MODELS[0])


def test_the_number_of_requests_is_bounded_and_the_shape_is_kept():
    workload = load(capacity_rps=1e6)

    assert 0.9 * MAX_REQUESTS < len(workload) <= MAX_REQUESTS
    assert workload[-1].at_s > 0.95 * DURATION_S


def test_requests_carry_the_target_of_their_class():
    for planned in load():
        assert planned.body.slo == planned.request_class.slo
        low, high = planned.request_class.max_tokens
        assert low <= planned.body.max_tokens <= high


def test_shares_of_the_classes_add_up():
    assert sum(c.share for c in CLASSES) == pytest.approx(1)


def test_closed_loop_has_the_mean_answer_length_of_the_mix():
    bodies = [p.body for p in itertools.islice(endless_requests("m", seed="1"), 2000)]

    assert {body.model for body in bodies} == {"m"}
    mean = sum(body.max_tokens for body in bodies) / len(bodies)
    assert mean == pytest.approx(mean_output_tokens(), rel=0.1)


def test_headway_gets_requests_with_their_targets():
    for planned in load(duration_s=5):
        published = HEADWAY.published(planned.body)
        assert (published.slo, published.importance) == (
            planned.request_class.slo,
            planned.request_class.importance,
        )


def test_fcfs_gets_the_same_requests_without_their_targets():
    for planned in load(duration_s=5):
        ours, theirs = HEADWAY.published(planned.body), FCFS.published(planned.body)
        assert (theirs.prompt, theirs.max_tokens, theirs.model) == (
            ours.prompt,
            ours.max_tokens,
            ours.model,
        )
        assert (theirs.slo, theirs.importance) == (Slo(ttlt_s=UNIFORM_TARGET_S), Importance.HIGH)
        assert theirs.id != ours.id


def test_fcfs_has_one_lane_per_model():
    lanes = {
        lane_for(
            model=MODELS[0],
            importance=Importance.HIGH,
            time_left_s=UNIFORM_TARGET_S - waited_s,
            work_tokens=work,
            layout=FCFS.layout,
        )
        for waited_s in (0.0, 0.1, 60.0)
        for work in (1, 5000)
    }

    assert len(lanes) == 1


@pytest.mark.parametrize("engine", ENGINE_LIMITS)
def test_arms_differ_in_the_engine_by_the_policy_only(engine, tmp_path):
    engines = []
    for arm in ARMS:
        spec = arm.spec(engine=engine, broker="embedded", registry=tmp_path, log_dir=tmp_path)
        assert len(spec.agents) == NUM_AGENTS
        assert f"agent-{spec.agents[0].instance_id}" == arm.killed_agent
        settings = [agent.settings for agent in spec.agents]
        assert tuple(each.pop("initial_model") for each in settings) == arm.initial_models
        assert {tuple(each.pop("warm_models")) for each in settings} == {arm.warm_models}
        served = [each.pop("models") for each in settings]
        assert served == ([[m] for m in MODELS] if arm.fixed_models else [[], []])
        assert settings[0] == settings[1]
        engines.append(settings[0])
    fcfs, headway = engines
    policy = fcfs["engine"][engine].pop("policy")

    assert policy == {"simulated": "fcfs", "vllm": "stock"}[engine]
    assert fcfs == headway
