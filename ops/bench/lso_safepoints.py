"""
Preemption between layers on real vLLM: gain for an online arrival, and cost.

Two engines with one policy alternate under equal loads: one engine has safepoints, the other
preempts only between iterations. TTFT is measured in wall-clock time. The cost of safepoints is
CPU time of the engine's main thread, because wall-clock time is too noisy on a busy machine.
"""

import asyncio
import contextlib
import random

import numpy as np

from ops.bench.lso_engines import (
    ITERATIONS,
    LARGEST_BUDGET,
    WHOLE,
    Overhead,
    activate,
    answer,
    in_turn,
    prompt_of,
    request,
)
from ops.bench.progress import say
from ops.bench.result import Line, Result, interval, quantiles_ms
from services.agent.backends.vllm.front.backend import VllmEngine
from shared.contracts.base import ModelName, Seconds
from shared.contracts.qos import Slo

ARMS = (WHOLE, ITERATIONS)
OFFLINE_TOKENS, ONLINE_TOKENS = 8000, 32
MAX_TTFT_RATIO = 0.6
TARGET_OVER_ALONE, TARGET_OVER_ITERATION = 3.0, 0.25
"""
Factors of the TTFT target, on an idle engine's TTFT and on the time of an offline iteration.

The larger product is the target: the engine can meet it, but not if the request waits for the
end of the iteration.
"""
GAP_S = (0.2, 0.6)
"""
Range of the time from an online answer to the next online arrival; offline work runs during this
time.
"""
SMALL_BUDGET = 128
"""
Token budget for measuring the overhead of safepoints; short, equal iterations show the overhead
best.
"""


async def first_tokens(engine: VllmEngine, result: Result, *, seed: int, quick: bool) -> None:
    """
    Measure the TTFT of short online requests that arrive while long offline prompts are computed.
    """
    rounds, arrivals, repeats = (1, 10, 1) if quick else (8, 40, 4)
    alone = [await _alone_s(engine, name, repeats=repeats) for name in ARMS]
    ttft_s = max(
        TARGET_OVER_ALONE * max(online_s for online_s, _ in alone),
        TARGET_OVER_ITERATION * max(offline_s for _, offline_s in alone),
    )
    await engine.activate(WHOLE)
    before = engine.snapshot().scheduling
    yields_s: list[Seconds] = []
    ttfts_s: dict[ModelName, list[list[Seconds]]] = {name: [] for name in ARMS}
    for number in range(rounds):
        for name in in_turn(ARMS, number):
            chance = random.Random(seed + number)
            found_s, yielded_s = await _arrivals_s(engine, name, arrivals, ttft_s, chance)
            ttfts_s[name].append(found_s)
            yields_s += yielded_s
        say(f"first tokens beside a large prefill: round {number + 1} of {rounds}")
    await engine.activate(WHOLE)
    scheduling = engine.snapshot().scheduling
    all_s = {name: [value for each in rows for value in each] for name, rows in ttfts_s.items()}
    result.figures["TTFT target, ms"] = 1000 * ttft_s
    for name, values in all_s.items():
        result.figures[f"TTFT, {name}, ms"] = quantiles_ms(values)
    result.figures["arrival to yield, ms"] = quantiles_ms(yields_s) if yields_s else "no cut"
    result.figures["cuts"] = scheduling.layer_preemptions - before.layer_preemptions
    result.figures["dropped tokens"] = scheduling.dropped_tokens - before.dropped_tokens
    p99_s = {name: float(np.quantile(values, 0.99)) for name, values in all_s.items()}
    result.figures["P99 TTFT, layers / iterations, 95 %"] = interval(
        [
            float(np.quantile(with_, 0.99) / np.quantile(without, 0.99))
            for with_, without in zip(ttfts_s[WHOLE], ttfts_s[ITERATIONS], strict=True)
        ]
    )
    result.lines.append(
        Line(
            name="P99 TTFT in a large offline prefill, between layers / between iterations",
            # A quick run has ten arrivals, too few for a 99th percentile.
            value=None if quick else p99_s[WHOLE] / p99_s[ITERATIONS],
            bound=MAX_TTFT_RATIO,
        )
    )


async def _alone_s(
    engine: VllmEngine, model: ModelName, *, repeats: int
) -> tuple[Seconds, Seconds]:
    """
    Median TTFT of an online prompt, and of a full iteration, on an idle engine.

    The requests also train the engine's latency model.
    """
    await activate(engine, model, LARGEST_BUDGET)
    for length in (256, 1024, 2048, OFFLINE_TOKENS) * repeats:
        await answer(engine, request(model, prompt_of(length), output=16))
    alone_s = []
    for length, times in ((ONLINE_TOKENS, 5 * repeats), (LARGEST_BUDGET, repeats)):
        found = [await answer(engine, request(model, prompt_of(length))) for _ in range(times)]
        alone_s.append(float(np.median(found)))
    return alone_s[0], alone_s[1]


async def _arrivals_s(
    engine: VllmEngine, model: ModelName, num: int, ttft_s: Seconds, chance: random.Random
) -> tuple[list[Seconds], list[Seconds]]:
    """
    TTFT of *num* consecutive requests while two offline prompts are always running.

    Returns:
        TTFTs; and for each request that caused preemptions, their mean time from demand to
        safepoint.
    """
    await activate(engine, model, LARGEST_BUDGET)
    offline = [asyncio.create_task(_offline_forever(engine, model)) for _ in range(2)]
    found, yields_s = [], []
    before = engine.snapshot().scheduling
    for _ in range(num):
        await asyncio.sleep(chance.uniform(*GAP_S))
        slo = Slo(ttft_s=ttft_s, tbt_s=10.0)
        found.append(await answer(engine, request(model, prompt_of(ONLINE_TOKENS), slo=slo)))
        after = engine.snapshot().scheduling
        if cuts := after.layer_preemptions - before.layer_preemptions:
            yields_s += [(after.yield_s - before.yield_s) / cuts] * cuts
        before = after
    for task in offline:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    return found, yields_s


async def _offline_forever(engine: VllmEngine, model: ModelName) -> None:
    while True:
        await answer(engine, request(model, prompt_of(OFFLINE_TOKENS)))


async def _short_iterations(engine: VllmEngine, model: ModelName) -> None:
    await activate(engine, model, SMALL_BUDGET)
    await asyncio.gather(
        *(answer(engine, request(model, prompt_of(256, first), output=64)) for first in range(8))
    )


OVERHEAD = Overhead(
    arms=ARMS,
    work=_short_iterations,
    mix="8 at once of 256 prompt and 64 answer tokens, never cut",
    name="safepoints / none",
    bound=1.02,
    pairs=12,
)
