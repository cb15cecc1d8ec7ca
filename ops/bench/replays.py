"""
Benchmark of streams that are continued: how long an engine host makes the events of known tokens
again, and what other streams notice of it.

The answer of a chat has 8,000 tokens of an earlier run. Their events are made again in steps of
four tokens, as a stream without parsers has, and in steps of one, as a stream with parsers has.
"""

import asyncio
import contextlib
import json
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable
from itertools import count
from pathlib import Path
from random import Random

import msgspec

from ops.bench.progress import say
from ops.bench.result import Line, Result
from ops.engine_runs import generate
from services.agent.backends.base import EngineCall, EngineRequest
from services.agent.backends.settings import VllmSettings
from services.agent.backends.vllm.front.backend import VllmEngine
from shared.contracts.base import ModelName, RequestId, Seconds
from shared.contracts.requests import FinishReason, Progress, Sampling, StepDetails
from shared.models.registry import ModelRegistry
from shared.models.tiny import TINY_MODELS, make_tiny_models

MODEL = ModelName("tiny-llama")
CHAT = "/v1/chat/completions"
LENGTH, NUM_TOKENS = 9_000, 8_000
"""Length of the model's context, and of the answer that is continued."""
FIRST_ID, LAST_ID = 300, 1_000
"""Range of the token ids of the answer, none of which is special."""
STEPS = (4, 1)
ALONE_S: Seconds = 3.0
MOST_REPLAY_S, MOST_GAP_S = 1.0, 0.1
_ids = count()


async def run(*, seed: int, quick: bool, broker: str | None) -> Result:  # noqa: ARG001 - no broker is used
    """Run the benchmark; a quick run has one round instead of five."""
    result = Result(name="replays", seed=seed, quick=quick)
    with tempfile.TemporaryDirectory() as directory:
        async with _engine(Path(directory)) as engine:
            await _replayed(engine, _answer(seed, STEPS[0]))  # makes the application
            replays: dict[int, list[Seconds]] = {size: [] for size in STEPS}
            gaps: list[Seconds] = []
            alone = await _gaps_beside(engine, asyncio.sleep(ALONE_S))
            for number in range(1 if quick else 5):
                for size in STEPS:
                    answer = _answer(seed + number, size)
                    replaying = _timed(engine, answer, replays[size])
                    gaps.append(max(await _gaps_beside(engine, replaying)))
                    say(f"steps of {size}: {replays[size][-1]:.3f} s, gap {gaps[-1]:.3f} s")
    medians = {size: statistics.median(times) for size, times in replays.items()}
    result.figures |= {
        "longest gap of another stream without a replay, s": round(max(alone), 3),
        "longest gaps of another stream beside a replay, s": [round(gap, 3) for gap in gaps],
    } | {
        f"replay of {NUM_TOKENS} tokens in steps of {size}, s": round(median, 3)
        for size, median in medians.items()
    }
    result.lines += [
        Line(name="replay of 8,000 tokens, s", value=max(medians.values()), bound=MOST_REPLAY_S),
        Line(
            name="gap of another stream, s, median of the rounds",
            value=statistics.median(gaps),
            bound=MOST_GAP_S,
        ),
    ]
    return result


@contextlib.asynccontextmanager
async def _engine(directory: Path) -> AsyncIterator[VllmEngine]:
    """An engine of a model with a context of `LENGTH` tokens."""
    registry = make_tiny_models(directory, models={MODEL: TINY_MODELS[MODEL]})
    path = directory / MODEL / "config.json"
    config = json.loads(path.read_text()) | {"max_position_embeddings": LENGTH}
    path.write_text(json.dumps(config))
    entry = msgspec.structs.replace(ModelRegistry.load(registry).entry(MODEL), max_model_len=LENGTH)
    engine = VllmEngine((entry,), VllmSettings(log_path=str(directory / "vllm.log")))
    try:
        await engine.start()
        await engine.activate(MODEL)
        yield engine
    finally:
        await engine.close()


def _answer(seed: int, size: int) -> Progress:
    """A complete answer in steps of *size* tokens."""
    random = Random(seed)
    return Progress(
        token_ids=tuple(random.randint(FIRST_ID, LAST_ID) for _ in range(NUM_TOKENS)),
        details=(StepDetails(size),) * (NUM_TOKENS // size),
        finish_reason=FinishReason.LENGTH,
    )


async def _timed(engine: VllmEngine, answer: Progress, times: list[Seconds]) -> None:
    begun = time.perf_counter()
    await _replayed(engine, answer)
    times.append(time.perf_counter() - begun)


async def _replayed(engine: VllmEngine, answer: Progress) -> None:
    """Continue a chat whose answer is complete."""
    async for output in generate(engine, _chat(NUM_TOKENS, (answer,))):
        if output.response is not None and len(output.details) <= len(answer.details):
            raise AssertionError("the events of a step are missing")


async def _gaps_beside(engine: VllmEngine, other: Awaitable[None]) -> list[Seconds]:
    """Times between the events of a stream that runs beside *other*."""
    gaps: list[Seconds] = []

    async def stream() -> None:
        last = None
        async for output in generate(engine, _chat(NUM_TOKENS, ())):
            now = time.perf_counter()
            if output.token_ids:
                gaps.append(now - (now if last is None else last))
                last = now

    streaming = asyncio.create_task(stream())
    while len(gaps) < 10:
        await asyncio.sleep(0.01)
    del gaps[:]
    await other
    last_gaps = len(gaps)
    while len(gaps) <= last_gaps:  # the gap in which the replay has ended
        await asyncio.sleep(0.01)
    streaming.cancel()
    await asyncio.wait({streaming})
    return gaps


def _chat(max_tokens: int, children: tuple[Progress, ...]) -> EngineRequest:
    name = RequestId(f"chat-{next(_ids)}")
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Count to eight thousand."}],
        "max_tokens": max_tokens,
        "ignore_eos": True,
    }
    return EngineRequest(
        request_id=name,
        origin=name,
        model=MODEL,
        prompt=(),
        sampling=Sampling(),
        arrived_at=time.time(),
        call=EngineCall(
            endpoint=CHAT, body=json.dumps(body).encode(), events=True, seed=1, children=children
        ),
    )
