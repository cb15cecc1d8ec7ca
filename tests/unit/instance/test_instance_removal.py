"""A model that was removed from the registry is served until nothing waits, and then released."""

from shared.contracts.base import ModelName
from shared.contracts.control import LsoActivate
from solver.instance import commands as do
from solver.instance import events as ev
from solver.instance.models import GRACE_S, RETRY_S
from tests.queued import MODEL, OTHER, a_request, lane_of
from tests.unit.instance.driver import OURS, Driver, segment

LANE = lane_of().queue_name


def released(driver: Driver) -> list[str]:
    return [command.model for command in driver.of(do.Release)]


def test_an_inactive_model_is_released_after_the_grace_time():
    driver = Driver()
    driver.give(ev.Removed(model=OTHER))
    assert driver.status.releasing == (OTHER,)
    driver.wait(GRACE_S - 0.1)
    assert released(driver) == []
    driver.wait(0.2)
    assert released(driver) == [OTHER]
    assert OTHER not in driver.instance.models
    assert driver.status.releasing == ()
    assert driver.status.model == MODEL


def test_runs_of_the_active_model_finish_first():
    driver = Driver(a_request("r"))
    driver.give(ev.Removed(model=MODEL))
    driver.wait(GRACE_S + 5.0)
    assert released(driver) == []
    driver.end("r")
    driver.wait(RETRY_S)
    assert released(driver) == [MODEL]
    assert (driver.status.model, driver.active) == (None, None)


def test_requests_that_are_queued_after_the_removal_are_served():
    driver = Driver()
    driver.plan(segment(LANE))
    driver.give(ev.Removed(model=MODEL))
    driver.put(a_request("late"))
    assert "late" in driver.runs


def test_a_model_with_requests_in_a_queue_is_kept():
    driver = Driver(a_request("waits", base=OTHER))
    driver.give(ev.Removed(model=OTHER))
    driver.wait(GRACE_S + 0.1)
    assert released(driver) == [OTHER]
    assert driver.of(do.Release)[0].queues == (lane_of(model=OTHER).queue_name,)
    assert driver.status.releasing == (OTHER,)
    driver.queues.clear()
    driver.wait(RETRY_S + 0.1)
    assert driver.status.releasing == ()


def test_a_model_that_is_added_again_is_kept():
    driver = Driver()
    driver.give(ev.Removed(model=OTHER))
    driver.wait(1.0)
    driver.give(ev.Added(model=ev.ModelFacts(model=OTHER)))
    driver.wait(2 * GRACE_S)
    assert released(driver) == []
    assert driver.status.releasing == ()


def test_an_instance_without_its_model_follows_plans():
    driver = Driver()
    driver.give(ev.Removed(model=MODEL))
    driver.wait(GRACE_S + 0.1)
    assert driver.status.model is None
    driver.plan(OTHER)
    assert driver.status.model == OTHER


def test_a_lost_model_does_not_return_once_another_model_was_active():
    driver = Driver()
    driver.failing[do.Load] = ["no such weights"]
    driver.die()
    driver.plan(OTHER)
    driver.wait(1.0)
    assert driver.status.model == OTHER
    driver.give(ev.Removed(model=OTHER))
    driver.wait(GRACE_S + 1.0)

    assert released(driver) == [OTHER]
    assert driver.status.model is None


def test_the_release_of_another_model_keeps_the_model_that_an_operator_ordered():
    planned = ModelName("planned")
    driver = Driver()
    driver.give(ev.Added(model=ev.ModelFacts(model=planned)))
    driver.plan(planned, epoch=5)
    driver.order(LsoActivate(instance_id=OURS, model=OTHER))
    driver.give(ev.Removed(model=MODEL))
    driver.wait(GRACE_S - 1.0)
    driver.plan(planned, epoch=5)
    driver.wait(2.0)

    assert released(driver) == [MODEL]
    assert driver.status.model == OTHER


def test_a_failed_release_is_tried_again():
    driver = Driver()
    driver.failing[do.Release] = ["the engine is loading a model"]
    driver.give(ev.Removed(model=OTHER))
    driver.wait(GRACE_S + 0.1)
    assert OTHER in driver.instance.models
    driver.wait(RETRY_S + 0.1)
    assert OTHER not in driver.instance.models


def test_an_unknown_model_is_ignored():
    driver = Driver()
    driver.give(ev.Removed(model=ModelName("unknown")))
    driver.wait(GRACE_S + 1.0)
    assert released(driver) == []
