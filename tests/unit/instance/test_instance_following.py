"""The active model by plans and orders, and the restart of a dead engine."""

import pytest

from shared.contracts.base import ModelName
from shared.contracts.lanes import inbox_name, relegated_name
from shared.contracts.telemetry import Residency
from solver.instance import commands as do
from solver.instance import events as ev
from solver.instance.end import RETURNED_AT_CRASH
from tests.queued import BATCH, BEST_EFFORT, MODEL, OTHER, a_request, lane_of, sampling
from tests.unit.instance.driver import OURS, Driver, a_profile, segment

LANE, RESUME = lane_of().queue_name, lane_of().resume_name


def test_first_segment_of_the_plan_becomes_active():
    """Segments of models that the instance may not serve do not count."""
    driver = Driver()
    driver.plan(ModelName("a model of others"), OTHER, MODEL)
    activated = driver.of(do.ReportActivation)[-1].activated
    assert (activated.model, activated.source, activated.duration_s) == (OTHER, Residency.COLD, 0.5)
    assert (driver.status.model, driver.status.activating) == (OTHER, None)
    assert driver.status.totals.swaps == 1


def test_plan_of_the_active_model_causes_no_swap_and_warms_the_next_model():
    driver = Driver()
    driver.plan(segment(LANE), OTHER)
    assert (driver.loads, driver.warm) == ([], {OTHER})
    assert LANE in driver.instance.order.queues


def test_plan_with_a_lower_epoch_is_ignored():
    """It may come from a stalled former leader."""
    driver = Driver()
    driver.plan(MODEL, epoch=5)
    driver.plan(OTHER, epoch=4)
    assert (driver.status.model, driver.status.plan_epoch) == (MODEL, 5)


def test_empty_plan_changes_nothing():
    driver = Driver(a_request(base=OTHER))
    driver.wait(9.0)
    driver.plan()
    driver.wait(9.0)
    assert driver.loads == []


def test_swap_hands_the_window_back_and_evicts_runs():
    driver = Driver(
        a_request("runs"), a_request("waits"), engine={"max_running": 1}, drain_limit_s=0.0
    )
    driver.plan(OTHER)
    assert driver.loads == [OTHER]
    assert (driver.outcome("waits"), driver.outcome("runs")) == ("handed back", "evicted")
    assert [each.request_id for each in driver.queues[RESUME]] == ["waits", "runs"]


def test_swap_waits_for_pulls_in_progress():
    driver = Driver()
    driver.waiting = {do.Get}
    driver.put(a_request("r"))
    driver.plan(OTHER)
    assert (driver.loads, driver.status.activating) == ([], OTHER)

    driver.release(do.Get)
    assert (driver.loads, driver.outcome("r")) == ([OTHER], "handed back")


def test_plans_are_followed_until_the_instance_drains():
    driver = Driver()
    for model in (OTHER, MODEL, OTHER):
        driver.plan(model)
    driver.give(ev.Draining())
    driver.plan(MODEL)
    assert driver.loads == [OTHER, MODEL, OTHER]


@pytest.mark.parametrize(
    ("output_tokens", "linear_s", "evicted"),
    [(50, 0.0001, 1), (2, 0.05, 0)],
    ids=["much to do, little to compute again", "nearly done"],
)
def test_swap_drains_or_evicts_whichever_is_predicted_cheaper(
    output_tokens: int, linear_s: float, evicted: int
):
    driver = Driver()
    driver.profile(a_profile(linear_s=linear_s))
    driver.put(a_request("r", sampling=sampling(output_tokens)))
    driver.generate("r")
    driver.plan(OTHER, MODEL)
    if not evicted:
        assert driver.status.activating == OTHER
        driver.end("r")
    totals = driver.status.totals
    assert (driver.loads, totals.evicted, totals.completed) == ([OTHER], evicted, 1 - evicted)


def test_failed_activation_is_retried_without_serving():
    """The previous model may no longer be active: its requests must not fail on the engine."""
    driver = Driver()
    driver.failing[do.Load] = ["no memory", "no memory"]
    driver.plan(OTHER)
    driver.put(a_request("r"))
    assert (driver.status.model, driver.running) == (None, set())

    driver.wait(2.0)
    assert driver.times(do.Load)[1:] == [0.0, 1.0, 2.0]
    assert driver.status.model == OTHER


def test_failed_activations_let_the_previous_model_serve_longer():
    """Each failed attempt drains the instance, so the pause between attempts grows."""
    driver = Driver()
    driver.harmless, driver.failing[do.Load] = True, ["no memory"] * 1000
    for _ in range(200):
        driver.plan(OTHER)
        driver.wait(1.0)
    assert driver.times(do.Load)[1:] == [0.0, 1.0, 3.0, 7.0, 15.0, 31.0, 63.0, 123.0, 183.0]
    assert (driver.status.model, driver.status.takes_in) == (MODEL, True)


@pytest.mark.parametrize("planned", [MODEL, OTHER, None])
def test_engine_that_lost_its_model_follows_plans_or_tries_again(planned: ModelName | None):
    driver = Driver()
    driver.failing[do.Load] = ["no such weights", "no such weights"]
    driver.die()
    if planned is not None:
        driver.plan(planned)
    assert not driver.status.takes_in

    driver.wait(1.0)
    assert driver.status.model == (planned or MODEL)
    assert driver.status.totals.crashes == 1


def test_dead_engine_restarts_with_its_model_and_its_requests_run_again():
    driver = Driver(a_request("runs"), a_request("waits"), engine={"max_running": 1})
    driver.failing[do.Start] = ["not yet", "not yet"]
    driver.die()
    assert (driver.outcome("runs"), driver.outcome("waits")) == (RETURNED_AT_CRASH, "handed back")
    assert [driver.requeued(name).attempts.crashes for name in ("runs", "waits")] == [1, 0]

    driver.notice(RESUME)
    driver.wait(2.0)
    assert (driver.times(do.Start), driver.loads) == ([0.0, 1.0, 2.0], [MODEL])
    assert driver.running | driver.window == {"runs", "waits"}
    assert (driver.status.totals.crashes, driver.status.takes_in) == (1, True)


def test_sources_are_the_existing_queues_that_plans_and_notices_name():
    """Lanes of a plan count as existing; queues of other models are no sources."""
    chat, best_effort = lane_of(), lane_of(BEST_EFFORT)
    exist = {LANE, chat.overflow_name, best_effort.resume_name, relegated_name(MODEL)}
    noticed = {lane_of(BATCH).overflow_name, RESUME}
    foreign = lane_of(model=OTHER).queue_name
    driver = Driver()
    driver.notice(*noticed, foreign, "headway.other")
    assert set(driver.instance.order.queues) == {inbox_name(OURS), *noticed}

    for queue in (*exist, foreign):
        driver.queues[queue].clear()  # in the list of work queues from now on
    driver.plan(segment(LANE, best_effort.queue_name))
    sources = {inbox_name(OURS), *noticed, *exist, best_effort.queue_name}
    assert set(driver.instance.order.queues) == sources
