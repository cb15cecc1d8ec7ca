"""Processes of the engine host after kills and with missing parts."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from services.agent.backends.settings import VllmSettings
from services.agent.backends.vllm.front.backend import VllmEngine
from shared.contracts.errors import EngineError
from tests.brokers import eventually
from tests.contract.engine.engines import (
    LLAMA,
    greedy,
    group_members,
    is_engine_core,
    prompt_of,
    tiny_entries,
    vllm_rig,
)

ROOT = Path(__file__).resolve().parents[3]

# Process in place of the agent: starts an engine, prints its pid, and waits to be killed.
FRONT = """
import asyncio, sys
from pathlib import Path
from tests.contract.engine.engines import vllm_rig

async def main():
    rig = vllm_rig(Path(sys.argv[1]))
    await rig.bring_up()
    print(rig.host_pid, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


@pytest.fixture
def killed_group() -> Iterator[list[int]]:
    """Process groups that must not outlive the test."""
    groups: list[int] = []
    yield groups
    for group in groups:
        if group_members(group):
            with suppress(ProcessLookupError):  # the last process of the group has ended meanwhile
                os.killpg(group, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.vllm
async def test_a_killed_agent_leaves_no_engine_behind(
    tmp_path: Path, killed_group: list[int]
) -> None:
    vllm_rig(tmp_path)  # without vLLM, the test is skipped or fails
    with (
        # A short path, because sockets in it have a length limit.
        tempfile.TemporaryDirectory(prefix="hw-") as temporary,
        subprocess.Popen(
            [sys.executable, "-c", FRONT, str(tmp_path)],
            cwd=ROOT,
            env=os.environ | {"TMPDIR": temporary},
            stdout=subprocess.PIPE,
            text=True,
        ) as front,
    ):
        assert front.stdout is not None
        # Log lines precede the line with the process id.
        host = next((int(line) for line in front.stdout if line.strip().isdigit()), 0)
        assert host > 0
        killed_group.append(host)
        assert len(group_members(host)) >= 2
        front.kill()

        await eventually(lambda: group_members(host) == [], within_s=30)
        assert list(Path(temporary).glob("headway-engine-*")) == []


@pytest.mark.slow
@pytest.mark.vllm
async def test_a_killed_host_ends_its_engines_and_restarts(tmp_path: Path) -> None:
    rig = vllm_rig(tmp_path)
    try:
        await rig.bring_up()
        before = await rig.ask(prompt_of(30), greedy(8))
        host = rig.host_pid
        os.kill(host, signal.SIGKILL)
        await eventually(lambda: not rig.engine.alive)

        await eventually(lambda: group_members(host) == [])
        await rig.bring_up()
        assert before.token_ids == (await rig.ask(prompt_of(30), greedy(8))).token_ids
    finally:
        host = rig.host_pid
        await rig.engine.close()
    await eventually(lambda: group_members(host) == [])


@pytest.mark.slow
@pytest.mark.vllm
async def test_engine_cores_are_forked_from_a_process_without_threads(tmp_path: Path) -> None:
    """A lock that another thread holds during a fork would stay locked in the child."""
    rig = vllm_rig(tmp_path)
    try:
        await rig.bring_up()
        (core,) = filter(is_engine_core, group_members(rig.host_pid))
        parent = psutil.Process(core).parent()

        assert parent is not None
        assert parent.pid != rig.host_pid
        assert parent.num_threads() == 1
    finally:
        await rig.engine.close()


async def test_a_failed_host_start_reports_its_reason(tmp_path: Path) -> None:
    settings = VllmSettings(python="/nowhere/python", log_path=str(tmp_path / "log"))
    engine = VllmEngine(tiny_entries(tmp_path, weights=False), settings)

    with pytest.raises(EngineError, match="/nowhere/python"):
        await engine.start()
    await engine.close()


async def test_a_host_without_vllm_ends_and_start_fails(tmp_path: Path) -> None:
    # The interpreter behind the virtual environment has no packages of its own.
    settings = VllmSettings(
        python=str(Path(sys._base_executable)),  # type: ignore[attr-defined]
        log_path=str(tmp_path / "log"),
    )
    engine = VllmEngine(tiny_entries(tmp_path, weights=False), settings)

    with pytest.raises(EngineError, match="before it was ready"):
        await engine.start()
    assert not engine.alive
    await engine.close()


async def test_a_model_cannot_be_activated_before_start(tmp_path: Path) -> None:
    engine = VllmEngine(tiny_entries(tmp_path, weights=False), VllmSettings())

    with pytest.raises(EngineError) as refused:
        await engine.activate(LLAMA)
    assert refused.value.engine_dead
