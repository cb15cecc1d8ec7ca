"""
Benchmark of a mixed overload: chats, search, summaries and a night batch on two instances.

The services of a mesh run as shipped, over the in-process broker and with simulated engines, on an
event loop with virtual time. Three tenants send requests for two models for ten minutes; the load
exceeds the capacity, and moves from one model to the other and back.
"""

import asyncio
import random
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from ops.bench.idle_times import (
    KEPT_METRIC,
    Look,
    longest_swaps,
    look_at,
    of_instances,
    watch,
)
from ops.bench.meshes import simulated_agent
from ops.bench.progress import say
from ops.bench.result import Line, Result
from ops.ports import free_port
from ops.sim.virtual_time import LoopClock, run_virtually
from services.agent.backends.settings import SimulatedSettings
from services.mesh.embedded import EmbeddedMesh
from services.mesh.spec import EMBEDDED, MeshSpec
from shared.broker import topology
from shared.broker.protocol import BindingSpec, Delivery, Settlement
from shared.contracts.base import Decoder, Seconds, UnixTime
from shared.contracts.estimates import LatencyCoefficients
from shared.contracts.ingress import InferenceRequest
from shared.contracts.plans import PlanPublished
from shared.contracts.qos import Importance, Slo
from shared.contracts.requests import ReplyMode, RequestCompleted
from shared.models.tiny import make_tiny_models
from shared.producer.producer import Producer

MODELS = ("tiny-llama", "tiny-llama-b")
ENGINE = SimulatedSettings(
    latency=LatencyCoefficients(constant_s=0.05, linear_s=5e-4, context_s=2e-6),
    max_running=16,
    kv_capacity_tokens=16_384,
    warm_activation_s=1.5,
    cold_activation_s=4.0,
)
DURATION_S, QUICK_S = 600.0, 60.0
SETTLE_S: Seconds = 3.0
"""Time for profiles and the first plan."""
WEIGHT = {Importance.HIGH: 4.0, Importance.LOW: 1.0}
"""Weight of one late request, as in the planner's default settings."""
NUM_SEEDS = 3


class Before(NamedTuple):
    """Figures of the same load before all waiting had a price in plans."""

    swaps: int
    share: float
    """Share in time."""


BEFORE = {0: Before(34, 0.9067), 1: Before(42, 0.8962), 2: Before(18, 0.9192)}
"""Seed -> figures."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One kind of traffic of one tenant."""

    name: str
    tenant: str
    slo: Slo
    importance: Importance
    rate_rps: float
    prompt_words: tuple[int, int]
    max_tokens: tuple[int, int]
    second_model: tuple[float, float]
    """Share of the requests for the second model, outside and inside of `SHIFT`."""
    peak: float = 1.0
    """Factor of the rate inside of `SHIFT`."""


SHIFT = (1 / 3, 2 / 3)
"""Part of the duration in which the load moves to the second model."""
KINDS = (
    Kind(
        name="chats",
        tenant="shop",
        slo=Slo(ttft_s=3.0, tbt_s=0.4),
        importance=Importance.HIGH,
        rate_rps=2.4,
        prompt_words=(10, 60),
        max_tokens=(40, 120),
        second_model=(0.1, 0.7),
        peak=1.3,
    ),
    Kind(
        name="search",
        tenant="search",
        slo=Slo(ttlt_s=10.0),
        importance=Importance.HIGH,
        rate_rps=1.9,
        prompt_words=(40, 120),
        max_tokens=(8, 24),
        second_model=(0.7, 0.3),
    ),
    Kind(
        name="summaries",
        tenant="office",
        slo=Slo(ttlt_s=90.0),
        importance=Importance.LOW,
        rate_rps=1.2,
        prompt_words=(100, 300),
        max_tokens=(60, 150),
        second_model=(0.5, 0.5),
    ),
    Kind(
        name="night batch",
        tenant="office",
        slo=Slo(),
        importance=Importance.LOW,
        rate_rps=0.6,
        prompt_words=(50, 200),
        max_tokens=(100, 250),
        second_model=(0.4, 0.6),
    ),
)


@dataclass(frozen=True, slots=True)
class Asked:
    """One request of the load."""

    at_s: Seconds
    kind: Kind
    body: InferenceRequest


@dataclass(slots=True)
class Record:
    """What happened in one run."""

    finals: dict[str, RequestCompleted | None] = field(default_factory=dict)
    """Request id -> its final; None if it ended without an answer."""
    plans: list[tuple[UnixTime, float]] = field(default_factory=list)
    """Time of each published plan, and its expected weighted share of late requests."""
    idle: list[Look] = field(default_factory=list)
    """Idle seconds of each instance beside waiting work, once a second."""
    kept: dict[str, float] = field(default_factory=dict)
    swaps: int = 0


def load(*, seed: int, duration_s: Seconds) -> list[Asked]:
    """The requests of one run in order of time; equal arguments give an equal load."""
    chance = random.Random(seed)
    found: list[Asked] = []
    for kind in KINDS:
        at_s = chance.expovariate(kind.rate_rps * kind.peak)
        while at_s < duration_s:
            is_shifted = SHIFT[0] <= at_s / duration_s < SHIFT[1]
            if is_shifted or chance.random() < 1 / kind.peak:
                model = MODELS[chance.random() < kind.second_model[is_shifted]]
                found.append(Asked(at_s, kind, _body(kind, model, chance, len(found))))
            at_s += chance.expovariate(kind.rate_rps * kind.peak)
    return sorted(found, key=lambda each: each.at_s)


def _body(kind: Kind, model: str, chance: random.Random, number: int) -> InferenceRequest:
    return InferenceRequest(
        id=f"{kind.name.replace(' ', '-')}-{number}",
        model=model,
        prompt=" ".join(chance.choices("abcdefgh", k=chance.randint(*kind.prompt_words))),
        max_tokens=chance.randint(*kind.max_tokens),
        temperature=0.0,
        ignore_eos=True,
        slo=kind.slo,
        tenant=kind.tenant,
        application=kind.name,
        importance=kind.importance,
    )


async def run(*, seed: int, quick: bool, broker: str | None) -> Result:  # noqa: ARG001 - in-process
    """Run the benchmark for three seeds; a quick run has one, and a tenth of the time."""
    result = Result(name="overload", seed=seed, quick=quick)
    runs = []
    for number in (seed,) if quick else range(seed, seed + NUM_SEEDS):
        asked = load(seed=number, duration_s=QUICK_S if quick else DURATION_S)
        record = await asyncio.to_thread(run_virtually, _served(asked))
        runs.append(outcome_of(number, asked, record))
        result.figures[f"seed {number}"] = runs[-1].figures()
        say(f"seed {number}: {runs[-1].figures()}")
    _lines(result, runs)
    return result


async def _served(asked: list[Asked]) -> Record:
    """Serve the load by a mesh of two instances."""
    record = Record()
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        spec = MeshSpec(
            broker=EMBEDDED,
            registry=make_tiny_models(root / "models", weights=False),
            log_dir=root / "log",
            gateway_port=free_port(),
            log_level="error",
            agents=tuple(
                simulated_agent(f"agent-{number}", ENGINE, model)
                for number, model in enumerate(MODELS)
            ),
        )
        mesh = EmbeddedMesh(spec, clock=LoopClock())
        async with (
            mesh,
            mesh.open_broker("headway-bench") as client,
            Producer(client, name="bench", clock=LoopClock(), user_id="guest") as producer,
        ):
            await asyncio.sleep(SETTLE_S)
            decoded: Decoder[PlanPublished] = Decoder(PlanPublished)

            async def planned(delivery: Delivery) -> None:
                plan = decoded(delivery.body)
                record.plans.append((plan.issued_at, plan.expected_late))
                await delivery.settle(Settlement.ACK)

            queue = topology.private_queue("bench.plans")
            await client.declare_queue(queue)
            for agent in spec.agents:
                key = topology.plan_key(agent.instance_id)
                await client.bind(
                    BindingSpec(exchange=topology.TELEMETRY, queue=queue.name, routing_key=key)
                )
            await client.consume(queue.name, planned, prefetch=64)
            leader = mesh.healths["leader-0"].metrics
            watching = asyncio.create_task(watch(lambda: look_at(leader.collect()), record.idle))
            began_at = asyncio.get_running_loop().time()
            await asyncio.gather(*(_one(producer, each, began_at, record) for each in asked))
            watching.cancel()
            record.kept = of_instances(leader.collect(), KEPT_METRIC)
            record.swaps = round(
                sum(
                    health.metrics.get_sample_value("headway_agent_swaps_total") or 0.0
                    for health in mesh.healths.values()
                )
            )
    return record


async def _one(producer: Producer, asked: Asked, began_at: float, record: Record) -> None:
    loop = asyncio.get_running_loop()
    await asyncio.sleep(began_at + asked.at_s - loop.time())
    final = await (await producer.submit(asked.body, reply=ReplyMode.FINAL)).final()
    record.finals[asked.body.id or ""] = final if isinstance(final, RequestCompleted) else None
    if len(record.finals) % 200 == 0:
        say(f"{len(record.finals)} answers after {loop.time() - began_at:.0f} s of virtual time")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Figures of one run."""

    seed: int
    lost: int
    """Number of requests without an answer."""
    share: float
    """Share in time of the requests with targets."""
    shares: dict[str, float]
    """Kind of traffic -> the same."""
    swaps: int
    duration_s: Seconds
    idle_swaps: float
    """Longest time in a row for which an instance was idle beside waiting work, in swap times."""
    kept_share: float
    """Share of the instances' time in which they were kept for express requests."""
    plan_error: float | None
    """Expected minus actual late share of what waited, mean over the published plans."""

    def figures(self) -> dict[str, float | None]:
        """The figures by name."""
        return {
            "in time": round(self.share, 4),
            **{name: round(share, 4) for name, share in self.shares.items()},
            "swaps": self.swaps,
            "last answer after, s": round(self.duration_s, 1),
            "longest idle time beside work, in swap times": round(self.idle_swaps, 2),
            "kept share": round(self.kept_share, 4),
            "plan, expected - actual late share": self.plan_error and round(self.plan_error, 4),
        }


def outcome_of(seed: int, asked: list[Asked], record: Record) -> Outcome:
    """Figures of a run that served *asked*."""
    late = {each.body.id: _is_late(record.finals[each.body.id or ""]) for each in asked}
    counted = [each for each in asked if each.kind.slo != Slo()]
    finals = [final for final in record.finals.values() if final is not None]
    duration_s = max(f.timings.finished_at for f in finals) - min(
        f.timings.arrived_at for f in finals
    )
    totals = Counter(each.kind.name for each in counted)
    missed = Counter(each.kind.name for each in counted if late[each.body.id])
    return Outcome(
        seed=seed,
        lost=len(asked) - len(finals),
        share=1 - missed.total() / len(counted),
        shares={name: 1 - missed[name] / total for name, total in sorted(totals.items())},
        swaps=record.swaps,
        duration_s=duration_s,
        idle_swaps=longest_swaps(record.idle),
        kept_share=sum(record.kept.values()) / (len(MODELS) * duration_s),
        plan_error=_plan_error(asked, record, late),
    )


def _lines(result: Result, runs: list[Outcome]) -> None:
    errors = [run.plan_error for run in runs if run.plan_error is not None]
    known = not result.quick and all(run.seed in BEFORE for run in runs)
    before = [BEFORE[run.seed] for run in runs] if known else []
    swaps, share = fmean(run.swaps for run in runs), fmean(run.share for run in runs)
    result.lines += [
        Line(name="requests without an answer", value=sum(run.lost for run in runs), bound=0),
        Line(
            name="swaps, as a share of those before",
            value=swaps / fmean(each.swaps for each in before) if before else None,
            bound=1 / 3,
        ),
        Line(
            name="loss of the share in time",
            value=fmean(each.share for each in before) - share if before else None,
            bound=0.01,
        ),
        Line(
            name="plan, |expected - actual late share|",
            value=abs(fmean(errors)) if errors and not result.quick else None,
            bound=0.05,
        ),
        Line(
            name="longest idle time beside work, in swap times",
            value=max(run.idle_swaps for run in runs),
            bound=2.0,
        ),
        Line(
            name="kept time, as a share of instance time",
            value=max(run.kept_share for run in runs),
            bound=0.1,
        ),
    ]


def _is_late(final: RequestCompleted | None) -> bool:
    return final is None or not final.verdict.attained


def _plan_error(asked: list[Asked], record: Record, late: dict[str | None, bool]) -> float | None:
    """Mean of expected minus actual weighted late shares of the work that waited at each plan."""
    errors = []
    for at, expected in sorted(set(record.plans)):
        total = missed = 0.0
        for each in asked:
            final = record.finals[each.body.id or ""]
            if final and final.timings.grouped_at <= at < final.timings.pulled_at:
                weight = WEIGHT[each.kind.importance]
                total += weight
                missed += weight * late[each.body.id]
        if total:
            errors.append(expected - missed / total)
    return fmean(errors) if errors else None
