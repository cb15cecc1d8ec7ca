"""Layer-wise preemption in the simulated engine: same behaviour and cost as in vLLM."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ops.engine_runs import generate
from ops.sim.virtual_time import LoopClock
from services.agent.backends.base import EngineRequest
from services.agent.backends.settings import SimulatedSettings
from services.agent.backends.simulated.backend import SimulatedEngine
from services.agent.backends.simulated.core import SimulatedEngineCore
from services.agent.backends.simulated.safepoints import Passage
from shared.contracts.base import ModelName, RequestId
from shared.contracts.errors import UnsupportedError
from shared.contracts.estimates import LatencyCoefficients
from shared.contracts.models import ModelEntry
from shared.contracts.qos import Slo
from shared.contracts.requests import Sampling
from shared.contracts.telemetry import Capability
from solver.scheduling.baselines import FixedChunkFcfs

pytestmark = pytest.mark.virtual_time

ENTRY = ModelEntry(name=ModelName("m"), path="", architecture="", max_model_len=1024)
CHAT = Slo(ttft_s=20.0, tbt_s=1.0)
SLOW = LatencyCoefficients(constant_s=0.0, linear_s=0.001)
"""A token takes 1 ms: an iteration of 400 tokens has eight safepoints, 50 ms apart."""
STEADY = LatencyCoefficients(constant_s=0.2, linear_s=1e-4)
"""Every iteration takes 200 ms."""


def request(name: str, length: int = 32, max_tokens: int = 8, **fields: Any) -> EngineRequest:
    first = 10 + sum(name.encode()) % 100
    return EngineRequest(
        request_id=RequestId(name),
        model=ENTRY.name,
        prompt=tuple(range(first, first + length)),
        sampling=Sampling(max_tokens=max_tokens, temperature=0, ignore_eos=True),
        **fields,
    )


def core_of(**fields: Any) -> SimulatedEngineCore:
    settings = SimulatedSettings(**({"kv_capacity_tokens": 4096, "token_budget": 64} | fields))
    return SimulatedEngineCore(ENTRY, settings, FixedChunkFcfs(settings.token_budget))


def answers_of(core: SimulatedEngineCore, cuts: list[bool]) -> tuple[dict[str, list[int]], int]:
    """Every request's tokens, and the number of computed tokens; *cuts* selects cut iterations."""
    answers: dict[str, list[int]] = {}
    computed = 0
    while core.num_running + core.num_waiting:
        begun = core.begin(0.0)
        if cuts and cuts.pop():
            begun.drop_offline()
        result = core.finish(begun)
        computed += 0 if result.iteration is None else result.iteration.compute_tokens
        for output in result.outputs:
            answers.setdefault(output.request_id, []).extend(output.token_ids)
    return answers, computed


@given(st.lists(st.booleans(), max_size=40))
def test_cuts_change_no_answer_and_no_token_counts_twice(cuts: list[bool]) -> None:
    found = []
    for each in ([], cuts):
        core = core_of()
        for name, length, slo in (("batch", 300, Slo()), ("chat", 90, CHAT), ("other", 70, Slo())):
            core.add(request(name, length, slo=slo))
        found.append(answers_of(core, list(each)))

    assert found[0] == found[1]


def test_online_requests_get_their_token_in_a_cut_iteration() -> None:
    core = core_of()
    core.add(request("chat", 16, slo=CHAT))
    core.iterate(0.0)
    core.add(request("batch", 48))
    begun = core.begin(0.0)
    dropped = begun.drop_offline()
    result = core.finish(begun)

    assert dropped == 48
    assert [output.request_id for output in result.outputs] == ["chat"]
    assert result.iteration is not None
    assert (result.iteration.compute_tokens, result.iteration.num_decodes) == (1, 1)


def test_request_aborted_during_its_iteration_gets_no_token() -> None:
    core = core_of()
    core.add(request("chat", 16, slo=CHAT))
    core.add(request("gone", 16, slo=CHAT))
    begun = core.begin(0.0)
    core.abort(RequestId("gone"))
    result = core.finish(begun)

    assert [output.request_id for output in result.outputs] == ["chat"]
    assert core.num_running == 1


class TestPassage:
    async def passed_s(self, passage: Passage, at_s: float | None) -> float:
        """
        Time of an iteration of 399 best-effort tokens and a decode, cut at *at_s*.

        Args:
            passage: Passage that executes the iteration.
            at_s: Time from the iteration's begin to the demand; None means no cut.
        """
        core = core_of(token_budget=400, latency=SLOW)
        core.add(request("chat", 16, slo=CHAT))
        core.iterate(0.0)
        core.add(request("batch", 399))
        loop = asyncio.get_running_loop()
        begun_at = loop.time()

        if at_s is not None:
            loop.call_at(begun_at + at_s, passage.preempt)
        return await passage.spend(core.begin(0.0), begun_at) - begun_at

    async def test_cut_waits_for_a_safepoint_and_recomputes_the_rest(self) -> None:
        """A demand after 20 ms cuts at the safepoint after 50 ms; the decode adds 1 ms."""
        passage = Passage(SimulatedSettings(latency=SLOW))

        assert await self.passed_s(passage, 0.02) == pytest.approx(0.051)
        assert (passage.totals.layer_preemptions, passage.totals.dropped_tokens) == (1, 399)
        assert passage.totals.yield_s > 0

    async def test_iteration_without_a_cut_takes_its_full_time(self) -> None:
        passage = Passage(SimulatedSettings(latency=SLOW, time_scale=0.5))

        assert await self.passed_s(passage, None) == pytest.approx(0.2)
        assert passage.totals.layer_preemptions == 0

    async def test_demand_after_the_last_safepoint_has_no_effect(self) -> None:
        passage = Passage(SimulatedSettings(latency=SLOW, safepoint_layers=16, time_scale=0.2))

        assert await self.passed_s(passage, 0.05) == pytest.approx(0.08)
        assert passage.totals.layer_preemptions == 0


class TestBackend:
    @pytest.fixture
    async def engine(self) -> AsyncIterator[SimulatedEngine]:
        settings = SimulatedSettings(
            latency=STEADY, token_budget=384, cold_activation_s=0.0, kv_capacity_tokens=8192
        )
        engine = SimulatedEngine([ENTRY], settings, LoopClock())
        await engine.start()
        await engine.activate(ENTRY.name)
        yield engine
        await engine.close()

    async def answer(self, engine: SimulatedEngine, asked: EngineRequest) -> list[int]:
        return [token async for output in generate(engine, asked) for token in output.token_ids]

    async def test_operator_can_cut_the_running_iteration(self, engine: SimulatedEngine) -> None:
        assert Capability.LAYER_PREEMPTION in engine.identity.capabilities
        assert await engine.preempt_now() is False
        before = engine.snapshot().scheduling
        batch = asyncio.create_task(self.answer(engine, request("batch", 300, 2)))
        await asyncio.sleep(0.001)
        assert await engine.preempt_now() is True
        cut = await batch
        whole = await self.answer(engine, request("batch", 300, 2))
        after = engine.snapshot().scheduling

        assert cut == whole
        assert after.layer_preemptions - before.layer_preemptions == 1
        assert after.dropped_tokens - before.dropped_tokens == 300
        assert sum(each.compute_tokens for each in engine.drain_iterations()) == 301 + 13

    @pytest.mark.parametrize(("ttft_s", "cuts"), [(0.3, 1), (20.0, 0)])
    async def test_only_a_request_that_would_be_late_cuts(
        self, engine: SimulatedEngine, ttft_s: float, cuts: int
    ) -> None:
        """When the chat arrives, 138 ms of the batch's iteration of 238 ms remain."""
        slo, now = Slo(ttft_s=ttft_s, tbt_s=1.0), LoopClock().now()
        batch = asyncio.create_task(self.answer(engine, request("batch", 384, 1)))
        await asyncio.sleep(0.1)
        await self.answer(engine, request("chat", 20, 1, slo=slo, arrived_at=now + 0.1))
        await batch

        assert engine.snapshot().scheduling.layer_preemptions == cuts

    @pytest.mark.parametrize("fields", [{"safepoint_layers": 0}, {"policy": "fcfs"}])
    async def test_engine_without_safepoints_refuses_preemption(
        self, fields: dict[str, Any]
    ) -> None:
        engine = SimulatedEngine([ENTRY], SimulatedSettings(**fields), LoopClock())

        assert Capability.LAYER_PREEMPTION not in engine.identity.capabilities
        with pytest.raises(UnsupportedError):
            await engine.preempt_now()
