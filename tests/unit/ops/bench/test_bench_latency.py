"""The latency benchmark: its training data and its judgement."""

import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import numpy as np
import pytest

from ops.bench import latency_model, latency_vllm
from ops.bench.engine_arms import OURS
from ops.bench.engine_load import Served, planned_load, serve
from ops.bench.latency_steps import disturbed, simulated_steps
from ops.bench.latency_vllm import Measured, scheduled_s
from ops.bench.result import Result
from ops.sim.profiles import load
from services.agent.backends.base import NewOutput, RunEnded
from services.agent.backends.settings import SimulatedSettings
from services.agent.backends.simulated.backend import SimulatedEngine
from shared.contracts.models import ModelEntry
from shared.contracts.telemetry import EngineIteration
from shared.runtime.clock import SystemClock


def test_simulated_steps_have_noise_and_exact_times():
    steps = simulated_steps(load("28"), "A100-80GB", seed=0, duration_s=40.0)
    ratios = np.array([each.iteration.duration_s / each.exact_s for each in steps])
    chunks = [
        (each.chunk[0], each.iteration.compute_tokens - each.iteration.num_decodes)
        for each in steps
        if each.chunk is not None
    ]

    assert len(steps) > 500
    assert 0.08 < np.std(np.log(ratios)) < 0.12
    assert len(chunks) > 20
    assert all(tokens == without_decodes for tokens, without_decodes in chunks)


def test_equal_seeds_give_equal_steps():
    first, again, other = (
        simulated_steps(load("h100"), "H100-80GB", seed=seed, duration_s=2.0) for seed in (0, 0, 1)
    )
    assert first == again != other


def test_a_fifth_of_the_iterations_is_disturbed_only_in_time():
    steps = [
        EngineIteration(
            compute_tokens=n, context_tokens=7, num_decodes=1, duration_s=0.01, prefill_pairs=1.0
        )
        for n in range(1, 1001)
    ]
    after = disturbed(steps, share=0.2, seed=3)

    assert [each.compute_tokens for each in after] == [each.compute_tokens for each in steps]
    assert 0.17 < np.mean([each.duration_s > 0.01 for each in after]) < 0.23
    assert all(each.duration_s == 0.01 or each.duration_s > 0.0199 for each in after)


def test_a_profile_is_judged_on_held_out_iterations():
    result = Result(name="latency_model", seed=0, quick=True)
    wrong = latency_model._simulated(result, "2x", 0, duration_s=30.0)
    counts = result.figures["a100-llama3-8b-2x: iterations"]

    assert counts["known"] / (counts["known"] + counts["judged"]) == pytest.approx(0.6, abs=0.01)
    assert len(wrong) == result.figures["a100-llama3-8b-2x: chunks of forest"]["judged"] > 10
    assert [line.bound for line in result.lines] == [0.04, 0.05]
    assert 0 < result.figures["a100-llama3-8b-2x: terms"]["median"] == result.lines[0].value


def test_without_vllm_its_lines_are_not_measured():
    result = Result(name="latency_model", seed=0, quick=True)
    latency_model._on_vllm(result, [], 0)

    assert [line.holds for line in result.lines] == [None, None]
    assert result.figures == {}


def measured_steps(count: int) -> list[EngineIteration]:
    random = np.random.default_rng(0)
    steps = []
    for number in range(count):
        chunk = int(random.integers(32, 1500)) if number % 2 else 0
        duration_s = (0.005 + 4e-5 * (8 + chunk)) * float(random.lognormal(0.0, 0.02))
        steps.append(
            EngineIteration(
                compute_tokens=8 + chunk,
                context_tokens=0,
                num_decodes=8,
                duration_s=duration_s,
                prefill_pairs=chunk * chunk / 2,
            )
        )
    return steps


def test_measured_steps_are_judged_by_their_own_times():
    result = Result(name="latency_model", seed=0, quick=True)
    latency_model._on_vllm(result, [Measured(measured_steps(1000), 0.01)], 0)

    assert [line.holds for line in result.lines] == [True, True]
    assert 0.01 < result.figures["vLLM, load 1: terms"]["median"] < 0.03
    assert result.figures["vLLM, load 1: chunks of terms"]["median"] < 0.05
    assert result.figures["vLLM, load 1: chunks of forest"]["judged"] == 200


def test_bounds_apply_to_the_load_with_the_median_error():
    other = measured_steps(1000)
    # One engine becomes three times as slow after training; the two other engines do not.
    slowed = [
        msgspec.structs.replace(each, duration_s=each.duration_s * (3 if number > 600 else 1))
        for number, each in enumerate(other)
    ]
    result = Result(name="latency_model", seed=0, quick=True)
    loads = [Measured(steps, 0.01) for steps in (other, slowed, other)]
    latency_model._on_vllm(result, loads, 0)

    assert result.figures["vLLM, load 2: terms"]["median"] > 0.5
    assert [line.holds for line in result.lines] == [True, True]


def test_an_engine_that_waited_for_a_cpu_is_reported_and_not_judged(
    capfd: pytest.CaptureFixture[str],
):
    result = Result(name="latency_model", seed=0, quick=True)
    latency_model._on_vllm(result, [Measured(measured_steps(1000), 0.4)], 0)

    assert [line.holds for line in result.lines] == [None, None]
    assert result.figures["vLLM, load 1: engine waited for a CPU, share"] == 0.4
    assert "vLLM, load 1: terms" in result.figures
    assert "waited 40% of the time for a CPU" in capfd.readouterr().err


def test_too_few_measured_steps_are_not_judged(capfd: pytest.CaptureFixture[str]):
    result = Result(name="latency_model", seed=0, quick=True)
    latency_model._on_vllm(result, [Measured(measured_steps(120), 0.0)], 0)

    assert [line.holds for line in result.lines] == [None, None]
    assert "120 iterations are too few" in capfd.readouterr().err


def test_the_cpu_time_of_a_process_group_is_read():
    """The test uses a separate process group: ends of other processes would reduce the sum."""
    code = (
        "import sys; print(flush=True)\n"
        "for _ in sys.stdin:\n"
        "    sum(range(3_000_000)); print(flush=True)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdout.readline()
        before_s, _ = scheduled_s(child.pid)
        print(file=child.stdin, flush=True)
        child.stdout.readline()
        ran_s, waited_s = scheduled_s(child.pid)
        child.stdin.close()

    assert ran_s > before_s > 0
    assert waited_s >= 0
    assert scheduled_s(-1) == (0.0, 0.0)


async def test_steps_of_an_engine_match_the_load(monkeypatch: pytest.MonkeyPatch):
    """The simulated engine replaces vLLM and may finish the load."""
    cached: list[int] = []
    served: list[list[Served]] = []

    class Engine(SimulatedEngine):
        host_pid = -1

        def _report(self, events: Sequence[NewOutput | RunEnded]) -> None:
            for event in events:
                if isinstance(event, NewOutput):
                    cached[-1] += event.output.cached_tokens
            super()._report(events)

    async def patient(*args: Any) -> list[Served]:
        cached.append(0)
        served.append(await serve(*args, patience_s=60.0))
        return served[-1]

    async def alone_rps(*_: object) -> float:
        return 100.0

    @asynccontextmanager
    async def engines(*_: object) -> AsyncIterator[Engine]:
        entry = ModelEntry(name=OURS, path="", architecture="none", max_model_len=4096)
        settings = SimulatedSettings(time_scale=0.01, token_budget=2048, cold_activation_s=0.0)
        engine = Engine([entry], settings, SystemClock())
        await engine.start()
        yield engine
        await engine.close()

    monkeypatch.setattr(latency_vllm, "engines", engines)
    monkeypatch.setattr(latency_vllm, "serve", patient)
    monkeypatch.setattr(latency_vllm, "_alone_rps", alone_rps)
    loads = await latency_vllm.vllm_steps(seed=0, loads=2, duration_s=0.3)

    assert len(loads) == 2
    for number, measured in enumerate(loads):
        rate_rps = latency_vllm.UTILIZATION * 100.0
        planned = planned_load(seed=number, rate_rps=rate_rps, duration_s=0.3)
        assert [each.planned for each in served[number]] == planned
        assert all(each.finished for each in served[number])
        # The last token of an answer is never an input.
        computed = sum(len(each.prompt) + each.output_tokens - 1 for each in planned)
        assert sum(each.compute_tokens for each in measured.iterations) == (
            computed - cached[number]
        )
        assert any(each.compute_tokens > each.num_decodes > 0 for each in measured.iterations)
        assert measured.waiting_share == 0.0
