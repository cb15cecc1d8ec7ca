"""
Hard ends in an overload: how soon requests end, and what it gains for the others.

Requests arrive at twice the load that the engines can serve; half of their clients leave after a
time that is shorter than the wait. Two arms get the same arrivals on new meshes, one after the
other: in one the requests of these clients have ends, in the other they are served late. Measured
are the time from an end to its final, tokens that arrive after an end, and the goodput of the
requests without an end: completed in time.
"""

import asyncio
import random
import time
from dataclasses import dataclass, field

from ops.bench.meshes import MODEL, bench_mesh, bench_producer, simulated_agent
from ops.bench.progress import say
from ops.bench.result import Line, Result, quantiles_ms
from services.agent.backends.settings import SimulatedSettings
from services.mesh.spec import AgentSpec
from shared.contracts.base import Seconds
from shared.contracts.ends import DEADLINE_EXPIRED
from shared.contracts.estimates import LatencyCoefficients
from shared.contracts.ingress import InferenceRequest
from shared.contracts.qos import Slo
from shared.contracts.requests import ReplyMode, RequestCompleted, RequestFailed
from shared.producer.producer import Producer

ITERATION_S = 0.02
RUNNING, TOKENS = 16, 16
"""Requests in one iteration, and tokens of each answer."""
ENGINE_RPS = RUNNING / (TOKENS * ITERATION_S)
"""Requests that one engine serves in a second."""
LOAD = 2.0
WITHIN_S: Seconds = 1.0
DELIVERY_S: Seconds = 0.25
"""Time that tokens may take from the engine to the producer; agents send them every 40 ms."""
STREAMED = 4
"""One of this number of requests with an end is streamed, so that the times of its tokens show."""
GAIN = 1.15
LATE_SHARE = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """One form of the bench."""

    requests: int
    agents: int
    ttl_s: Seconds
    """Time after which half of the clients leave."""
    ttlt_s: Seconds
    """Target of all requests."""

    @property
    def rate_rps(self) -> float:
        return LOAD * ENGINE_RPS * self.agents


FULL = Size(requests=100_000, agents=2, ttl_s=10.0, ttlt_s=30.0)
QUICK = Size(requests=800, agents=1, ttl_s=2.0, ttlt_s=6.0)


@dataclass(slots=True)
class Arm:
    """What the producer of one arm has seen."""

    in_time: int = 0
    """Requests without an end that were completed in time."""
    rest: int = 0
    """Requests without an end."""
    completed: int = 0
    """Requests of clients that leave that were completed."""
    after_end_s: list[Seconds] = field(default_factory=list)
    """Times from ends to their finals."""
    last_token_s: list[Seconds] = field(default_factory=list)
    """Times from ends to the last tokens of runs that were cut."""
    other_errors: int = 0


async def run(*, seed: int, quick: bool, broker: str | None) -> Result:
    """Run the benchmark; a quick run has 800 requests, and clients leave after 2 s."""
    size = QUICK if quick else FULL
    result = Result(name="ends", seed=seed, quick=quick)
    served = await _arm(broker, size, seed, has_ends=False)
    dropped = await _arm(broker, size, seed, has_ends=True)
    gain = dropped.in_time / max(1, served.in_time)
    late = sum(each > WITHIN_S for each in dropped.after_end_s) / max(1, len(dropped.after_end_s))
    too_late = [each for each in dropped.last_token_s if each > ITERATION_S + DELIVERY_S]
    result.figures |= {
        "requests": size.requests,
        "arrivals, 1/s": size.rate_rps,
        "clients leave after, s": size.ttl_s,
        "in time of the rest, served late": f"{served.in_time} of {served.rest}",
        "in time of the rest, with ends": f"{dropped.in_time} of {dropped.rest}",
        "goodput of the rest, ratio": round(gain, 3),
        "ended": len(dropped.after_end_s),
        "completed before their ends": dropped.completed,
        "from end to final, ms": quantiles_ms(dropped.after_end_s or [0.0]),
        "from end to final, longest, ms": round(1000 * max(dropped.after_end_s, default=0.0), 1),
        "runs cut, streamed": len(dropped.last_token_s),
        "last token after the end, longest, ms": round(
            1000 * max(dropped.last_token_s, default=0.0), 1
        ),
        "other errors": served.other_errors + dropped.other_errors,
    }
    num_ended = len(dropped.after_end_s)
    result.lines += [
        Line(
            name=f"share of finals later than {WITHIN_S:g} s after their ends",
            value=round(late, 4) if num_ended else None,
            bound=LATE_SHARE,
        ),
        Line(
            name="runs with tokens more than an iteration (and delivery) after their ends",
            value=float(len(too_late)) if dropped.last_token_s else None,
            bound=0.0,
        ),
        Line(
            name=f"{GAIN:g} of goodput of the rest, served late / with ends",
            value=round(GAIN / gain, 3) if gain else None,
            bound=1.0,
        ),
        Line(
            name="other errors", value=float(served.other_errors + dropped.other_errors), bound=0.0
        ),
    ]
    return result


async def _arm(broker: str | None, size: Size, seed: int, *, has_ends: bool) -> Arm:
    """Send all requests to a new mesh, and return what came back until the last target."""
    agents = tuple(_agent(f"ends-{number}") for number in range(size.agents))
    arm = Arm()
    async with bench_mesh(broker, agents) as mesh, bench_producer(mesh) as producer:
        await (await producer.submit(_body(0, size, seed), reply=ReplyMode.FINAL)).final()
        chance = random.Random(seed)
        started, at_s = time.monotonic(), 0.0
        tasks: set[asyncio.Task[None]] = set()
        for number in range(size.requests):
            at_s += chance.expovariate(size.rate_rps)
            await asyncio.sleep(max(0.0, started + at_s - time.monotonic()))
            leaves = number % 2 == 0
            one = _one(producer, arm, number, size, seed, ends=has_ends and leaves, leaves=leaves)
            task = asyncio.create_task(one)
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            if number % 10_000 == 9_999:
                mesh.check()
                say(f"{number + 1} requests sent")
        await asyncio.sleep(size.ttlt_s + 2 * WITHIN_S)
        left = tuple(tasks)
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
    return arm


def _agent(name: str) -> AgentSpec:
    engine = SimulatedSettings(
        latency=LatencyCoefficients(constant_s=ITERATION_S, linear_s=0.0),
        max_running=RUNNING,
        safepoint_layers=0,
    )
    return simulated_agent(name, engine)


async def _one(
    producer: Producer,
    arm: Arm,
    number: int,
    size: Size,
    seed: int,
    *,
    ends: bool,
    leaves: bool,
) -> None:
    """Send one request and note its outcome."""
    streamed = ends and number // 2 % STREAMED == 0
    ends_at = time.time() + size.ttl_s
    body = _body(number, size, seed, expires_at=ends_at if ends else None)
    arm.rest += not leaves
    generation = await producer.submit(
        body, reply=ReplyMode.STREAM if streamed else ReplyMode.FINAL
    )
    last_at = None
    async for _part in generation:
        last_at = time.time()
    final = await generation.final()
    now = time.time()
    if isinstance(final, RequestCompleted):
        arm.completed += leaves
        arm.in_time += not leaves and final.verdict.attained
    elif _has_ended(final):
        arm.after_end_s.append(now - ends_at)
        if last_at is not None:
            arm.last_token_s.append(last_at - ends_at)
    else:
        arm.other_errors += 1


def _has_ended(final: RequestFailed) -> bool:
    return final.error.code == DEADLINE_EXPIRED


def _body(
    number: int, size: Size, seed: int, *, expires_at: float | None = None
) -> InferenceRequest:
    return InferenceRequest(
        model=MODEL,
        prompt=tuple(20 + (seed + number + place) % 400 for place in range(16)),
        max_tokens=TOKENS,
        temperature=0.0,
        ignore_eos=True,
        slo=Slo(ttlt_s=size.ttlt_s),
        expires_at=expires_at,
    )
