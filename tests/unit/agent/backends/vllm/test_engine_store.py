"""Use of the device during model changes on GPUs, where idle engines sleep."""

import sys
from importlib import import_module
from types import ModuleType
from typing import Any

import pytest

from services.agent.backends.vllm.shared.wire import Activate, Warm

STORE = "services.agent.backends.vllm.host.engine_store"


class Device:
    """Records the actions of engines in order, and fails the actions that a test selects."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.refused: set[str] = set()

    def do(self, what: str) -> None:
        self.done.append(what)
        if what in self.refused:
            raise RuntimeError(what)


class Engine:
    """The interface of a `CoreEngine` that the store uses."""

    errored = False

    def __init__(self, name: str, device: Device) -> None:
        device.do(f"make {name}")
        self.name, self.device = name, device

    async def sleep(self) -> None:
        self.device.do(f"sleep {self.name}")

    async def wake_up(self) -> None:
        self.device.do(f"wake {self.name}")

    async def reload_weights(self, path: str) -> None:
        self.device.do(f"reload {self.name} with {path}")

    async def reset_caches(self) -> bool:
        return True


def activate(model: str, **fields: Any) -> Activate:
    return Activate(model, {"model": model}, sleep=True, **fields)


@pytest.fixture
def device() -> Device:
    return Device()


@pytest.fixture
def store(device: Device, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A store of fake engines, without importing vLLM or the code that creates engines."""
    stand_ins: dict[str, dict[str, Any]] = {
        "vllm": {},
        "vllm.v1": {},
        "vllm.v1.engine": {},
        "vllm.v1.engine.exceptions": {"EngineDeadError": RuntimeError},
        "services.agent.backends.vllm.host.core_engine": {"CoreEngine": Engine},
        "services.agent.backends.vllm.host.engines": {
            "make_engine": lambda args: Engine(args["model"], device),
        },
        "services.agent.backends.vllm.host.processes.process_trees": {
            "end_engine": lambda engine: device.do(f"end {engine.name}"),
        },
    }
    for name, content in stand_ins.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, STORE, raising=False)
    found = import_module(STORE)
    monkeypatch.delitem(sys.modules, STORE)
    return found.EngineStore()


async def test_active_engine_sleeps_before_another_is_created(store: Any, device: Device):
    await store.activate(activate("a"))
    await store.activate(activate("b"))
    await store.activate(activate("a"))

    assert device.done == ["make a", "sleep a", "make b", "sleep b", "wake a"]


async def test_active_engine_sleeps_before_a_donor_wakes(store: Any, device: Device):
    await store.activate(activate("a"))
    await store.warm(Warm("b", {"model": "b"}, sleep=True))
    device.done.clear()
    await store.activate(activate("c", donor="b"))

    assert device.done == ["sleep a", "wake b", "reload b with c"]
    assert store.get("b") is None
    assert store.get("c") is not None


@pytest.mark.parametrize("broken", ["make b", "wake b"])
async def test_active_engine_continues_when_another_activation_fails(
    store: Any, device: Device, broken: str
):
    await store.activate(activate("a"))
    if broken == "wake b":
        await store.warm(Warm("b", {"model": "b"}, sleep=True))
    device.refused.add(broken)
    with pytest.raises(RuntimeError, match=broken):
        await store.activate(activate("b"))

    assert device.done[-1] == "wake a"
    assert store.get("b") is None
    assert store.errored() == ()


@pytest.mark.parametrize("broken", ["sleep a", "wake b", "reload b with c"])
async def test_donor_is_shut_down_when_the_reload_fails(store: Any, device: Device, broken: str):
    """The caller assumes that the donor's engine no longer exists."""
    await store.activate(activate("a"))
    await store.warm(Warm("b", {"model": "b"}, sleep=True))
    device.refused.add(broken)
    with pytest.raises(RuntimeError, match=broken):
        await store.activate(activate("c", donor="b"))

    assert store.get("b") is None
    assert store.get("c") is None
    assert "end b" in device.done
    assert store.errored() == ()


async def test_engine_that_cannot_be_woken_counts_as_dead(store: Any, device: Device):
    await store.activate(activate("a"))
    device.refused.update(("make b", "wake a"))
    with pytest.raises(RuntimeError, match="make b"):
        await store.activate(activate("b"))

    assert store.errored() == ("a",)
    store.shut_down("a")
    assert store.errored() == ()
    await store.activate(activate("a"))
    assert store.errored() == ()
