"""
Overhead of the mesh over one process with an HTTP server and the same simulated engine.

Clients send text prompts as streamed chat completions, at the same Poisson times and with the same
prompts, to the gateway of a mesh and to `ops.bench.one_process`. Rounds alternate between the two
arms; the bench reports the median, lowest and highest value of each figure over the rounds. The
last part sends all streams concurrently.

CPU time counts every process of the mesh and of RabbitMQ, with children, from the beginning to the
end of a round; nothing is subtracted. While the other arm is measured, the mesh stays up and idle,
and the bench reports its idle CPU time. Other processes of the machine slow the mesh more than the
single process; the bench reports their CPU share by round.
"""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ops.bench.chat import Chat
from ops.bench.cores import OtherLoad
from ops.bench.meshes import MODEL, bench_mesh, simulated_agent
from ops.bench.overhead_arms import BASELINE, MESH, Arm, arms_of, observed_requests
from ops.bench.progress import say
from ops.bench.result import Line, Result, quantiles_ms, spread
from ops.bench.scheduler_cost import LOOP_S, loop_s
from ops.broker import rabbitmq_binary
from services.agent.backends.settings import SimulatedSettings
from shared.contracts.base import Seconds
from shared.contracts.telemetry import RequestObserved
from solver.prediction.latency.latency_model import predict_s

RATE_RPS = 20.0
MAX_TOKENS = 16
TTFT_S = 5.0
STREAMS = 256
STREAM_TTFT_S = 30.0
WARM_UP = 20
"""Number of warm-up requests to each arm before the first round; not part of the figures."""
ADDED_P50_MS = 25.0
ENGINE = SimulatedSettings(max_running=STREAMS, kv_capacity_tokens=1 << 20)
WORDS = ("queue", "request", "engine", "tenant", "token", "planner", "waits", "returns", "measures")
NUM_WORDS = 28
"""Number of words of a prompt, about 64 tokens with the model's chat template."""
STAGES = ("arrived_at", "grouped_at", "pulled_at", "submitted_at", "first_token_at")
STAGE_NAMES = ("gateway and global queue", "lane", "window", "engine")


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """Outcome of one load on one arm of the benchmark."""

    answers: Sequence[Chat]
    cpu_s: Mapping[str, Seconds]
    """CPU time of each process of the arm, by name."""
    took_s: Seconds
    others: float = 0.0
    """Share of this machine's CPU time that was used by processes outside the arm."""

    @property
    def ttfts_s(self) -> list[Seconds]:
        return [each.ttft_s for each in self.answers]

    @property
    def num_tokens(self) -> int:
        """Number of generated tokens of all requests."""
        return sum(each.output_tokens for each in self.answers)


Rounds = Mapping[str, list[Round]]
"""Name of an arm of the benchmark -> rounds of the arm."""


async def run(*, seed: int, quick: bool, broker: str | None) -> Result:
    """Run the benchmark; a quick run has two short rounds instead of five."""
    rounds, requests, tokens = (2, 60, 32) if quick else (5, 200, 128)
    result = Result(name="overhead", seed=seed, quick=quick)
    if broker is None and rabbitmq_binary("rabbitmq-server") is not None:
        broker = "private"  # no other client uses this broker, so all of its CPU time counts
    agents = (simulated_agent("bench", ENGINE),)
    async with bench_mesh(broker, agents) as mesh, arms_of(mesh, MODEL, ENGINE) as arms:
        others = OtherLoad()
        first = {name: await _paced(arm, WARM_UP, seed - 1, others) for name, arm in arms.items()}
        idle = await _idle(arms[MESH])
        loads: Rounds = {name: [] for name in arms}
        streams: Rounds = {name: [] for name in arms}
        loops: list[Seconds] = []
        for number in range(rounds):
            loops.append(float(np.median([loop_s() for _ in range(50)])))
            for name, arm in arms.items():
                loads[name].append(await _paced(arm, requests, seed + number, others))
            say(f"round {number + 1} of {rounds}: {RATE_RPS:g} requests/s")
        for number in range(rounds):
            for name, arm in arms.items():
                streams[name].append(await _at_once(arm, tokens, seed + number, others))
            say(f"round {number + 1} of {rounds}: {STREAMS} streams at once")
        async with observed_requests(mesh) as seen:
            last = await _paced(arms[MESH], requests, seed + rounds, others)
            await asyncio.sleep(1.0)
    tokens_mean = float(np.mean([each.prompt_tokens for each in loads[MESH][0].answers]))
    result.figures["prompt tokens, mean"] = tokens_mean
    result.figures["first token of an idle engine by its profile, ms"] = 1e3 * predict_s(
        ENGINE.latency, compute_tokens=round(tokens_mean), context_tokens=0
    )
    result.figures |= {
        f"first {WARM_UP} requests, TTFT, {name}, ms": quantiles_ms(each.ttfts_s)
        for name, each in first.items()
    }
    report(result, loads, streams, loops)
    result.figures["CPU of the idle mesh, % of a core"] = idle
    result.figures |= stages(last.answers, seen)
    return result


def report(result: Result, loads: Rounds, streams: Rounds, loops: Sequence[Seconds]) -> None:
    """Add the figures and acceptance lines of all rounds."""
    for name, rounds in loads.items():
        for share in (0.5, 0.99):
            values = [_ttft_ms(each, share) for each in rounds]
            result.figures[f"TTFT p{100 * share:g}, {name}, ms"] = spread(values)
    added = {share: _added_ms(loads, share) for share in (0.5, 0.99)}
    for share, values in added.items():
        result.figures[f"added to TTFT p{100 * share:g}, ms"] = spread(values)
    result.figures["added to TTFT p50 by round, ms"] = [round(each, 2) for each in added[0.5]]
    result.figures |= {
        f"CPU of other processes by round, {name}, %": [round(100 * each.others) for each in rounds]
        for name, rounds in loads.items()
    }
    for name, rounds in loads.items():
        result.figures |= _cpu(name, rounds, "ms per request", 1e3, lambda each: len(each.answers))
    total = [1e3 * _total_s(each) / len(each.answers) for each in loads[MESH]]
    result.figures["CPU ms per request, mesh, normalised"] = spread(
        [each / loop * LOOP_S for each, loop in zip(total, loops, strict=True)]
    )
    for name, rounds in streams.items():
        result.figures |= _cpu(name, rounds, "us per token", 1e6, lambda each: each.num_tokens)
        result.figures[f"tokens/s, {STREAMS} streams at once, {name}"] = spread(
            [each.num_tokens / each.took_s for each in rounds]
        )
    different = sum(
        one.text != other.text
        for of in (loads, streams)
        for ours, theirs in zip(of[MESH], of[BASELINE], strict=True)
        for one, other in zip(ours.answers, theirs.answers, strict=True)
    )
    result.lines += [
        Line(
            name="added to TTFT p50, ms, median of rounds",
            value=spread(added[0.5])["median"],
            bound=ADDED_P50_MS,
        ),
        Line(name="answers that differ from one process's", value=different, bound=0),
    ]


def _cpu(
    name: str, rounds: Sequence[Round], unit: str, scale: float, count: Callable[[Round], int]
) -> dict[str, dict[str, float]]:
    """CPU time of each process of an arm, and of all its processes together."""
    found = {
        f"CPU {unit}, {name}, {process}": spread(
            [scale * each.cpu_s[process] / count(each) for each in rounds]
        )
        for process in rounds[0].cpu_s
    }
    total = spread([scale * _total_s(each) / count(each) for each in rounds])
    return {f"CPU {unit}, {name}": total} | found


def _total_s(made: Round) -> Seconds:
    return sum(made.cpu_s.values())


def _ttft_ms(made: Round, share: float) -> float:
    return 1e3 * float(np.quantile(made.ttfts_s, share))


def _added_ms(loads: Rounds, share: float) -> list[float]:
    """TTFT that the mesh adds in each round, in ms, at the quantile *share*."""
    return [
        _ttft_ms(ours, share) - _ttft_ms(theirs, share)
        for ours, theirs in zip(loads[MESH], loads[BASELINE], strict=True)
    ]


def stages(answers: Sequence[Chat], seen: Mapping[str, RequestObserved]) -> dict[str, object]:
    """Time of requests in each stage of the mesh until the first token, in an extra round."""
    both = [(each, seen[each.request_id]) for each in answers if each.request_id in seen]
    found: dict[str, object] = {"stages: requests observed": len(both)}
    if not both:
        return found
    found["stage HTTP to gateway, ms"] = quantiles_ms(
        [observed.arrived_at - each.sent_at for each, observed in both]
    )
    for name, begin, end in zip(STAGE_NAMES, STAGES[:-1], STAGES[1:], strict=True):
        found[f"stage {name}, ms"] = quantiles_ms(
            [getattr(observed, end) - getattr(observed, begin) for _, observed in both]
        )
    found["stage reply to the client, ms"] = quantiles_ms(
        [each.sent_at + each.ttft_s - observed.first_token_at for each, observed in both]
    )
    return found


async def _paced(arm: Arm, count: int, seed: int, others: OtherLoad) -> Round:
    """Send *count* requests at Poisson times, without waiting for earlier answers."""
    chance = random.Random(seed)
    gaps_s = [chance.expovariate(RATE_RPS) for _ in range(count)]
    prompts = [prompt_of(chance) for _ in range(count)]

    async def load() -> list[Chat]:
        began, at_s = time.monotonic(), 0.0
        tasks: list[asyncio.Task[Chat]] = []
        async with asyncio.TaskGroup() as group:
            for gap_s, prompt in zip(gaps_s, prompts, strict=True):
                at_s += gap_s
                await asyncio.sleep(max(0.0, began + at_s - time.monotonic()))
                answer = arm.chat(prompt, max_tokens=MAX_TOKENS, ttft_s=TTFT_S)
                tasks.append(group.create_task(answer))
        return [task.result() for task in tasks]

    return await _measured(arm, load(), others)


async def _at_once(arm: Arm, tokens: int, seed: int, others: OtherLoad) -> Round:
    """Send all requests at the same time; each answer has *tokens* tokens."""
    chance = random.Random(seed)
    prompts = [prompt_of(chance) for _ in range(STREAMS)]

    async def load() -> list[Chat]:
        return await asyncio.gather(
            *(arm.chat(each, max_tokens=tokens, ttft_s=STREAM_TTFT_S) for each in prompts)
        )

    return await _measured(arm, load(), others)


async def _measured(arm: Arm, load: Awaitable[list[Chat]], others: OtherLoad) -> Round:
    others.sample()
    before, began, began_at = arm.cpu_s(), time.monotonic(), time.time()
    answers = await load
    took_s, after, ended_at = time.monotonic() - began, arm.cpu_s(), time.time()
    others.sample()
    return Round(
        answers=answers,
        cpu_s={name: after[name] - before[name] for name in after},
        took_s=took_s,
        others=others.share(began_at, ended_at),
    )


async def _idle(arm: Arm, duration_s: Seconds = 3.0) -> dict[str, float]:
    """Share of a core in percent that each process uses without requests."""
    before = arm.cpu_s()
    await asyncio.sleep(duration_s)
    after = arm.cpu_s()
    return {name: round(100 * (after[name] - before[name]) / duration_s, 1) for name in after}


def prompt_of(chance: random.Random) -> str:
    """A new random prompt, which no prefix cache contains."""
    return " ".join(f"{chance.choice(WORDS)}{chance.randrange(10)}" for _ in range(NUM_WORDS))
