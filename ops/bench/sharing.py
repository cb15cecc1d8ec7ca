"""
Benchmark of how instances share a burst of one model.

Two instances have different models active; 120 requests of the first instance's model arrive at
once. With one instance alone, the burst takes many times as long as an activation, so that the
other one should take its share.
"""

import asyncio
import random
import time
from collections import Counter
from dataclasses import dataclass

from ops.bench.meshes import bench_mesh, bench_producer, simulated_agent
from ops.bench.progress import say
from ops.bench.result import Line, Result
from services.agent.backends.settings import SimulatedSettings
from shared.contracts.base import Seconds
from shared.contracts.ingress import InferenceRequest
from shared.contracts.qos import Slo
from shared.contracts.requests import ReplyMode, RequestCompleted
from shared.producer.producer import Producer

MODEL, OTHER = "tiny-llama", "tiny-llama-b"
TIME_SCALE = 3.0
BURST, QUICK_BURST = 120, 60
PROMPT_WORDS, ANSWER_TOKENS = 60, 200
ENOUGH_SWAPS = 8
"""Activations that one instance alone must at least take, so that sharing pays."""
LEAST_SHARE, MOST_TIME = 0.40, 0.62
TARGETS = {"no target": Slo(), "ttlt 600 s": Slo(ttlt_s=600.0), "ttlt 20 s": Slo(ttlt_s=20.0)}
SETTLE_S: Seconds = 3.0
"""Time for profiles and the first plan."""


@dataclass(frozen=True, slots=True)
class Burst:
    """What became of one burst."""

    duration_s: Seconds
    """Time until the last answer."""
    served: Counter[str]
    """Instance -> number of answers."""

    @property
    def least_share(self) -> float:
        """Share of the requests on the instance with fewer of them."""
        return min(self.served.values()) / self.served.total() if len(self.served) > 1 else 0.0


async def run(*, seed: int, quick: bool, broker: str | None) -> Result:
    """Run the benchmark; a quick run has one burst of half the size."""
    result = Result(name="sharing", seed=seed, quick=quick)
    names, limits = (("no target",), (8,)) if quick else (tuple(TARGETS), (8, 64))
    size = QUICK_BURST if quick else BURST
    shares: list[float] = []
    ratios: list[float] = []
    for max_running in limits:
        settings = SimulatedSettings(max_running=max_running, time_scale=TIME_SCALE)
        swap_s = TIME_SCALE * settings.cold_activation_s
        alone, both = [
            await _measured(broker, settings, num_agents=number, names=names, size=size, seed=seed)
            for number in (1, 2)
        ]
        for name in names:
            one, two = alone[name], both[name]
            result.figures[f"{max_running} running, {name}"] = {
                "one instance, s": round(one.duration_s, 1),
                "two instances, s": round(two.duration_s, 1),
                "answers of each": sorted(two.served.values(), reverse=True),
            }
            if one.duration_s >= ENOUGH_SWAPS * swap_s:
                shares.append(two.least_share)
                ratios.append(two.duration_s / one.duration_s)
    result.lines += [
        Line(
            name="share of a burst on the busier of two instances",
            value=1.0 - min(shares) if shares else None,
            bound=1.0 - LEAST_SHARE,
        ),
        Line(
            name="time of a burst, two instances / one",
            value=max(ratios, default=None),
            bound=MOST_TIME,
        ),
    ]
    return result


async def _measured(
    broker: str | None,
    settings: SimulatedSettings,
    *,
    num_agents: int,
    names: tuple[str, ...],
    size: int,
    seed: int,
) -> dict[str, Burst]:
    """Target -> its burst on a new mesh with this number of instances."""
    found = {}
    for name in names:
        agents = tuple(
            simulated_agent(f"agent-{number}", settings, model)
            for number, model in enumerate((MODEL, OTHER)[:num_agents])
        )
        async with bench_mesh(broker, agents) as mesh, bench_producer(mesh) as producer:
            await asyncio.sleep(SETTLE_S)
            found[name] = await _burst(producer, TARGETS[name], size, random.Random(seed))
        say(f"{settings.max_running} running, {name}, {num_agents}: {found[name]}")
    return found


async def _burst(producer: Producer, slo: Slo, size: int, chance: random.Random) -> Burst:
    began_at = time.monotonic()

    async def one(prompt: str) -> str:
        request = InferenceRequest(
            model=MODEL,
            prompt=prompt,
            max_tokens=ANSWER_TOKENS,
            temperature=0.0,
            ignore_eos=True,
            slo=slo,
        )
        final = await (await producer.submit(request, reply=ReplyMode.FINAL)).final()
        assert isinstance(final, RequestCompleted), final
        return str(final.instance_id)

    prompts = [" ".join(chance.choices("abcdefgh", k=PROMPT_WORDS)) for _ in range(size)]
    served = Counter(await asyncio.gather(*map(one, prompts)))
    return Burst(time.monotonic() - began_at, served)
