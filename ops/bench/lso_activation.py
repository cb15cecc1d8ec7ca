"""Benchmark of the time to activate a model by each path, compared with a stock cold start."""

import asyncio
import json
import os
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec

from ops.bench.given_model import given_model
from ops.bench.lso_engines import ARMS, GPU_KV_BYTES, GPU_SHARE
from ops.bench.progress import say
from ops.bench.result import Line, Result, interval
from ops.devices import gpus
from ops.engine_runs import generate
from services.agent.backends.base import EngineRequest
from services.agent.backends.vllm.front.backend import VllmEngine
from shared.contracts.base import ModelName, RequestId, Seconds
from shared.contracts.errors import EngineError
from shared.contracts.models import ModelEntry
from shared.contracts.requests import Sampling

MOST_OF_STOCK, MOST_OF_FORK = 0.1, 0.5
LLAMA, TWIN, QWEN = ModelName("tiny-llama"), ModelName("tiny-llama-b"), ModelName("tiny-qwen")
_PROMPT = tuple(range(10, 74))

STOCK, FORK = "stock cold start", "fork cold start"


async def measure(engine: VllmEngine, result: Result, stock: ModelEntry, *, quick: bool) -> None:
    """
    Measure each path in turn: seconds from the decision to the first token of an answer.

    Args:
        engine: An engine whose registry has the tiny models.
        result: The result, to which figures and lines are added.
        stock: Arguments of the stock engine.
        quick: Measure once, and without the stock cold start, which takes most of a minute.
    """
    rounds = 1 if quick else 5
    taken: dict[str, list[Seconds]] = {}
    await _activated(engine, LLAMA)
    for model in ARMS:
        await engine.cool(model)
    for number in range(rounds):
        for path, step in _steps(engine, stock).items():
            if not (quick and path == STOCK):
                taken.setdefault(path, []).append(await step())
        say(f"activation: round {number + 1} of {rounds}")
    _judge(result, taken)


def given(directory: Path) -> list[ModelEntry]:
    """
    The model in *directory* under the names of the tiny models; the third has another shape, so
    that no other engine can load its weights.
    """
    entry = given_model(directory, LLAMA)
    other = msgspec.structs.replace(entry, name=QWEN, max_model_len=entry.max_model_len - 64)
    return [entry, msgspec.structs.replace(entry, name=TWIN), other]


def _steps(engine: VllmEngine, entry: ModelEntry) -> dict[str, Callable[[], Awaitable[Seconds]]]:
    """
    Timed activations by path; before and after each of them, only LLAMA is active (not timed).
    """

    async def to(model: ModelName) -> Seconds:
        taken_s = await _activated(engine, model)
        await _alone(engine)
        return taken_s

    async def parked() -> Seconds:
        await engine.warm(QWEN)
        return await to(QWEN)

    return {
        "reload": lambda: to(TWIN),
        "parked": parked,
        FORK: lambda: to(QWEN),
        STOCK: lambda: _stock(entry),
    }


async def _alone(engine: VllmEngine) -> None:
    await engine.activate(LLAMA)
    for model in (TWIN, QWEN):
        await engine.cool(model)


async def _activated(engine: VllmEngine, model: ModelName) -> Seconds:
    begun = time.perf_counter()
    await engine.activate(model)
    request = EngineRequest(
        request_id=RequestId(f"first-{begun}"),
        model=model,
        prompt=_PROMPT,
        sampling=Sampling(max_tokens=1, temperature=0.0, ignore_eos=True),
    )
    async for _ in generate(engine, request):
        pass  # one token and the end of the stream
    return time.perf_counter() - begun


async def _stock(entry: ModelEntry) -> Seconds:
    """Start a separate process of unmodified vLLM with the same model, dtype and KV size."""
    engine_args: dict[str, object] = {
        "model": entry.path,
        "max_model_len": entry.max_model_len,
        "skip_tokenizer_init": True,
    }
    if gpus():
        engine_args |= {
            "kv_cache_memory_bytes": GPU_KV_BYTES,
            "gpu_memory_utilization": GPU_SHARE,
        }
    else:
        engine_args |= {
            "enforce_eager": True,
            "dtype": "float32",
            "kv_cache_memory_bytes": 128 << 20,
            "block_size": 32,
        }
    begun = time.time()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "ops.bench.stock_start", json.dumps(engine_args)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=os.environ
        | {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "OMP_NUM_THREADS": "1",
           "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "ERROR"},
    )  # fmt: skip
    output, errors = await process.communicate()
    if process.returncode:
        raise EngineError(f"stock vLLM did not start: {errors.decode()[-500:]}")
    return float(output.split()[-1]) - begun


def _judge(result: Result, taken: dict[str, list[Seconds]]) -> None:
    for path, seconds in taken.items():
        result.figures[f"activation to first token, {path}, s"] = interval(seconds)
    for name, most in ((STOCK, MOST_OF_STOCK), (FORK, MOST_OF_FORK)):
        ratios = {
            path: statistics.median(a / b for a, b in zip(taken[path], taken[name], strict=True))
            for path in taken
            if path not in (STOCK, FORK) and name in taken
        }
        result.figures[f"activation, over {name}"] = ratios
        result.lines.append(
            Line(
                name=f"activation, best path within budget / {name}",
                value=min(ratios.values(), default=None),
                bound=most,
            )
        )
