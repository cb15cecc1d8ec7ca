"""Policies by name, and the `qoserve` policy on the simulated engine."""

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from services.agent.backends.base import EngineRequest
from services.agent.backends.policies import (
    PolicyName,
    SchedulingSettings,
    create_policy,
    free_tokens,
)
from services.agent.backends.settings import EngineSettings, SimulatedSettings
from services.agent.backends.simulated.core import SimulatedEngineCore
from shared.contracts.base import ModelName, RequestId
from shared.contracts.models import ModelEntry
from shared.contracts.qos import Slo
from shared.contracts.requests import Sampling
from solver.scheduling.baselines import FixedChunkEdf, FixedChunkFcfs, FixedChunkSrpf
from solver.scheduling.engine.latency import LatencyTable
from solver.scheduling.engine.options import DEFAULT
from solver.scheduling.engine.qoserve import QoServePolicy

ENTRY = ModelEntry(name=ModelName("m"), path="", architecture="", max_model_len=1024)
SOON, LATE = Slo(ttft_s=5.0, tbt_s=1.0), Slo(ttft_s=0.001)


def core_of(**fields: Any) -> SimulatedEngineCore:
    settings = SimulatedSettings(**({"kv_capacity_tokens": 1024, "token_budget": 64} | fields))
    table = LatencyTable.from_coefficients(settings.latency, max_tokens=settings.token_budget)
    return SimulatedEngineCore(
        ENTRY, settings, create_policy(settings.policy, table, settings.scheduling)
    )


def request(name: str, length: int, slo: Slo = Slo(), max_tokens: int = 4) -> EngineRequest:  # noqa: B008 - frozen
    first = 10 + sum(name.encode()) % 300
    return EngineRequest(
        request_id=RequestId(name),
        model=ENTRY.name,
        prompt=tuple(range(first, first + length)),
        sampling=Sampling(max_tokens=max_tokens, temperature=0, ignore_eos=True),
        slo=slo,
        arrived_at=100.0,
    )


def serve(core: SimulatedEngineCore, now: float = 100.0) -> list[str]:
    """Requests in the order in which they end."""
    ended: list[str] = []
    for _ in range(1000):
        if not core.num_running + core.num_waiting:
            return ended
        result = core.iterate(now)
        now += result.duration_s
        ended += [out.request_id for out in result.outputs if out.finish_reason is not None]
    raise AssertionError(
        f"requests did not end: {core.num_running} running, {core.num_waiting} waiting"
    )


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("fcfs", FixedChunkFcfs),
        ("edf", FixedChunkEdf),
        ("srpf", FixedChunkSrpf),
        ("qoserve", QoServePolicy),
    ],
)
def test_each_policy_name_creates_a_policy(name: PolicyName, kind: type) -> None:
    table = LatencyTable(tokens_s=(0.0, 1.0))

    assert type(create_policy(name, table, SchedulingSettings())) is kind


def test_qoserve_is_the_default_of_both_backends() -> None:
    settings = EngineSettings()

    assert (settings.simulated.policy, settings.vllm.policy) == ("qoserve", "qoserve")
    # The simulator's default lets hours of traffic pass before late work gets a share.
    assert settings.vllm.scheduling.options() == replace(DEFAULT, aging_bound_s=600)


def test_scheduling_settings_map_to_policy_options() -> None:
    settings = msgspec.convert(
        {
            "max_chunk_tokens": 512,
            "latency_margin": 0.2,
            "iteration_limit_s": 0.05,
            "low_work_weight_s_per_token": 0,
            "aging_bound_s": 60,
        },
        SchedulingSettings,
    )

    assert settings.options() == replace(
        DEFAULT,
        max_chunk_tokens=512,
        latency_margin=0.2,
        iteration_limit_s=0.05,
        low_work_weight_s_per_token=0,
        aging_bound_s=60,
    )


@pytest.mark.parametrize(
    "fields",
    [
        {"max_chunk_tokens": 0},
        {"latency_margin": 1.0},
        {"iteration_limit_s": 0},
        {"low_work_weight_s_per_token": 1.0},
        {"chunk": 1},
    ],
)
def test_contradictory_settings_are_refused(fields: dict[str, float]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(fields, SchedulingSettings)


@pytest.mark.parametrize(("blocks", "block_tokens"), [(10, 16), (10, 32), (3, 128), (0, 128)])
def test_prompt_that_fits_by_token_count_fits_in_blocks(blocks: int, block_tokens: int) -> None:
    free = free_tokens(blocks, block_tokens)
    fitting = [n for n in range(1, blocks * block_tokens + 1) if n + 16 <= free]

    assert all(-(-n // block_tokens) <= blocks for n in fitting)


def test_urgent_request_overtakes_a_begun_prefill() -> None:
    core = core_of()
    core.add(request("long", 600))
    core.iterate(100.0)
    core.add(request("urgent", 200, SOON))

    assert serve(core) == ["urgent", "long"]
    assert core.totals.held > 0
    assert core.totals.preempted == 0


def test_half_prefilled_request_yields_memory_to_an_urgent_one() -> None:
    core = core_of()
    core.add(request("long", 700))
    core.iterate(100.0)
    core.add(request("urgent", 600, SOON))

    assert serve(core) == ["urgent", "long"]
    assert core.totals.preempted == 1
    assert core.kv_utilization == 0.0


def test_request_that_is_already_late_is_relegated_and_served() -> None:
    core = core_of()
    core.add(request("late", 200, LATE))
    core.add(request("in time", 200, SOON))

    assert serve(core) == ["in time", "late"]
    assert core.totals.relegated == 1


@pytest.mark.parametrize("block_tokens", [16, 32, 128])
def test_prompt_that_fills_the_memory_is_served(block_tokens: int) -> None:
    core = core_of(block_tokens=block_tokens)
    core.add(request("large", 1020))

    assert serve(core) == ["large"]


def test_chunk_follows_limits_lowered_at_run_time() -> None:
    core = core_of()
    core.add(request("long", 500))
    core.limit(token_budget=32, max_running=4)
    result = core.iterate(100.0)

    assert result.iteration is not None
    assert (result.iteration.compute_tokens, core.last_budget_tokens) == (32, 32)


def test_aborted_held_and_waiting_requests_leave_no_state() -> None:
    core = core_of()
    core.add(request("long", 600))
    core.iterate(100.0)
    core.add(request("late", 200, LATE))
    core.add(request("urgent", 200, SOON))
    core.iterate(100.0)
    assert core.totals.held == 1
    for name in ("long", "late", "urgent"):
        core.abort(RequestId(name))

    assert (core.num_running, core.num_waiting, core.kv_utilization) == (0, 0, 0.0)
    core.add(request("next", 1000))
    assert serve(core) == ["next"]
