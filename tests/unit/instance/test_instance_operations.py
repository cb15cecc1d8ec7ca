"""Each operation: its effect, its refusals, and its result when repeated."""

from collections.abc import Callable, Sequence

import pytest

from shared.contracts import control as order
from shared.contracts.base import InstanceId, ModelName, RequestId
from shared.contracts.control import LsoCommand, LsoOutcome
from solver.instance import commands as do
from solver.instance import events as ev
from solver.instance.end import CANCELLED
from solver.instance.operations import sequence
from solver.instance.scripts import Script
from solver.instance.state import NO_LIMIT
from solver.planning.lso import operations as lso
from solver.scheduling.pull_room import PullBounds
from tests.queued import MODEL, OTHER, a_request, lane_of
from tests.unit.instance.driver import OURS, Driver, R

DONE, ALREADY = LsoOutcome.DONE, LsoOutcome.ALREADY
REFUSED, FAILED = LsoOutcome.REFUSED, LsoOutcome.FAILED
LANE, RESUME = lane_of().queue_name, lane_of().resume_name
EVICT = order.EvictRequest(instance_id=OURS, request_id=R, command_id="c1")
ABSENT = RequestId("absent")
EVICT_ELSEWHERE = order.EvictRequest(instance_id=InstanceId("i2"), request_id=R)
SWAP_OUT = order.LsoSwapOut(instance_id=OURS, request_id=R)
SWAP_IN = order.LsoSwapIn(instance_id=OURS, request_id=R)
CHECKPOINT = order.LsoCheckpoint(instance_id=OURS, request_id=R)
ACTIVATE = order.LsoActivate(instance_id=OURS, model=OTHER)
ACTIVATE_UNKNOWN = order.LsoActivate(instance_id=OURS, model=ModelName("gpt-99"))
PULL = order.LsoPull(instance_id=OURS, count=2)
WARM = order.LsoWarm(instance_id=OURS, model=OTHER)


def running() -> Driver:
    return Driver(a_request("r"))


def waiting() -> Driver:
    """The request waits, and has never run."""
    return Driver(a_request("first"), a_request("r"), engine={"max_running": 1})


def draining() -> Driver:
    driver = running()
    driver.give(ev.Draining())
    return driver


def outcomes(driver: Driver, *orders: LsoCommand) -> list[LsoOutcome]:
    return [driver.order(each).outcome for each in orders]


@pytest.mark.parametrize(
    ("make", "orders", "message"),
    [
        (Driver, (EVICT, SWAP_OUT, SWAP_IN, CHECKPOINT), "r is unknown to i1"),
        (waiting, (EVICT, SWAP_OUT, SWAP_IN), "waits in the window"),
        (draining, (PULL, SWAP_OUT, ACTIVATE), "drain"),
        (running, (EVICT_ELSEWHERE,), "this is instance 'i1', not 'i2'"),
        (running, (ACTIVATE_UNKNOWN,), f"'gpt-99'; it serves: {MODEL}, {OTHER}"),
        (lambda: Driver(a_request("r"), engine={"host_kv_capacity_bytes": 0}), (CHECKPOINT,),
         "keeps no KV of tiny-llama in host memory"),
        (running, (order.LsoSet(instance_id=OURS),), "nothing to set"),
    ],
    ids=["unknown", "never ran", "draining", "another instance", "model", "no host KV", "empty"],
)  # fmt: skip
def test_refusal_names_its_reason_and_changes_nothing(
    make: Callable[[], Driver], orders: Sequence[LsoCommand], message: str
):
    driver = make()
    before = (driver.running, driver.window)
    for result in map(driver.order, orders):
        assert result.outcome is REFUSED
        assert message in result.message
    assert (driver.running, driver.window) == before


@pytest.mark.parametrize(
    "operation",
    [lso.Warm(model=OTHER), lso.Cool(model=OTHER), lso.Preempt(), lso.SetScheduling(max_running=1),
     lso.Checkpoint(request_id=R), lso.Activate(model=OTHER)],
    ids=lambda operation: operation.kind,
)  # fmt: skip
def test_engine_without_the_capability_refuses(operation: lso.Lso):
    result = Driver(capabilities=frozenset()).execute(operation)
    assert result.outcome is REFUSED
    assert "the engine scripted on paper cannot" in result.message


class TestEvict:
    def test_run_is_returned_with_its_progress(self):
        driver = running()
        driver.generate("r", 2)
        result = driver.order(EVICT)
        assert (result.outcome, result.num_bytes) == (DONE, 6 * 16)
        back = driver.requeued("r")
        assert (back.queue, back.attempts.hop, back.attempts.evictions) == (RESUME, 1, 1)
        assert (back.attempts.evicted_by, back.attempts.evicted_at) == (OURS, driver.now)

    def test_every_result_is_recorded(self):
        driver = running()
        results = [driver.execute(lso.Evict(request_ids=(name,))) for name in (R, R, ABSENT)]
        assert [each.outcome for each in results] == [DONE, ALREADY, REFUSED]
        assert "evicted" in results[1].message
        assert driver.records(lso.Evict) == results

    def test_run_that_finishes_first_is_not_evicted(self):
        driver = running()
        driver.waiting = {do.Abort}
        driver.ask(EVICT)
        driver.end("r")
        assert (driver.answers[0].outcome, driver.outcome("r")) == (ALREADY, "completed")

    def test_requests_of_a_group_are_evicted_in_one_operation(self):
        names = tuple(RequestId(f"r{number}") for number in range(4))
        driver = Driver(*(a_request(name) for name in names))
        assert driver.execute(lso.Evict(request_ids=names)).outcome is DONE
        assert {driver.outcome(name) for name in names} == {"evicted"}

    def test_repeated_order_gets_the_same_answer(self):
        """The operation is not repeated, because the request may have returned meanwhile."""
        driver = running()
        driver.waiting = {do.Abort}
        assert driver.ask(EVICT) == driver.ask(EVICT) == []
        driver.release(do.Abort)
        driver.put(a_request("r", hop=1))
        again = driver.order(EVICT)
        assert driver.answers == [again] * 3
        assert (len(driver.of(do.Abort)), driver.running) == (1, {"r"})


class TestPull:
    def test_pull_also_reads_a_queue_that_seemed_empty(self):
        driver = running()
        driver.queues[LANE].extend(a_request(name) for name in "abc")
        assert driver.order(PULL).message == "2 pulled"

    def test_pull_stays_within_the_bounds(self):
        driver = Driver(bounds=PullBounds(window=1))
        driver.notice(LANE)
        driver.queues[LANE].extend(a_request(name) for name in "ab")
        assert outcomes(driver, PULL, PULL) == [DONE, REFUSED]
        assert "1 of 1 requests" in driver.answers[1].message
        assert driver.running == {"a"}

    def test_pull_with_empty_queues_is_already_done(self):
        assert outcomes(running(), PULL) == [ALREADY]


class TestEngine:
    def test_limits_change_on_a_running_engine(self):
        driver = Driver()
        fewer = order.LsoSet(instance_id=OURS, max_running=4)
        smaller = order.LsoSet(instance_id=OURS, token_budget=256)
        assert outcomes(driver, fewer, smaller, smaller) == [DONE, DONE, ALREADY]
        limits = [(each.token_budget, each.max_running) for each in driver.of(do.Limit)]
        assert limits == [(NO_LIMIT, 4), (256, 4)]
        assert driver.status.max_running == 4

    @pytest.mark.parametrize(("make", "outcome"), [(running, DONE), (Driver, ALREADY)])
    def test_preemption_reports_whether_there_was_work_to_drop(
        self, make: Callable[[], Driver], outcome: LsoOutcome
    ):
        assert outcomes(make(), order.LsoPreempt(instance_id=OURS)) == [outcome]

    def test_caches_are_cleared(self):
        driver = Driver(engine={"host_kv_bytes": 4096})
        result = driver.order(order.LsoClear(instance_id=OURS))
        assert (result.outcome, result.num_bytes) == (DONE, 4096)
        assert len(driver.of(do.DropCaches)) == 1

    def test_request_is_checkpointed_from_its_next_run_on(self):
        driver = waiting()
        assert outcomes(driver, CHECKPOINT, CHECKPOINT) == [DONE, ALREADY]
        driver.end("first")
        assert driver.runs[R].checkpointed


class TestActivate:
    def test_model_becomes_active(self):
        driver = Driver()
        assert outcomes(driver, ACTIVATE, ACTIVATE) == [DONE, ALREADY]
        assert (driver.loads, driver.answers[0].num_bytes) == ([OTHER], 2000)

    def test_failure_has_the_engines_message(self):
        driver = Driver()
        driver.failing[do.Load] = ["no memory on the device"]
        result = driver.execute(lso.Activate(model=OTHER))
        assert (result.outcome, result.message) == (FAILED, "no memory on the device")
        assert driver.status.model is None

    @pytest.mark.parametrize("in_time", [False, True])
    def test_run_that_does_not_drain_in_time_is_evicted(self, *, in_time: bool):
        driver = running()
        driver.ask(ACTIVATE)
        status = driver.status
        assert (status.model, status.activating, status.next_model) == (MODEL, OTHER, OTHER)
        driver.end("r") if in_time else driver.wait(1.0)
        assert driver.outcome("r") == ("completed" if in_time else "evicted")
        assert ("1 evicted" in driver.answers[0].message) == (not in_time)
        assert [each.outcome for each in driver.records(lso.Evict)] == [DONE] * (not in_time)
        assert driver.status.activating is None

    def test_activation_of_the_active_model_does_not_admit_during_a_swap(self):
        driver = running()
        driver.plan(OTHER)
        assert driver.order(order.LsoActivate(instance_id=OURS, model=MODEL)).ok
        driver.put(a_request("late"))
        assert (driver.running, driver.status.takes_in) == ({"r"}, False)

    @pytest.mark.parametrize("cancelled", [False, True])
    def test_request_between_two_models_is_returned_or_ends(self, *, cancelled: bool):
        driver = running()
        driver.waiting = {do.Abort}
        if cancelled:
            driver.give(ev.Cancelled(request_id=R, user="acme"))
        driver.end("r", ev.RunEnd.NOT_ACTIVE)
        if cancelled:
            assert driver.departed[R].publications == (do.Failure(error=CANCELLED),)
        else:
            assert driver.requeued("r").queue == RESUME


class TestWarm:
    def test_weights_are_loaded_into_and_removed_from_host_memory(self):
        driver = Driver()
        assert outcomes(driver, WARM, WARM) == [DONE, ALREADY]
        assert (driver.answers[0].num_bytes, driver.warm) == (2000, {OTHER})
        results = [driver.execute(lso.Cool(model=name)) for name in (OTHER, OTHER, MODEL)]
        assert [each.outcome for each in results] == [DONE, ALREADY, REFUSED]
        assert driver.warm == set()

    @pytest.mark.parametrize(("harmless", "outcome"), [(True, REFUSED), (False, FAILED)])
    def test_failure_has_the_engines_message(self, outcome: LsoOutcome, *, harmless: bool):
        driver = Driver()
        driver.failing[do.LoadWarm], driver.harmless = ["no room"], harmless
        result = driver.order(WARM)
        assert (result.outcome, result.message) == (outcome, "no room")


class TestOrder:
    def test_operations_run_one_after_another(self):
        """The eviction runs before the activation, which then finds no request to evict."""
        driver = running()
        driver.waiting = {do.Abort}
        assert driver.ask(EVICT) == driver.ask(ACTIVATE) == []
        assert driver.loads == []
        driver.release(do.Abort)
        evicted, activated = driver.answers
        assert (evicted.outcome, activated.outcome) == (DONE, DONE)
        assert "evicted" not in activated.message

    def test_loading_of_weights_does_not_delay_operations_on_runs(self):
        driver = running()
        driver.waiting = {do.LoadWarm}
        assert driver.ask(WARM) == []
        assert outcomes(driver, EVICT) == [DONE]
        driver.release(do.LoadWarm)
        assert "warm in" in driver.answers[-1].message

    def test_failure_ends_its_sequence(self):
        driver = running()
        driver.failing[do.Load] = ["no"]

        def both() -> Script:
            yield from sequence(driver.instance, lso.Activate(model=OTHER), lso.Preempt())

        driver.instance.scripts.start(both())
        driver.look()
        assert driver.records(lso.Activate)[1].outcome is FAILED
        assert driver.records(lso.Preempt) == []
