"""
KV checkpoints on real vLLM: time of restoring against recomputing, and the cost of copying.

A request is aborted and resumed in the same engine. In one arm its KV is in host memory, in the
other arm it is lost; prefix caching is off. The cost of copying is CPU time of the engine's main
thread for equal work.
"""

import asyncio
import statistics
from collections.abc import Mapping, Sequence

from ops.bench.lso_engines import (
    LARGEST_BUDGET,
    NO_COPIES,
    WHOLE,
    Overhead,
    activate,
    answer,
    in_turn,
    prompt_of,
    request,
)
from ops.bench.progress import say
from ops.bench.result import Result, interval
from ops.engine_runs import generate
from services.agent.backends.vllm.front.backend import VllmEngine
from shared.contracts.base import ModelName, Seconds

ARMS = (WHOLE, NO_COPIES)
CONTEXTS = (64, 128, 256, 512, 1024, 2048, 4096, 8000)
_TAIL = 64
"""
Number of tokens generated before the abort; meanwhile the engine saves the request's KV blocks.
"""


async def restoring(engine: VllmEngine, result: Result, *, quick: bool) -> None:
    """
    Measure the time from resuming a request to its next token, by the context that must be restored
    or recomputed.
    """
    contexts = CONTEXTS[3:6:2] if quick else CONTEXTS
    rounds = 1 if quick else 7
    taken_s: dict[tuple[ModelName, int], list[Seconds]] = {}
    for number in range(rounds):
        for name in in_turn(ARMS, number):
            await activate(engine, name, LARGEST_BUDGET)
            for context in contexts:
                resumed_s = await _resumed_s(engine, name, context, first=number)
                taken_s.setdefault((name, context), []).append(resumed_s)
        say(f"restoring against recomputing: round {number + 1} of {rounds}")
    medians = {key: statistics.median(values) for key, values in taken_s.items()}
    for context in contexts:
        ratios = [
            restored / computed
            for restored, computed in zip(
                taken_s[WHOLE, context], taken_s[NO_COPIES, context], strict=True
            )
        ]
        result.figures[f"resume with {context} tokens of context"] = {
            "restored, ms": 1000 * medians[WHOLE, context],
            "computed, ms": 1000 * medians[NO_COPIES, context],
            "ratio": interval(ratios),
        }
    result.figures["context tokens from which restoring is faster"] = _crossover(contexts, medians)


async def _resumed_s(engine: VllmEngine, model: ModelName, context: int, *, first: int) -> Seconds:
    """Abort a request that has *context* tokens, and resume the request."""
    asked = request(
        model, prompt_of(max(1, context - _TAIL), first), output=2 * _TAIL, checkpointed=True
    )
    progress: list[int] = []
    async for output in generate(engine, asked):
        progress += output.token_ids
        if len(asked.prompt) + len(progress) >= context:
            break
    engine.abort(asked.request_id)
    while engine.snapshot().kv_utilization:
        await asyncio.sleep(0.001)
    again = request(
        model,
        asked.prompt,
        progress=tuple(progress),
        output=len(progress) + 1,
        checkpointed=True,
    )
    return await answer(engine, again)


async def _much_new_kv(engine: VllmEngine, model: ModelName) -> None:
    await activate(engine, model, LARGEST_BUDGET)
    work = [
        answer(engine, request(model, prompt_of(800, first), output=100, checkpointed=True))
        for first in range(8)
    ]
    await asyncio.gather(*work)


COPYING = Overhead(
    arms=ARMS,
    work=_much_new_kv,
    mix="8 at once of 800 prompt and 100 answer tokens",
    name="KV copied / not",
    bound=1.05,
    pairs=6,
)
"""Load that generates as much new KV as possible, for measuring the cost of copying KV."""


def _crossover(
    contexts: Sequence[int], medians: Mapping[tuple[ModelName, int], Seconds]
) -> int | None:
    """Smallest measured context from which restoring is always faster than recomputing."""
    slower = [c for c in contexts if medians[WHOLE, c] >= medians[NO_COPIES, c]]
    after = [c for c in contexts if not slower or c > max(slower)]
    return min(after, default=None)
