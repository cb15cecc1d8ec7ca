"""Delivery of an engine core's outputs to requests, with a fake of vLLM's client."""

import asyncio
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from itertools import count
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

ENGINE = "services.agent.backends.vllm.host.core_engine"
ADAPTERS = "services.agent.backends.vllm.host.adapters"
BUILDING = "services.agent.backends.vllm.host.built_runs"
NUM_SLOTS = 2


class EngineDeadError(Exception):
    """vLLM's error for a dead engine core."""


@dataclass
class LoRARequest:
    """vLLM's description of an adapter."""

    lora_name: str
    lora_int_id: int
    lora_path: str


class Client:
    """Fake of vLLM's asynchronous client; `None` among the outputs is the core's death."""

    def __init__(self) -> None:
        self.resources = SimpleNamespace(engine_dead=False)
        self.added: list[str] = []
        self.aborted: list[str] = []
        self.outputs: asyncio.Queue[Any] = asyncio.Queue()
        self.loras: dict[int, str] = {}
        """Id of a loaded adapter -> its name, which contains a digest."""

    async def add_lora_async(self, request: LoRARequest) -> None:
        if not Path(request.lora_path).exists():
            raise FileNotFoundError(request.lora_path)
        self.loras[request.lora_int_id] = request.lora_name

    async def remove_lora_async(self, number: int) -> None:
        del self.loras[number]

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

    async def get_supported_tasks_async(self) -> tuple[str, ...]:
        return ("embed",)

    async def sleep_async(self, *, level: int) -> None:
        await asyncio.Event().wait()  # until the test cancels it

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
        "vllm.lora": {},
        "vllm.lora.request": {"LoRARequest": LoRARequest},
        "vllm.v1": {},
        "vllm.v1.engine": {},
        "vllm.v1.engine.exceptions": {"EngineDeadError": EngineDeadError},
        "services.agent.backends.vllm.host.core_requests": {"CoreRequests": object},
        "services.agent.backends.vllm.host.runs": {"Run": object},
        "services.agent.backends.vllm.host.pooled_run": {"PooledRun": object},
    }
    for name, content in stand_ins.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    for name in (ENGINE, ADAPTERS):
        monkeypatch.delitem(sys.modules, name, raising=False)
    found, adapters = import_module(ENGINE), import_module(ADAPTERS)
    for name in (ENGINE, ADAPTERS):
        monkeypatch.delitem(sys.modules, name)
    return found.CoreEngine(client, None, adapters.Adapters(client, NUM_SLOTS), None)


@pytest.fixture
def built_run(engine: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Awaitable[Any]]:
    """Begins to build a run on the engine, whose requests cannot be built."""

    def build_pooled(*_: object) -> None:
        raise ValueError("bad input")

    monkeypatch.delitem(sys.modules, BUILDING, raising=False)
    building = import_module(BUILDING)
    monkeypatch.delitem(sys.modules, BUILDING)
    engine.requests = SimpleNamespace(build_pooled=build_pooled)
    return partial(building.built_run, on_output=lambda _: None, on_error=lambda *_: None)


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


def taking(engine: Any, core_id: str, adapter: str, path: Path) -> Any:
    """The loading of an adapter for a request."""
    request = SimpleNamespace(adapter=adapter)
    return engine.adapter(SimpleNamespace(request=request, adapter_path=str(path)), core_id)


def loaded(client: Client) -> list[str]:
    """Names of the loaded adapters, without their digests."""
    return sorted(name.partition("@")[0] for name in client.loras.values())


async def test_an_adapter_is_loaded_once_for_all_its_requests(
    engine: Any, client: Client, tmp_path: Path
) -> None:
    first = await taking(engine, "r1", "sql", tmp_path)
    second = await taking(engine, "r2", "sql", tmp_path)

    assert first == second
    assert loaded(client) == ["sql"]


async def test_the_least_recently_used_idle_adapter_makes_room(
    engine: Any, client: Client, tmp_path: Path
) -> None:
    for core_id, name in (("r1", "a"), ("r2", "b"), ("r3", "a")):
        await taking(engine, core_id, name, tmp_path)
        await engine.submit(SimpleNamespace(request_id=core_id), Receiver())
    client.outputs.put_nowait([output("r2", "end", finished=True)])
    await delivered()
    await taking(engine, "r4", "c", tmp_path)
    assert loaded(client) == ["a", "c"]

    with pytest.raises(ValueError, match="all 2 adapters of the engine are in use"):
        await taking(engine, "r5", "d", tmp_path)
    await engine.abort("r1")
    await engine.abort("r3")
    await taking(engine, "r5", "d", tmp_path)
    assert loaded(client) == ["c", "d"]
    engine.shutdown()


async def test_an_adapter_that_cannot_be_loaded_takes_no_room(
    engine: Any, client: Client, tmp_path: Path
) -> None:
    for number in range(2 * NUM_SLOTS):
        with pytest.raises(ValueError, match="cannot be loaded"):
            await taking(engine, f"r{number}", "gone", tmp_path / "gone")

    await taking(engine, "r", "sql", tmp_path)
    assert loaded(client) == ["sql"]


async def test_changed_files_are_another_adapter(
    engine: Any, client: Client, tmp_path: Path
) -> None:
    """KV of the former files must not be used."""
    before = await taking(engine, "r1", "sql", tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    after = await taking(engine, "r2", "sql", tmp_path)

    assert before.lora_int_id != after.lora_int_id
    assert before.lora_name != after.lora_name


async def test_removed_adapters_are_unloaded_when_no_request_uses_them(
    engine: Any, client: Client, tmp_path: Path
) -> None:
    for core_id, name in (("r1", "used"), ("r2", "idle")):
        await taking(engine, core_id, name, tmp_path)
    engine.adapters.give_back("r2")
    await engine.keep_adapters([("new", str(tmp_path))])
    assert loaded(client) == ["used"]

    engine.adapters.give_back("r1")
    await taking(engine, "r3", "new", tmp_path)
    assert loaded(client) == ["new"]


async def test_a_request_that_is_not_built_uses_no_adapter(
    engine: Any, client: Client, tmp_path: Path
) -> None:
    await taking(engine, "r1", "sql", tmp_path)
    with pytest.raises(ValueError, match="bad"), engine.giving_back("r1"):
        raise ValueError("bad prompt")
    await engine.keep_adapters([])

    assert loaded(client) == []


@pytest.mark.parametrize("turns", range(16))
async def test_a_run_that_is_cancelled_or_fails_while_it_is_built_uses_no_adapter(
    engine: Any,
    client: Client,
    built_run: Callable[..., Awaitable[Any]],
    tmp_path: Path,
    turns: int,
) -> None:
    request = SimpleNamespace(request_id="r", adapter="sql", input_lengths=(1, 1))
    command = SimpleNamespace(request=request, adapter_path=str(tmp_path))
    building = asyncio.ensure_future(built_run(command, engine, count()))
    for _ in range(turns):
        await asyncio.sleep(0)
    building.cancel()
    with suppress(asyncio.CancelledError, ValueError):
        await building
    await engine.keep_adapters([])

    assert loaded(client) == []
