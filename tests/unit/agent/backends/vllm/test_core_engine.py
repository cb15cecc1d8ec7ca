"""Delivery of an engine core's outputs to requests, with a fake of vLLM's client."""

import asyncio
import sys
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

ENGINE = "services.agent.backends.vllm.host.core_engine"


class EngineDeadError(Exception):
    """vLLM's error for a dead engine core."""


class Client:
    """Fake of vLLM's asynchronous client; `None` among the outputs is the core's death."""

    def __init__(self) -> None:
        self.resources = SimpleNamespace(engine_dead=False)
        self.added: list[str] = []
        self.aborted: list[str] = []
        self.outputs: asyncio.Queue[Any] = asyncio.Queue()

    async def add_request_async(self, request: Any) -> None:
        if self.resources.engine_dead:
            raise EngineDeadError("dead")
        self.added.append(request.request_id)

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        self.aborted += request_ids

    async def get_output_async(self) -> Any:
        outputs = await self.outputs.get()
        if isinstance(outputs, Exception):
            raise outputs
        return SimpleNamespace(outputs=outputs)

    async def sleep_async(self, *, level: int) -> None:
        await asyncio.sleep(3600 * level)

    def shutdown(self, timeout: float) -> None:
        self.resources.engine_dead = True
        assert timeout == 0
        self.outputs.put_nowait(EngineDeadError("shut down"))


class Receiver:
    """Records outputs; the output "bad" is invalid."""

    def __init__(self) -> None:
        self.outputs: list[str] = []
        self.errors: list[Exception] = []

    def on_output(self, output: Any) -> bool:
        if output.content == "bad":
            raise ValueError("bad output")
        self.outputs.append(output.content)
        return bool(output.content == "end")

    def on_error(self, error: Exception) -> None:
        self.errors.append(error)


def output(request_id: str, content: str, *, finished: bool = False) -> Any:
    return SimpleNamespace(request_id=request_id, content=content, finished=finished)


@pytest.fixture
def client() -> Client:
    return Client()


@pytest.fixture
def engine(client: Client, monkeypatch: pytest.MonkeyPatch) -> Any:
    stand_ins: dict[str, dict[str, Any]] = {
        "vllm": {},
        "vllm.v1": {},
        "vllm.v1.engine": {},
        "vllm.v1.engine.exceptions": {"EngineDeadError": EngineDeadError},
        "services.agent.backends.vllm.host.core_requests": {"CoreRequests": object},
    }
    for name, content in stand_ins.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, ENGINE, raising=False)
    found = import_module(ENGINE)
    monkeypatch.delitem(sys.modules, ENGINE)
    return found.CoreEngine(client, None)


async def submitted(engine: Any, *request_ids: str) -> list[Receiver]:
    receivers = [Receiver() for _ in request_ids]
    for request_id, receiver in zip(request_ids, receivers, strict=True):
        await engine.submit(SimpleNamespace(request_id=request_id), receiver)
    return receivers


async def delivered() -> None:
    """Wait until all tasks that can run have run."""
    for _ in range(5):
        await asyncio.sleep(0)


async def test_outputs_reach_their_requests(engine: Any, client: Client) -> None:
    one, two = await submitted(engine, "one", "two")
    client.outputs.put_nowait([output("two", "a"), output("one", "b"), output("unknown", "c")])
    client.outputs.put_nowait([output("one", "d", finished=True)])
    client.outputs.put_nowait([output("one", "after the end")])
    await delivered()

    assert (one.outputs, two.outputs) == (["b", "d"], ["a"])
    assert not engine.errored


async def test_an_aborted_request_gets_nothing_more(engine: Any, client: Client) -> None:
    (one,) = await submitted(engine, "one")
    await engine.abort("one")
    await engine.abort("one")
    client.outputs.put_nowait([output("one", "late")])
    await delivered()

    assert one.outputs == []
    assert client.aborted == ["one"]


async def test_a_bad_output_ends_only_its_own_request(engine: Any, client: Client) -> None:
    one, two = await submitted(engine, "one", "two")
    client.outputs.put_nowait([output("one", "bad"), output("two", "a")])
    client.outputs.put_nowait([output("one", "b"), output("two", "c")])
    await delivered()

    assert [str(error) for error in one.errors] == ["bad output"]
    assert client.aborted == ["one"]
    assert (one.outputs, two.outputs, two.errors) == ([], ["a", "c"], [])


@pytest.mark.parametrize("cause", [EngineDeadError("killed"), ValueError("undecodable")])
async def test_the_end_of_outputs_is_the_death_of_all_requests(
    engine: Any, client: Client, cause: Exception
) -> None:
    receivers = await submitted(engine, "one", "two")
    client.outputs.put_nowait(cause)
    await delivered()

    for receiver in receivers:
        (error,) = receiver.errors
        assert isinstance(error, EngineDeadError)
        assert str(cause) in str(error)
    assert engine.errored


async def test_a_dead_core_refuses_requests_and_answers_no_call(
    engine: Any, client: Client
) -> None:
    call = asyncio.create_task(engine.sleep())
    await delivered()
    client.resources.engine_dead = True

    with pytest.raises(EngineDeadError):
        await submitted(engine, "one")
    with pytest.raises(EngineDeadError):
        async with asyncio.timeout(5):
            await call
    assert engine.errored


async def test_a_planned_end_reports_no_errors(engine: Any) -> None:
    (one,) = await submitted(engine, "one")
    engine.shutdown()
    await delivered()

    assert one.errors == []
    assert engine.errored


async def test_requests_that_end_for_their_receiver_are_aborted(
    engine: Any, client: Client
) -> None:
    (receiver,) = await submitted(engine, "one")
    client.outputs.put_nowait([output("one", "end"), output("one", "late")])
    await delivered()

    assert receiver.outputs == ["end"]
    assert client.aborted == ["one"]
