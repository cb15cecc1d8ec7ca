"""The agent's end of the engine host's socket, with a scripted host."""

import sys
from pathlib import Path

import pytest

from ops.engine_runs import generate
from services.agent.backends.base import EngineRequest
from services.agent.backends.settings import VllmSettings
from services.agent.backends.vllm.front.backend import VllmEngine
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
from services.agent.backends.vllm.shared.wire import (
    Activate, Connection, HostCommand, HostReady, Outputs, Reply, RunOutput, Shutdown, Submit
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
            connection.send(Reply(command.model))
        elif isinstance(command, Submit):
            connection.send({answer})
        elif isinstance(command, Shutdown):
            return

asyncio.run(main())
"""
REQUEST = EngineRequest(
    request_id=RequestId("r"), model=MODEL, prompt=(10, 11), sampling=Sampling(max_tokens=4)
)


async def running(tmp_path: Path, answer: str) -> VllmEngine:
    """An engine whose host answers each request with *answer*."""
    root = str(Path(__file__).parents[3])
    host = tmp_path / "host"
    host.write_text(HOST.format(python=sys.executable, root=root, answer=answer))
    host.chmod(0o700)
    engine = VllmEngine([ENTRY], VllmSettings(python=str(host), log_path=str(tmp_path / "log")))
    await engine.start()
    await engine.activate(MODEL)
    return engine


async def ended(engine: VllmEngine) -> EngineError:
    """Error with which *request* fails."""
    try:
        async for _ in generate(engine, REQUEST):
            pass
    except EngineError as error:
        return error
    raise AssertionError("the request did not fail")


async def test_run_ended_by_the_engine_fails_alone(tmp_path: Path):
    engine = await running(tmp_path, 'Outputs((RunOutput("r", (), "abort"),))')
    try:
        error = await ended(engine)
        assert "abort" in str(error)
        assert not error.engine_dead
        assert engine.alive
    finally:
        await engine.close()


async def test_host_that_sends_an_invalid_message_is_lost(tmp_path: Path):
    engine = await running(tmp_path, "Unheard()")
    try:
        assert (await ended(engine)).engine_dead
        await eventually(lambda: engine.host_pid is None)
        assert not engine.alive
    finally:
        await engine.close()


async def test_settings_that_the_device_does_not_support_are_refused(tmp_path: Path):
    """`start` refuses checkpoints on a GPU after the host has reported the device."""
    root = str(Path(__file__).parents[3])
    host = tmp_path / "host"
    script = HOST.format(python=sys.executable, root=root, answer="None")
    host.write_text(script.replace('"cpu", True', '"H200", False'))
    host.chmod(0o700)
    settings = VllmSettings(python=str(host), log_path=str(tmp_path / "log"), host_kv_bytes=1 << 30)
    engine = VllmEngine([ENTRY], settings)
    with pytest.raises(EngineError, match="kv_offloading_size"):
        await engine.start()
    await eventually(lambda: engine.host_pid is None)
    await engine.close()

    assert not engine.alive
