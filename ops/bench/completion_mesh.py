"""Groups behind queues of several lengths in a mesh over RabbitMQ, foretold before service."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from ops.bench.completion_forecasts import Forecaster, GroupForecast, Lengths, PassedGroup
from ops.bench.completion_leader import LeaderForecasts, leader_forecasts
from ops.bench.cores import OtherLoad, agent_pids, give_cores
from ops.bench.meshes import bench_mesh, bench_producer
from services.agent.backends.settings import SimulatedSettings
from services.mesh.spec import AgentSpec
from shared.contracts.base import ModelName, Seconds, UnixTime
from shared.contracts.errors import MeshError
from shared.contracts.estimates import LatencyCoefficients
from shared.contracts.ingress import InferenceRequest
from shared.contracts.qos import Importance, Slo
from shared.contracts.requests import ReplyMode, RequestCompleted
from shared.producer.producer import Producer
from solver.prediction.completion_calibration import Foretold
from solver.prediction.service_parameters import ServedRequest
from solver.prediction.time_distribution import TimeDistribution

MODELS = tuple(ModelName(name) for name in ("tiny-llama", "tiny-qwen"))
BATCH = 16
"""Requests that an engine runs together."""
GROUP, GROUPS = 8, 4
"""Requests that come together, and how many times at one length of the queue."""
HISTORY = 500
PROMPTS, OUTPUTS = (20, 220), (25, 375)
"""Tokens, evenly."""
REPORT_S = 1.0
LEARNT_S = 10.0
"""Before a forecast, that its throughput is mostly of."""
MOST_OTHERS = 0.12
"""Share of the CPU: RabbitMQ, the kernel and this bench's looking take about half of that."""
SETTLE_S = 2.0
"""For a leader's first plan."""
ANSWER_TIMEOUT_S = 300.0
_SIMULATED = SimulatedSettings(
    latency=LatencyCoefficients(constant_s=0.0025, linear_s=2e-5, context_s=2e-7),
    policy="fcfs",
    max_running=BATCH,
)
_VLLM: dict[str, Any] = {"policy": "fcfs", "max_running": BATCH, "prefix_caching": False}


def agents(engine: str) -> tuple[AgentSpec, ...]:
    """One for each model, which it alone serves: first come, first served."""
    settings = msgspec.to_builtins(_SIMULATED) if engine == "simulated" else _VLLM
    return tuple(
        AgentSpec(
            instance_id=f"i{number}",
            engine=engine,
            settings={"models": [model], "initial_model": model, "engine": {engine: settings}},
        )
        for number, model in enumerate(MODELS)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshSize:
    """How much comes to each model."""

    lengths: Sequence[int]
    """Of its queue, in any order, again and again."""
    groups: int
    most_s: Seconds
    """After which no more come."""


@dataclass(slots=True)
class _Group:
    forecast: GroupForecast
    came_at: UnixTime
    by_leader: TimeDistribution | None
    left: int = GROUP
    turn_at: UnixTime = 0.0
    done_at: UnixTime = 0.0


@dataclass(slots=True, kw_only=True)
class ModelLoad:
    """
    One model's queue, kept at one length after the other by what a producer sees.

    A request's turn comes when its agent gives it to the engine, which it does once the engine
    has room for one more.
    """

    producer: Producer
    leader: LeaderForecasts
    model: ModelName
    seed: int
    forecaster: Forecaster = field(init=False)
    by_leader: list[tuple[Foretold, Seconds]] = field(default_factory=list)
    """The leader's forecasts of the same groups, and what came."""
    lost: int = 0
    _random: np.random.Generator = field(init=False)
    _outstanding: int = 0
    _numbered: int = 0
    _tokens: int = 0
    _reported_at: UnixTime | None = None
    _left: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self._random = np.random.default_rng(self.seed)

    async def serve(self, size: MeshSize) -> Sequence[PassedGroup]:
        """First one batch, then groups; all that have passed."""
        await self.ask()  # A new engine's first request takes longer than any other.
        batch = await asyncio.gather(*(self.ask() for _ in range(BATCH)))
        prompts, outputs = self._drawn(HISTORY)
        self.forecaster = Forecaster(
            [each for each in batch if each], Lengths(prompts, outputs), most_output=OUTPUTS[1]
        )
        until = time.monotonic() + size.most_s
        left = size.groups
        async with asyncio.TaskGroup() as tasks:
            while left and time.monotonic() < until:
                for queue_length in self._random.permutation(size.lengths).tolist():
                    here = min(left, GROUPS)
                    left -= here
                    await self._keep(tasks, queue_length, groups=here, until=until)
        return self.forecaster.passed

    async def _keep(
        self, tasks: asyncio.TaskGroup, queue_length: int, *, groups: int, until: UnixTime
    ) -> None:
        """*until* is by the monotonic clock."""
        while groups and self._waiting < queue_length - GROUP and time.monotonic() < until:
            tasks.create_task(self._follow(None))
            self._outstanding += 1
        while groups and time.monotonic() < until:
            if self._waiting >= queue_length:
                self._left.clear()
                await self._left.wait()
                continue
            forecast = self.forecaster.foretell(
                queue_length=queue_length,
                ahead=self._waiting,
                num_requests=GROUP,
                running=min(BATCH, self._outstanding),
            )
            now = time.time()
            group = _Group(forecast, now, self.leader.wait(self.model, now))
            for _ in range(GROUP):
                tasks.create_task(self._follow(group))
            self._outstanding += GROUP
            groups -= 1

    @property
    def _waiting(self) -> int:
        return max(0, self._outstanding - BATCH)

    async def _follow(self, group: _Group | None) -> None:
        served = await self.ask()
        full = self._outstanding > BATCH
        self._outstanding -= 1
        self._left.set()
        if served is None:
            self.lost += 1
            return
        self.forecaster.served(served)
        self._report(served.tokens, full=full)
        if group is None:
            return
        group.left -= 1
        group.done_at = max(group.done_at, served.finished_at)
        group.turn_at = min(group.turn_at or served.begun_at, served.begun_at)
        if not group.left:
            passed = PassedGroup(
                forecast=group.forecast,
                wait_s=max(0.0, group.turn_at - group.came_at),
                completion_s=group.done_at - group.came_at,
                came_at=group.came_at,
            )
            self.forecaster.observe(passed)
            if group.by_leader is not None:
                told = Foretold(group.by_leader, group.by_leader)
                self.by_leader.append((told, passed.wait_s))

    async def ask(self) -> ServedRequest | None:
        """One request; None when it is lost."""
        (prompt,), (output,) = self._drawn(1)
        self._numbered += 1
        number = self._numbered
        body = InferenceRequest(
            model=self.model,
            # No two begin alike, or one would find the KV of the other.
            prompt=(10 + number % 490, 10 + number // 490, *(20,) * (prompt - 2)),
            max_tokens=output,
            temperature=0.0,
            ignore_eos=True,
            slo=Slo(ttlt_s=3600.0),
            importance=Importance.HIGH,
        )
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                generation = await self.producer.submit(body, reply=ReplyMode.FINAL)
                final = await generation.final()
        except (TimeoutError, MeshError):
            return None
        if not isinstance(final, RequestCompleted):
            return None
        timings = final.timings
        return ServedRequest(
            prompt_tokens=prompt,
            output_tokens=output,
            # Later if the request was evicted in between.
            begun_at=min(timings.submitted_at, timings.first_token_at),
            first_token_at=timings.first_token_at,
            finished_at=timings.finished_at,
        )

    def _report(self, tokens: int, *, full: bool) -> None:
        """Telemetry of a full engine, by what it has finished."""
        now = time.monotonic()
        if not full or self._reported_at is None:
            self._reported_at, self._tokens = now, 0
            return
        self._tokens += tokens
        if now - self._reported_at >= REPORT_S:
            self.forecaster.telemetry.observe_busy(
                tokens=self._tokens, busy_s=now - self._reported_at, running=BATCH
            )
            self._reported_at, self._tokens = now, 0

    def _drawn(self, count: int) -> tuple[list[int], list[int]]:
        prompts = self._random.integers(*PROMPTS, size=count).tolist()
        return prompts, self._random.integers(*OUTPUTS, size=count).tolist()


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshOutcome:
    """What came of both models' groups."""

    passed: list[PassedGroup]
    by_leader: list[tuple[Foretold, Seconds]]
    lost: int
    quiet: list[PassedGroup]
    """Of these, the ones beside which others computed little."""
    others_share: float
    """Of this machine's CPU time, that went to others; RabbitMQ is one of them."""


async def serve(broker: str | None, *, engine: str, load: MeshSize, seed: int) -> MeshOutcome:
    """Groups of both models, served in a mesh of its own."""
    async with (
        bench_mesh(broker, agents(engine)) as mesh,
        bench_producer(mesh) as producer,
        leader_forecasts(mesh) as leader,
    ):
        give_cores(agent_pids(mesh))
        await asyncio.sleep(SETTLE_S)
        loads = [
            ModelLoad(producer=producer, leader=leader, model=model, seed=seed + number)
            for number, model in enumerate(MODELS)
        ]
        others, began_at = OtherLoad(), time.time()
        following = asyncio.create_task(others.follow())
        try:
            passed = await asyncio.gather(*(each.serve(load) for each in loads))
        finally:
            following.cancel()
        others.sample()
    everything = [each for of in passed for each in of]
    return MeshOutcome(
        passed=everything,
        quiet=[each for each in everything if _beside(each, others) <= MOST_OTHERS],
        by_leader=[each for model in loads for each in model.by_leader],
        lost=sum(each.lost for each in loads),
        others_share=others.share(began_at, time.time()),
    )


def _beside(passed: PassedGroup, others: OtherLoad) -> float:
    """Share of the CPU that others took while its wait was learnt of and while it lasted."""
    since = passed.came_at - LEARNT_S
    return others.share(since, passed.came_at + passed.wait_s)
