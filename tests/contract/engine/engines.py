"""Engines under test: the simulated engine, and vLLM where it is installed."""

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from ops.engine_runs import generate
from services.agent.backends.base import EngineBackend, EngineRequest
from services.agent.backends.settings import SimulatedSettings, VllmSettings
from services.agent.backends.simulated.backend import SimulatedEngine
from services.agent.backends.vllm.front.backend import VllmEngine
from services.agent.backends.vllm.front.process import vllm_unavailable_reason
from shared.contracts.base import ModelName, RequestId, Seconds
from shared.contracts.errors import EngineError
from shared.contracts.models import ModelEntry
from shared.contracts.requests import FinishReason, Sampling, Tokens
from shared.models.registry import ModelRegistry
from shared.models.tiny import make_tiny_models
from shared.runtime.clock import SystemClock
from tests.requirements import absent

LLAMA = ModelName("tiny-llama")
OTHER = ModelName("tiny-llama-b")
CRASH_TOKEN = 511
SLEEPING_YIELD = """
import os, time
os.sched_yield = lambda: time.sleep(50e-6)
"""
"""Module `sitecustomize` of processes that sleep instead of yielding the CPU."""

_ids = count()


def greedy(max_tokens: int = 24, **fields: Any) -> Sampling:
    """Deterministic sampling of exactly *max_tokens*, unless *fields* override it."""
    return Sampling(max_tokens=max_tokens, **({"temperature": 0, "ignore_eos": True} | fields))


def prompt_of(length: int, first: int = 10) -> Tokens:
    """An ordinary prompt, different for each *first*."""
    return tuple(10 + (first + 7 * index) % 490 for index in range(length))


@dataclass(frozen=True)
class Answer:
    token_ids: Tokens
    finish_reason: FinishReason | None
    cached_tokens: int
    prefill_s: Seconds = 0.0


@dataclass
class EngineRig:
    """A backend, with functions to kill it and to send requests."""

    engine: EngineBackend
    kill: Callable[[], Awaitable[None]]
    entries: tuple[ModelEntry, ...] = ()
    """Models that the engine knows at its start."""
    compile_cache: Path | None = None
    """Folder of compiled models; None if the engine does not compile."""

    def engine_processes(self) -> set[int]:
        """Running processes of vLLM's engines: cores and their workers; empty for a simulation."""
        if not isinstance(self.engine, VllmEngine):
            return set()
        members = group_members(self.host_pid)
        cores = [psutil.Process(pid) for pid in members if is_engine_core(pid)]
        workers = [each.pid for core in cores for each in core.children(recursive=True)]
        return {core.pid for core in cores} | set(workers)

    @property
    def num_compiled(self) -> int:
        """Number of models that were compiled for this rig."""
        if self.compile_cache is None:
            return 0
        return sum(1 for _ in self.compile_cache.glob("torch_compile_cache/torch_aot_compile/*"))

    @property
    def host_pid(self) -> int:
        """Process id of vLLM's engine host, which is also the id of its process group."""
        assert isinstance(self.engine, VllmEngine)
        assert self.engine.host_pid is not None
        return self.engine.host_pid

    async def bring_up(self, model: ModelName = LLAMA) -> None:
        """Start the engine and activate *model*."""
        if not self.engine.alive:
            await self.engine.start()
        await self.engine.activate(model)

    async def settled(self) -> None:
        """Wait until the engine holds no request and no memory."""
        async with asyncio.timeout(60):
            while True:
                state = self.engine.snapshot()
                if (state.running, state.waiting, state.kv_utilization) == (0, 0, 0.0):
                    return
                await asyncio.sleep(0.01)

    async def over(self, model: ModelName = LLAMA) -> int:
        """
        Wait until the engine has processed every abort and counted the aborted runs' tokens.

        An engine frees an aborted run's memory before it counts the iteration in progress. Since
        iterations run in sequence, this method sends a request, which is served after that count.

        Returns:
            Tokens that the engine computed for this request, none of them in a decode.
        """
        question = prompt_of(2)
        await self.ask(question, greedy(1), model=model)
        await self.settled()
        return len(question)

    def request(self, prompt: Tokens, sampling: Sampling, **fields: Any) -> EngineRequest:
        defaults = {"request_id": RequestId(f"request-{next(_ids)}"), "model": LLAMA}
        return EngineRequest(prompt=prompt, sampling=sampling, **(defaults | fields))

    async def ask(self, prompt: Tokens, sampling: Sampling, **fields: Any) -> Answer:
        return await self.answer(self.request(prompt, sampling, **fields))

    async def answer(self, request: EngineRequest, begun: asyncio.Event | None = None) -> Answer:
        """Return the whole answer; set *begun* when the first tokens arrive."""
        token_ids: list[int] = []
        finish_reason, cached_tokens, prefill_s = None, 0, 0.0
        async for output in generate(self.engine, request):
            token_ids += output.token_ids
            cached_tokens += output.cached_tokens
            prefill_s += output.prefill_s
            finish_reason = output.finish_reason
            if begun is not None:
                begun.set()
        return Answer(tuple(token_ids), finish_reason, cached_tokens, prefill_s)


def tiny_entries(directory: Path, *, weights: bool) -> tuple[ModelEntry, ...]:
    registry = ModelRegistry.load(make_tiny_models(directory, weights=weights))
    return tuple(registry.entry(base) for base in registry.bases)


def simulated_rig(directory: Path) -> EngineRig:
    settings = SimulatedSettings(
        time_scale=0.2, cold_activation_s=0.1, warm_activation_s=0.05, crash_on_token=CRASH_TOKEN
    )
    entries = tiny_entries(directory, weights=False)
    engine = SimulatedEngine(entries, settings, SystemClock())

    async def kill() -> None:
        with pytest.raises(EngineError, match="injected"):
            await EngineRig(engine, kill).ask((CRASH_TOKEN,), greedy())

    return EngineRig(engine, kill, entries)


def vllm_rig(
    directory: Path, engine_args: Mapping[str, Any] | None = None, **fields: Any
) -> EngineRig:
    """vLLM with its own scheduling, unless *fields* of its settings override it."""
    reason = vllm_unavailable_reason()
    if reason is not None:
        absent(reason, "vllm")
    defaults = {
        "log_path": str(directory / "vllm.log"),
        "policy": "stock",
        # For all devices: equal answers need exact arithmetic, and a GPU holds several engines.
        "dtype": "float32",
        "kv_cache_bytes": 128 << 20,
    }
    settings = VllmSettings(**(defaults | fields))
    # Only a condition for the start on a GPU, if the KV has a fixed size.
    shared = {"gpu_memory_utilization": 0.2}
    entries = tuple(
        msgspec.structs.replace(entry, engine_args=entry.engine_args | shared | (engine_args or {}))
        for entry in tiny_entries(directory, weights=True)
    )
    engine = VllmEngine(entries, settings)

    return EngineRig(engine, partial(kill_cores, engine), entries)


async def kill_cores(engine: VllmEngine) -> None:
    """Kill the engine cores of *engine*; the host survives."""
    assert engine.host_pid is not None
    cores = [pid for pid in group_members(engine.host_pid) if is_engine_core(pid)]
    assert cores
    for pid in cores:
        with suppress(ProcessLookupError):  # the process has ended meanwhile
            os.kill(pid, signal.SIGKILL)
    async with asyncio.timeout(10):
        while any(is_engine_core(pid) for pid in group_members(engine.host_pid)):
            await asyncio.sleep(0.01)


def vllm_policy_rig(directory: Path) -> EngineRig:
    """vLLM with a Headway policy in its engine core."""
    return vllm_rig(directory, policy="qoserve")


def vllm_as_on_gpu_rig(directory: Path) -> EngineRig:
    """vLLM with the defaults of a GPU that work on a CPU: compiled models, asynchronous."""
    cache = directory / "compiled"
    # Not the user's cache, so that the first start compiles.
    python = python_with(directory, VLLM_CACHE_ROOT=str(cache))
    rig = vllm_rig(directory, policy="qoserve", eager=False, async_scheduling=True, python=python)
    return replace(rig, compile_cache=cache)


def vllm_two_devices_rig(directory: Path) -> EngineRig:
    """vLLM with a policy and the model spread over two devices, or two workers on a CPU."""
    # VLLM's processes wait for each other by yielding the CPU in a loop. On two cores, some kernels
    # then do not let the test run for seconds, until a request has ended.
    patches = directory / "patches"
    patches.mkdir()
    (patches / "sitecustomize.py").write_text(SLEEPING_YIELD)
    # Without TORCHDYNAMO_DISABLE, the first request waits for the compilation of a function.
    python = python_with(directory, TORCHDYNAMO_DISABLE="1", PYTHONPATH=f"{patches}:$PYTHONPATH")
    return vllm_rig(directory, {"tensor_parallel_size": 2}, policy="qoserve", python=python)


def python_with(directory: Path, **variables: str) -> str:
    """
    Path of a new interpreter of engine hosts, with additional environment *variables*, whose values
    a shell expands.
    """
    assignments = " ".join(f"{name}={value}" for name, value in variables.items())
    python = directory / "python"
    python.write_text(f'#!/bin/sh\n{assignments} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return str(python)


RIGS: dict[str, Callable[[Path], EngineRig]] = {
    "simulated": simulated_rig,
    "vllm": vllm_rig,
    "vllm-policy": vllm_policy_rig,
    "vllm-as-on-gpu": vllm_as_on_gpu_rig,
    "vllm-two-devices": vllm_two_devices_rig,
}


def group_members(group: int) -> list[int]:
    """Processes of the process group, without zombies."""
    members = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, member_of = stat.read_text().rpartition(")")[2].split()[:3]
        except (FileNotFoundError, ProcessLookupError):
            continue  # the process has ended meanwhile
        if int(member_of) == group and state != "Z":
            members.append(int(stat.parent.name))
    return members


def is_engine_core(pid: int) -> bool:
    """Return whether *pid* is named a vLLM engine core; ended processes are not."""
    try:
        return b"EngineCore" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return False
