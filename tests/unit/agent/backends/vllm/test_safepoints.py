"""Layer-wise preemption in vLLM, without vLLM: demands in shared memory, and their senders."""

from pathlib import Path

import pytest

from services.agent.backends.base import EngineRequest
from services.agent.backends.vllm.front import monitor
from services.agent.backends.vllm.front.monitor import ArrivalMonitor
from services.agent.backends.vllm.shared import safepoints
from services.agent.backends.vllm.shared.safepoints import (
    SafepointCore,
    Wish,
    demand_of,
    is_awaited,
)
from shared.contracts.base import ModelName, RequestId
from shared.contracts.estimates import LatencyCoefficients
from shared.contracts.qos import Slo
from shared.contracts.requests import Sampling
from solver.scheduling.engine.layer_preemption import RunningIteration

LATENCY = LatencyCoefficients(constant_s=0.0, linear_s=0.001)
"""A token takes a millisecond."""


class Clock:
    """Replaces the module `time` by a clock that only tests advance."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return 1e9 + self.now


class Engine:
    """The agent's and the engine core's side of one engine's shared file."""

    def __init__(self, directory: Path, clock: Clock) -> None:
        self.clock = clock
        self.monitor = ArrivalMonitor(directory / "1.safepoints")
        self.core = SafepointCore(directory / "1.safepoints")
        self.core.learn(LATENCY)

    def begin(self, number: int, *, offline_tokens: int = 1000) -> None:
        """Begin an iteration of one second."""
        self.core.show(
            number,
            RunningIteration(
                began_at=self.clock.monotonic(), predicted_s=1.0, offline_tokens=offline_tokens
            ),
        )

    def arrive(self, name: str = "r", *, prompt: int = 100, **slo: float) -> EngineRequest:
        request = EngineRequest(
            request_id=RequestId(name),
            model=ModelName("m"),
            prompt=(1,) * prompt,
            sampling=Sampling(max_tokens=4),
            slo=Slo(**slo),
            arrived_at=self.clock.time(),
        )
        self.monitor.arrived(request, request.request_id, len(request.prompt))
        return request


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Engine:
    clock = Clock()
    for module in (monitor, safepoints):
        monkeypatch.setattr(module, "time", clock)
    return Engine(tmp_path, clock)


class TestDemands:
    def test_demand_applies_to_the_running_iteration(self, engine: Engine) -> None:
        engine.begin(1)

        assert engine.monitor.preempt()
        assert engine.core.is_wanted(1)

    def test_late_demand_does_not_affect_the_next_iteration(self, engine: Engine) -> None:
        engine.begin(1)
        engine.monitor.preempt()
        engine.core.hide()
        engine.begin(2)

        assert not engine.core.is_wanted(2)

    def test_no_work_can_be_cut_between_iterations(self, engine: Engine) -> None:
        assert not engine.monitor.preempt()
        engine.begin(1)
        engine.core.hide()

        assert not engine.monitor.preempt()
        assert not engine.core.is_wanted(1)

    def test_two_demands_cut_once_and_the_first_is_timed(self, engine: Engine) -> None:
        engine.begin(1)
        engine.monitor.preempt()
        engine.clock.now += 0.01
        engine.monitor.preempt()
        engine.clock.now += 0.02
        engine.core.cut(1, 1000)
        engine.core.hide()
        totals = engine.monitor.totals()

        assert (totals.layer_preemptions, totals.dropped_tokens) == (1, 1000)
        assert totals.yield_s == pytest.approx(0.03)

    def test_iteration_without_best_effort_work_is_not_cut(self, engine: Engine) -> None:
        engine.begin(1, offline_tokens=0)
        engine.arrive(ttft_s=0.5)

        assert not engine.monitor.preempt()
        assert not engine.core.is_wanted(1)

    def test_cut_for_an_announced_request_is_not_counted_as_yield(self, engine: Engine) -> None:
        """All tokens of an iteration that is preempted before its first layer count as dropped."""
        engine.begin(1)
        engine.core.cut(1, 1000)

        totals = engine.monitor.totals()
        assert (totals.layer_preemptions, totals.dropped_tokens) == (0, 1000)
        assert engine.core.cut_at(1) is not None
        assert engine.core.cut_at(2) is None

    def test_iteration_being_written_is_not_visible(self, engine: Engine) -> None:
        """The core is overwriting the record that the monitor reads."""
        engine.begin(1)
        engine.core.record["begun"] = 2

        assert not engine.monitor.preempt()


class TestArrivals:
    """Arrivals when the iteration has one second left; the prompt takes 0.1 s."""

    @pytest.mark.parametrize(
        ("slo", "cuts"),
        [
            ({"ttft_s": 0.5}, True),
            ({"ttft_s": 5.0}, False),
            ({"ttlt_s": 0.5}, True),
            ({}, False),
            ({"ttft_s": 0.05}, False),
        ],
        ids=["late", "in time", "whole answer late", "best effort", "late in any case"],
    )
    def test_only_requests_that_a_cut_can_save_demand_a_cut(
        self, engine: Engine, slo: dict[str, float], *, cuts: bool
    ) -> None:
        engine.begin(1)
        engine.arrive(**slo)

        assert engine.core.is_wanted(1) is cuts

    def test_earlier_online_prefills_count(self, engine: Engine) -> None:
        first = engine.arrive("first", prompt=1000, ttft_s=9.0)
        engine.begin(1)
        engine.arrive("second", ttft_s=1.5)
        assert engine.core.is_wanted(1)

        engine.monitor.answered(first.request_id)
        engine.monitor.answered(RequestId("second"))
        engine.begin(2)
        engine.arrive("third", ttft_s=1.5)
        assert not engine.core.is_wanted(2)

    def test_core_knows_the_announced_request(self, engine: Engine) -> None:
        engine.arrive("r", ttft_s=0.5)
        wish = engine.core.wish()

        assert wish.demand == demand_of("r")
        assert wish.deadline_at - wish.announced_at == pytest.approx(0.5)
        assert (wish.online_s, wish.prefill_s) == (pytest.approx(0.1), pytest.approx(0.1))


class TestTransit:
    """An iteration of 1 s begins after the announcement of a request that is due in 0.5 s."""

    ITERATION = RunningIteration(began_at=100.0, predicted_s=1.0, offline_tokens=9)
    WISH = Wish(99.95, demand_of("r"), 100.5, 0.1, 0.1)

    def test_iteration_is_cut_for_an_announced_request(self) -> None:
        assert is_awaited(self.WISH, self.ITERATION, arrived=(), now=100.0)

    def test_no_cut_once_the_request_has_arrived(self) -> None:
        arrived = (demand_of("r"), demand_of("s"))

        assert not is_awaited(self.WISH, self.ITERATION, arrived=arrived, now=100.0)

    def test_no_cut_for_a_request_that_must_be_lost(self) -> None:
        lost = self.WISH._replace(announced_at=99.0)

        assert not is_awaited(lost, self.ITERATION, arrived=(), now=100.0)

    def test_no_cut_for_a_request_with_enough_time(self) -> None:
        patient = self.WISH._replace(deadline_at=102.0)

        assert not is_awaited(patient, self.ITERATION, arrived=(), now=100.0)
