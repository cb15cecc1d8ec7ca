"""The arms of the LSO benchmark: one model, with and without each mechanism."""

import contextlib
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import msgspec

from ops.bench.given_model import given_model
from ops.bench.progress import say
from ops.bench.result import Line, Result, interval
from ops.devices import gpus
from ops.engine_runs import generate
from services.agent.backends.base import EngineRequest, SchedulingParameters
from services.agent.backends.settings import VllmSettings
from services.agent.backends.vllm.front.backend import VllmEngine
from shared.contracts.base import ModelName, RequestId, Seconds
from shared.contracts.errors import SettingsError
from shared.contracts.models import ModelEntry
from shared.contracts.requests import Sampling, Tokens
from shared.models.registry import ModelRegistry
from shared.models.tiny import make_tiny_models
from shared.models.tiny_weights import TinyArchitecture

WHOLE = ModelName("whole")
"""Name of the arm with safepoints and checkpoints, the default of the engine."""
ITERATIONS = ModelName("iterations")
"""Name of the arm without safepoints, which preempts only between iterations."""
NO_COPIES = ModelName("no-copies")
"""Name of the arm without checkpoints, which keeps no KV in host memory."""
ARMS: dict[ModelName, dict[str, Any]] = {
    WHOLE: {},
    ITERATIONS: {
        "scheduler_cls": "services.agent.backends.vllm.core.policy_scheduler.PolicyScheduler",
        "worker_cls": "services.agent.backends.vllm.worker.cpu.CpuWorker",
    },
    NO_COPIES: {"kv_transfer_config": None},
}
BASE = ModelName("deep-llama")
DEEP = TinyArchitecture(
    architecture="LlamaForCausalLM",
    model_type="llama",
    seed=1,
    hidden_size=64,
    intermediate_size=176,
    num_layers=16,
    head_size=32,
)
"""
Model with as many layers as small production models, so that its safepoints are several layers
apart.
"""
LARGEST_BUDGET, MAX_RUNNING, MAX_MODEL_LEN = 2048, 64, 8192
_ids = count()


GPU_KV_BYTES = 4 << 30
"""KV memory of each engine on a GPU, which several engines share."""
GPU_SHARE = 0.3
"""Share of a GPU's memory that must be free when an engine starts."""


@asynccontextmanager
async def engines(
    directory: Path, others: Sequence[ModelEntry], *, given: Path | None = None
) -> AsyncIterator[VllmEngine]:
    """
    Open one backend with the engines of all arms, which also serves *others*; engine output goes to
    a file.

    Args:
        directory: For models and output.
        others: Further models.
        given: Folder of the model of all arms; None: a tiny model with many layers.
    """
    directory.mkdir(parents=True, exist_ok=True)
    if given is None:
        base = ModelRegistry.load(make_tiny_models(directory, models={BASE: DEEP})).entry(BASE)
    else:
        base = given_model(given, BASE)
        if base.max_model_len < MAX_MODEL_LEN:
            raise SettingsError(
                f"--model {given}: its maximum length is {base.max_model_len} tokens; the bench "
                f"lso needs {MAX_MODEL_LEN}"
            )
    settings = VllmSettings(
        token_budget=LARGEST_BUDGET,
        max_running=MAX_RUNNING,
        warm_bytes=len(ARMS) << 30,
        # Every prompt must be computed, without reuse of cached KV.
        prefix_caching=False,
        kv_cache_bytes=GPU_KV_BYTES if gpus() else None,
        log_path=str(directory / "vllm.log"),
    )
    entries = [*(_variant(base, name) for name in ARMS), *map(sharing_gpu, others)]
    engine = VllmEngine(entries, settings)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()


async def activate(engine: VllmEngine, model: ModelName, token_budget: int) -> None:
    """Activate the engine of an arm, with the token budget *token_budget*."""
    await engine.activate(model)
    await engine.set_scheduling(
        SchedulingParameters(token_budget=token_budget, max_running=MAX_RUNNING)
    )


def request(model: ModelName, prompt: Tokens, **fields: Any) -> EngineRequest:
    """
    A greedy request with *fields* of `EngineRequest`; `output` is its number of tokens (default:
    1).
    """
    sampling = Sampling(max_tokens=fields.pop("output", 1), temperature=0.0, ignore_eos=True)
    return EngineRequest(
        request_id=RequestId(f"bench-{next(_ids)}"),
        model=model,
        prompt=prompt,
        sampling=sampling,
        arrived_at=time.time(),
        **fields,
    )


async def answer(engine: VllmEngine, asked: EngineRequest) -> Seconds:
    """Serve one request; return the TTFT of the request."""
    begun = time.perf_counter()
    first_s: Seconds | None = None
    async for _ in generate(engine, asked):
        first_s = first_s or time.perf_counter() - begun
    return first_s or 0.0


def prompt_of(length: int, first: int = 0) -> Tokens:
    """
    A prompt of *length* token ids; two prompts with different *first* differ from the first token
    on.
    """
    return tuple(10 + (first + 7 * index) % 490 for index in range(length))


def in_turn(names: Sequence[ModelName], number: int) -> Sequence[ModelName]:
    """The *names* of arms in order; the order is reversed in every second round."""
    return names if number % 2 == 0 else names[::-1]


async def renew(engine: VllmEngine, names: Sequence[ModelName]) -> None:
    """
    Start new engines for two arms.

    The memory layout of a process stays the same for its life, and can change CPU times as much as
    the measured effect.
    """
    for name in names:
        await engine.activate(name)
        for other in names:
            if other != name:
                await engine.cool(other)
    for name in names:
        await engine.activate(name)


async def thread_of(engine: VllmEngine, model: ModelName) -> Path:
    """The engine core's main thread: the busiest thread in two consecutive tests of *model*."""
    await engine.activate(model)
    found: Path | None = None
    while (busiest := await _busiest(engine, model)) != found:
        found = busiest
    return busiest


@dataclass(frozen=True, slots=True, kw_only=True)
class Overhead:
    """
    Overhead of a mechanism: ratio of the CPU times of the engine's main thread for equal work.
    """

    arms: tuple[ModelName, ModelName]
    """The arm with the mechanism, and the arm without the mechanism."""
    work: Callable[[VllmEngine, ModelName], Awaitable[None]]
    mix: str
    """Description of the work for which CPU times are compared."""
    name: str
    bound: float
    engines: int = 4
    """Number of engines of each arm that are measured one after another."""
    pairs: int
    """Number of pairs of measurements for each pair of engines."""

    async def measure(self, engine: VllmEngine, result: Result, *, quick: bool) -> None:
        """Measure the overhead, except in a quick run: single pairs differ by more than `bound`."""
        by_engines = [] if quick else [await self._ratios(engine, n) for n in range(self.engines)]
        if by_engines:
            result.figures[f"CPU time, {self.mix}, {self.name}, 95 %"] = [
                interval(each) for each in by_engines
            ]
        medians = [statistics.median(each) for each in by_engines]
        result.lines.append(
            Line(
                name=f"CPU time of the engine's thread, {self.name}, median of engines' medians",
                value=statistics.median(medians) if medians else None,
                bound=self.bound,
            )
        )

    async def _ratios(self, engine: VllmEngine, number: int) -> list[float]:
        if number:
            await renew(engine, self.arms)
        threads = {arm: await thread_of(engine, arm) for arm in self.arms}
        for arm in self.arms:
            await self.work(engine, arm)  # warm-up
        ratios = []
        for turn in range(self.pairs):
            used_s = {}
            for arm in in_turn(self.arms, turn):
                before_s = on_cpu_s(threads[arm])
                await self.work(engine, arm)
                used_s[arm] = on_cpu_s(threads[arm]) - before_s
            ratios.append(used_s[self.arms[0]] / used_s[self.arms[1]])
        say(f"CPU time, {self.name}: engines {number + 1} of {self.engines}")
        return ratios


async def _busiest(engine: VllmEngine, model: ModelName) -> Path:
    """The main thread of the engine's processes that uses the most CPU time in a long prefill."""
    threads = [path for pid in _group_members(engine.host_pid or 0) for path in _main_thread(pid)]
    before = {path: on_cpu_s(path) for path in threads}
    await answer(engine, request(model, prompt_of(LARGEST_BUDGET), output=64))
    return max(threads, key=lambda path: on_cpu_s(path) - before[path])


def on_cpu_s(thread: Path) -> Seconds:
    """CPU time that *thread* has used."""
    return 1e-9 * int(thread.read_text().split()[0])


def _main_thread(pid: int) -> list[Path]:
    path = Path(f"/proc/{pid}/task/{pid}/schedstat")
    return [path] if path.exists() else []


def _group_members(group: int) -> list[int]:
    members = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if int(stat.read_text().rpartition(")")[2].split()[2]) == group:
                members.append(int(stat.parent.name))
    return members


def _variant(base: ModelEntry, name: ModelName) -> ModelEntry:
    return msgspec.structs.replace(
        sharing_gpu(base),
        name=name,
        max_model_len=MAX_MODEL_LEN,
        engine_args=base.engine_args | ARMS[name],
    )


def sharing_gpu(entry: ModelEntry) -> ModelEntry:
    """The model with an engine that starts beside others on a GPU; unchanged on a CPU."""
    if not gpus():
        return entry
    shared = {"gpu_memory_utilization": GPU_SHARE}
    return msgspec.structs.replace(entry, engine_args=entry.engine_args | shared)
