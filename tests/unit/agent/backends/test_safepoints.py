"""Layer-wise preemption in vLLM, without vLLM: demands in shared memory, and who makes them."""

import struct
from pathlib import Path

import pytest

from services.agent.backends.base import EngineRequest
from services.agent.backends.vllm import monitor, safepoints
from services.agent.backends.vllm.monitor import ArrivalMonitor
from services.agent.backends.vllm.safepoints import SafepointCore, Wish, demand_of, is_awaited
from shared.contracts.base import ModelName, RequestId
from shared.contracts.estimates import LatencyCoefficients
from shared.contracts.qos import Slo
from shared.contracts.requests import Sampling
from solver.scheduling.layer_preemption import RunningIteration

LATENCY = LatencyCoefficients(constant_s=0.0, linear_s=0.001)
"""A token takes a millisecond."""


class Clock:
    """In place of the module `time`: stands still unless it is moved."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return 1e9 + self.now


class Engine:
    """Both sides of one engine's file."""

    def __init__(self, directory: Path, clock: Clock) -> None:
        self.clock = clock
        self.monitor = ArrivalMonitor(directory / "1.safepoints")
        self.core = SafepointCore(directory / "1.safepoints")
        self.core.learn(LATENCY)

    def begin(self, number: int, *, offline_tokens: int = 1000) -> None:
        """An iteration of a second."""
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
        self.monitor.arrived(request)
        return request


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Engine:
    clock = Clock()
    for module in (monitor, safepoints):
        monkeypatch.setattr(module, "time", clock)
    return Engine(tmp_path, clock)


class TestDemands:
    def test_a_demand_is_for_the_running_iteration(self, engine: Engine) -> None:
        engine.begin(1)

        assert engine.monitor.preempt()
        assert engine.core.is_wanted(1)

    def test_a_demand_that_comes_late_means_nothing_to_the_next(self, engine: Engine) -> None:
        engine.begin(1)
        engine.monitor.preempt()
        engine.core.hide()
        engine.begin(2)

        assert not engine.core.is_wanted(2)

    def test_between_iterations_there_is_nothing_to_cut(self, engine: Engine) -> None:
        assert not engine.monitor.preempt()
        engine.begin(1)
        engine.core.hide()

        assert not engine.monitor.preempt()
        assert not engine.core.is_wanted(1)

    def test_two_demands_cut_once_and_the_first_one_counts(self, engine: Engine) -> None:
        engine.begin(1)
        engine.monitor.preempt()
        engine.clock.now += 0.01
        engine.monitor.preempt()
        engine.clock.now += 0.02
        engine.core.cut(1, 1000)
        engine.core.hide()
        totals = engine.monitor.totals()

        assert (totals.cuts, totals.dropped_tokens) == (1, 1000)
        assert totals.yield_s == pytest.approx(0.03)
        assert engine.monitor.yields_s() == [pytest.approx(totals.yield_s)]
        assert engine.monitor.yields_s(since=1) == []

    def test_an_iteration_without_offline_work_is_not_cut(self, engine: Engine) -> None:
        engine.begin(1, offline_tokens=0)
        engine.arrive(ttft_s=0.5)

        assert not engine.monitor.preempt()
        assert not engine.core.is_wanted(1)

    def test_a_cut_for_a_request_on_its_way_is_no_yield(self, engine: Engine) -> None:
        """Nothing had been computed; its tokens are dropped all the same."""
        engine.begin(1)
        engine.core.cut(1, 1000)

        assert (engine.monitor.totals().cuts, engine.monitor.totals().dropped_tokens) == (0, 1000)
        assert engine.core.cut_at(1) is not None
        assert engine.core.cut_at(2) is None

    def test_an_iteration_that_is_being_shown_is_not_seen(self, engine: Engine) -> None:
        """The next has begun to be written over the one that is read."""
        engine.begin(1)
        engine.core.put(struct.Struct("<Q"), 8, 2)

        assert not engine.monitor.preempt()


class TestArrivals:
    """A second is left of the iteration, the prompt takes a tenth."""

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
    def test_who_cuts(self, engine: Engine, slo: dict[str, float], *, cuts: bool) -> None:
        engine.begin(1)
        engine.arrive(**slo)

        assert engine.core.is_wanted(1) is cuts

    def test_online_prefills_before_it_count(self, engine: Engine) -> None:
        first = engine.arrive("first", prompt=1000, ttft_s=9.0)
        engine.begin(1)
        engine.arrive("second", ttft_s=1.5)
        assert engine.core.is_wanted(1)

        engine.monitor.answered(first.request_id)
        engine.monitor.answered(RequestId("second"))
        engine.begin(2)
        engine.arrive("third", ttft_s=1.5)
        assert not engine.core.is_wanted(2)

    def test_the_core_knows_who_is_on_its_way(self, engine: Engine) -> None:
        engine.arrive("r", ttft_s=0.5)
        wish = engine.core.wish()

        assert wish.demand == demand_of("r")
        assert wish.deadline_at - wish.announced_at == pytest.approx(0.5)
        assert (wish.online_s, wish.prefill_s) == (pytest.approx(0.1), pytest.approx(0.1))


class TestTransit:
    """An iteration of a second begins; a request was announced that is due in half of one."""

    ITERATION = RunningIteration(began_at=100.0, predicted_s=1.0, offline_tokens=9)
    WISH = Wish(99.95, demand_of("r"), 100.5, 0.1, 0.1)

    def test_it_is_cut_for_who_is_on_the_way(self) -> None:
        assert is_awaited(self.WISH, self.ITERATION, arrived=(), now=100.0)

    def test_not_once_the_request_has_come(self) -> None:
        arrived = (demand_of("r"), demand_of("s"))

        assert not is_awaited(self.WISH, self.ITERATION, arrived=arrived, now=100.0)

    def test_not_for_who_must_have_been_lost(self) -> None:
        lost = self.WISH._replace(announced_at=99.0)

        assert not is_awaited(lost, self.ITERATION, arrived=(), now=100.0)

    def test_not_for_who_has_time(self) -> None:
        patient = self.WISH._replace(deadline_at=102.0)

        assert not is_awaited(patient, self.ITERATION, arrived=(), now=100.0)
