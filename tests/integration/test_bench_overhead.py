"""The overhead bench gives equal work to both arms, counts all CPU time, and reports all rounds."""

import os
import random
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from ops.bench.chat import Chat, chat
from ops.bench.cores import computed_s
from ops.bench.one_process import Server
from ops.bench.overhead import ADDED_P50_MS, ENGINE, Round, prompt_of, report, stages
from ops.bench.overhead_arms import BASELINE, MESH, broker_pid
from ops.bench.result import Result
from ops.bench.scheduler_cost import LOOP_S
from ops.ports import free_port
from services.agent.backends.simulated.backend import SimulatedEngine
from shared.contracts.base import ModelName, RequestId
from shared.contracts.errors import EngineError, SettingsError
from shared.contracts.qos import QosClass
from shared.contracts.telemetry import RequestObserved
from shared.models.registry import ModelRegistry
from shared.models.tiny import make_tiny_models
from shared.runtime.clock import SystemClock
from shared.runtime.health import serve_http

MODEL = ModelName("tiny-llama")
_SPENDS = "import time\nwhile time.process_time() < 0.2: pass"
_PARENT = (
    f"import subprocess, sys; subprocess.run([sys.executable, '-c', {_SPENDS!r}]);"
    "print('ready', flush=True); sys.stdin.read()"
)


def answer(ttft_s: float, *, text: str = "same", request_id: str = "r") -> Chat:
    return Chat(
        request_id=request_id, sent_at=100.0, ttft_s=ttft_s, text=text, prompt_tokens=60,
        output_tokens=4,
    )  # fmt: skip


def round_of(ttft_ms: float, cpu_s: Sequence[float] = (0.5,), *, text: str = "same") -> Round:
    """Two answers with the same time to the first token."""
    names = ("gateway", "rabbitmq")
    return Round(
        answers=[answer(1e-3 * ttft_ms, text=text)] * 2,
        cpu_s=dict(zip(names, cpu_s, strict=False)),
        took_s=2.0,
    )


def reported(mesh: list[Round], baseline: list[Round]) -> Result:
    result = Result(name="overhead", seed=0, quick=False)
    rounds = {BASELINE: baseline, MESH: mesh}
    report(result, rounds, rounds, [LOOP_S / 2] * len(mesh))
    return result


def test_the_median_of_the_rounds_is_judged_not_the_best_round():
    mesh = [round_of(ttft_ms) for ttft_ms in (20.0, 50.0, 60.0)]
    result = reported(mesh, [round_of(10.0)] * 3)

    assert result.figures["added to TTFT p50, ms"] == {"median": 40.0, "min": 10.0, "max": 50.0}
    assert result.figures["added to TTFT p99, ms"] == {"median": 40.0, "min": 10.0, "max": 50.0}
    assert (result.lines[0].value, result.lines[0].bound) == (40.0, ADDED_P50_MS)
    assert not result.holds


def test_a_mesh_that_is_faster_than_the_baseline_has_a_negative_overhead():
    assert reported([round_of(8.0)], [round_of(10.0)]).lines[0].value == -2.0


def test_all_cpu_time_counts_including_the_brokers():
    result = reported([round_of(20.0, (0.5, 0.25))], [round_of(10.0, (0.1,))])

    median = {
        name: each["median"]
        for name, each in result.figures.items()
        if "CPU ms" in name or "CPU us" in name
    }
    assert median["CPU ms per request, mesh"] == 375.0
    assert median["CPU ms per request, mesh, rabbitmq"] == 125.0
    assert median["CPU ms per request, mesh, gateway"] == 250.0
    assert median["CPU ms per request, one process"] == 50.0
    assert median["CPU ms per request, mesh, normalised"] == 750.0
    assert median["CPU us per token, mesh"] == pytest.approx(1e6 * 0.75 / 8)


def test_different_answers_make_the_line_of_equal_answers_fail():
    result = reported([round_of(10.0, text="other")], [round_of(10.0)])

    assert [(line.value, line.holds) for line in result.lines] == [(0.0, True), (4, False)]


def test_stages_add_up_to_the_time_that_the_client_waited():
    seen = {
        "r": RequestObserved(
            request_id=RequestId("r"), instance_id="i", model=MODEL, engine="e", device="d",
            application="a", tenant="t", qos_class=QosClass.INTERACTIVE, prompt_tokens=60,
            output_tokens=4, arrived_at=100.001, grouped_at=100.003, pulled_at=100.006,
            submitted_at=100.010, first_token_at=100.015, finished_at=100.1, attained=True,
        )
    }  # fmt: skip
    found = stages([answer(0.021, request_id="r"), answer(0.021, request_id="not seen")], seen)

    assert found.pop("stages: requests observed") == 1
    assert [round(each["p50"], 3) for each in found.values()] == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    assert stages([answer(0.021)], {}) == {"stages: requests observed": 0}


def test_prompts_are_new_each_time_and_equal_for_equal_seeds():
    chance, again = random.Random(3), random.Random(3)
    prompts = [prompt_of(chance) for _ in range(100)]

    assert len({prompt[:40] for prompt in prompts}) == 100
    assert prompts == [prompt_of(again) for _ in range(100)]


def test_cpu_time_of_ended_children_counts():
    command = [sys.executable, "-c", _PARENT]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        used_s = computed_s(process.pid)
        process.kill()

    assert 0.18 < used_s < 5.0


def test_the_process_of_a_broker_is_found_by_its_port():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]

        assert broker_pid(f"amqp://guest:guest@127.0.0.1:{port}/") == os.getpid()
    with pytest.raises(SettingsError, match="--broker private"):
        broker_pid(f"amqp://guest:guest@127.0.0.1:{port}/")


async def test_the_baseline_answers_as_a_stream_with_usage(tmp_path: Path):
    entry = ModelRegistry.load(make_tiny_models(tmp_path)).entry(MODEL)
    engine = SimulatedEngine([entry], ENGINE, SystemClock())
    await engine.start()
    await engine.activate(MODEL)
    port = free_port()
    async with serve_http(Server(engine, entry), host="127.0.0.1", port=port):
        first, again, other = [
            await chat(port, MODEL, prompt, max_tokens=5, ttft_s=5.0)
            for prompt in ("one prompt", "one prompt", "another")
        ]
    await engine.close()

    assert first.text == again.text != other.text
    assert len(first.text) > 0
    assert (first.output_tokens, first.request_id) == (5, "")
    assert first.prompt_tokens > other.prompt_tokens > 0
    assert 0.005 < first.ttft_s < 5.0


async def test_a_refused_request_is_an_error(tmp_path: Path):
    entry = ModelRegistry.load(make_tiny_models(tmp_path)).entry(MODEL)
    engine = SimulatedEngine([entry], ENGINE, SystemClock())
    port = free_port()
    async with serve_http(Server(engine, entry), host="127.0.0.1", port=port):
        with pytest.raises(EngineError, match="status 500"):
            await chat(port, MODEL, "too early", max_tokens=5, ttft_s=5.0)
