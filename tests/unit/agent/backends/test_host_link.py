"""The agent's end of the engine host's socket, with a host that says what the test wants."""

import sys
from pathlib import Path
from typing import Any

import pytest

from services.agent.backends.base import EngineRequest
from services.agent.backends.settings import VllmSettings
from services.agent.backends.vllm.backend import VllmEngine
from shared.contracts.base import ModelName, RequestId
from shared.contracts.errors import EngineError
from shared.contracts.models import ModelEntry
from shared.contracts.requests import Sampling
from tests.brokers import eventually

MODEL = ModelName("m")
ENTRY = ModelEntry(name=MODEL, path="/models/m", architecture="LlamaForCausalLM", max_model_len=64)
HOST = """#!{python}
import asyncio, socket, sys
sys.path.insert(0, {root!r})
import msgspec
from services.agent.backends.vllm.wire import (
    Activate, Activated, Connection, HostCommand, HostReady, Outputs, RunOutput, Submit
)

class Unheard(msgspec.Struct, frozen=True, array_like=True, tag=True):
    pass

async def main():
    fd = next(int(a.partition("=")[2]) for a in sys.argv if a.startswith("--fd="))
    reader, writer = await asyncio.open_unix_connection(sock=socket.socket(fileno=fd))
    connection = Connection(reader, writer, HostCommand)
    connection.send(HostReady("1", "cpu", True))
    async for command in connection.frames():
        if isinstance(command, Activate):
            connection.send(Activated(command.model))
        elif isinstance(command, Submit):
            connection.send({answer})

asyncio.run(main())
"""
REQUEST = EngineRequest(
    request_id=RequestId("r"), model=MODEL, prompt=(10, 11), sampling=Sampling(max_tokens=4)
)


async def running(tmp_path: Path, answer: str) -> VllmEngine:
    """An engine whose host answers each request with *answer*."""
    root = str(Path(__file__).parents[4])
    host = tmp_path / "host"
    host.write_text(HOST.format(python=sys.executable, root=root, answer=answer))
    host.chmod(0o700)
    engine = VllmEngine([ENTRY], VllmSettings(python=str(host), log_path=str(tmp_path / "log")))
    await engine.start()
    await engine.activate(MODEL)
    return engine


async def ended(engine: VllmEngine) -> EngineError:
    """How the request fails."""
    try:
        async for _ in engine.generate(REQUEST):
            pass
    except EngineError as error:
        return error
    raise AssertionError("it did not fail")


async def test_a_run_that_the_engine_ends_by_itself_fails_alone(tmp_path: Path):
    engine = await running(tmp_path, 'Outputs((RunOutput("r", (), "abort"),))')
    try:
        error = await ended(engine)
        assert "abort" in str(error)
        assert not error.engine_dead
        assert engine.alive
    finally:
        await engine.close()


async def test_a_host_that_cannot_be_understood_is_lost(tmp_path: Path):
    engine = await running(tmp_path, "Unheard()")
    try:
        assert (await ended(engine)).engine_dead
        await eventually(lambda: engine.host_pid is None)
        assert not engine.alive
    finally:
        await engine.close()


@pytest.mark.parametrize(
    ("ready", "fields", "message"),
    [
        ('"cpu", True', {"async_scheduling": True}, "async_scheduling is for GPUs"),
        ('"H200", False', {"host_kv_bytes": 1 << 30}, "kv_offloading_size"),
    ],
    ids=["asynchronous on a CPU", "checkpoints on a GPU"],
)
async def test_what_the_device_cannot_do_is_refused(
    tmp_path: Path, ready: str, fields: dict[str, Any], message: str
):
    """Refused by `start`, when the host has said what it runs on."""
    root = str(Path(__file__).parents[4])
    host = tmp_path / "host"
    script = HOST.format(python=sys.executable, root=root, answer="None")
    host.write_text(script.replace('"cpu", True', ready))
    host.chmod(0o700)
    settings = VllmSettings(python=str(host), log_path=str(tmp_path / "log"), **fields)
    engine = VllmEngine([ENTRY], settings)
    with pytest.raises(EngineError, match=message):
        await engine.start()
    await eventually(lambda: engine.host_pid is None)
    await engine.close()

    assert not engine.alive
