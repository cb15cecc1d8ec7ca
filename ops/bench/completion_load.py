"""
Load on one model: groups that arrive behind queues of several lengths are predicted before they are
served.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ops.bench.completion_forecasts import Forecaster, GroupForecast, Lengths, PassedGroup
from ops.bench.progress import say
from shared.contracts.base import ModelName, Seconds, UnixTime
from shared.contracts.errors import MeshError
from shared.contracts.ingress import InferenceRequest
from shared.contracts.qos import Importance, Slo
from shared.contracts.requests import ReplyMode, RequestCompleted
from shared.producer.producer import Producer
from solver.prediction.calibration.completion_calibration import PredictedTime
from solver.prediction.service_parameters import ServedRequest
from solver.prediction.time_distribution import TimeDistribution

BATCH = 16
"""Number of requests that an engine runs together."""
GROUP, GROUPS = 8, 4
"""Number of requests in a group, which arrive together, and number of groups per queue length."""
HISTORY = 500
PROMPTS, OUTPUTS = (20, 220), (25, 375)
"""Ranges of prompt and output tokens per request, uniformly distributed."""
REPORT_S = 1.0
ANSWER_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshSize:
    """Amount of work for each model."""

    lengths: Sequence[int]
    """Lengths of the queue, in requests; they are repeated in random order."""
    groups: int
    most_s: Seconds
    """Time after which no more groups of requests arrive."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A request that was served, with its times and tokens."""

    served: ServedRequest
    grouped_at: UnixTime
    predicted_wait: TimeDistribution | None
    """Waiting time predicted by the request's grouper; None if the grouper had no forecast."""

    @property
    def wait_s(self) -> Seconds:
        """Actual waiting time from grouping to the start of service, as a forecast defines it."""
        return max(0.0, self.served.begun_at - self.grouped_at)


@dataclass(slots=True)
class _Group:
    forecast: GroupForecast
    came_at: UnixTime
    left: int = GROUP
    first: Answer | None = None
    """The request of the group that was served first."""
    done_at: UnixTime = 0.0


@dataclass(slots=True, kw_only=True)
class ModelLoad:
    """
    One model's queue, held at a sequence of lengths; the producer counts the requests.

    Service of a request begins when the agent submits it to the engine, as soon as the engine has
    room for one more request.
    """

    producer: Producer
    model: ModelName
    seed: int
    forecaster: Forecaster = field(init=False)
    by_mesh: list[tuple[PredictedTime, Seconds]] = field(default_factory=list)
    """
    Groupers' forecasts for the first request of each group, and the actual times; needs telemetry.
    """
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
        """Serve one batch, then the groups of requests; return all groups that were served."""
        await self.ask()  # The first request of a new engine takes longer than later requests.
        batch = await asyncio.gather(*(self.ask() for _ in range(BATCH)))
        prompts, outputs = self._drawn(HISTORY)
        self.forecaster = Forecaster(
            [each.served for each in batch if each],
            Lengths(prompts, outputs),
            most_output=OUTPUTS[1],
        )
        until = time.monotonic() + size.most_s
        left = size.groups
        async with asyncio.TaskGroup() as tasks:
            while left and time.monotonic() < until:
                for queue_length in self._random.permutation(size.lengths).tolist():
                    here = min(left, GROUPS)
                    left -= here
                    await self._keep(tasks, queue_length, groups=here, until=until)
                say(f"{self.model}: {size.groups - left} of {size.groups} groups have come")
        return self.forecaster.passed

    async def _keep(
        self, tasks: asyncio.TaskGroup, queue_length: int, *, groups: int, until: UnixTime
    ) -> None:
        """Keep *queue_length* requests waiting until *groups* groups arrived or *until* passes."""
        while groups and self._waiting < queue_length - GROUP and time.monotonic() < until:
            self._send(tasks, None)
        while groups and time.monotonic() < until:
            if self._waiting >= queue_length:
                self._left.clear()
                await self._left.wait()
                continue
            forecast = self.forecaster.predict(
                queue_length=queue_length,
                ahead=self._waiting,
                num_requests=GROUP,
                running=min(BATCH, self._outstanding),
            )
            group = _Group(forecast, came_at=time.time())
            for _ in range(GROUP):
                self._send(tasks, group)
            groups -= 1

    def _send(self, tasks: asyncio.TaskGroup, group: _Group | None) -> None:
        tasks.create_task(self._follow(group))
        self._outstanding += 1

    @property
    def _waiting(self) -> int:
        return max(0, self._outstanding - BATCH)

    async def _follow(self, group: _Group | None) -> None:
        answer = await self.ask()
        full = self._outstanding > BATCH
        self._outstanding -= 1
        self._left.set()
        if answer is None:
            self.lost += 1
            return
        served = answer.served
        self.forecaster.served(served)
        self._report(served.tokens, full=full)
        if group is None:
            return
        group.left -= 1
        group.done_at = max(group.done_at, served.finished_at)
        if group.first is None or served.begun_at < group.first.served.begun_at:
            group.first = answer
        if not group.left:
            passed = PassedGroup(
                forecast=group.forecast,
                wait_s=max(0.0, group.first.served.begun_at - group.came_at),
                completion_s=group.done_at - group.came_at,
                came_at=group.came_at,
            )
            self.forecaster.observe(passed)
            predicted = group.first.predicted_wait
            if predicted is not None and group.forecast.learnt:
                self.by_mesh.append((PredictedTime(predicted, predicted), group.first.wait_s))

    async def ask(self) -> Answer | None:
        """Serve one request; return None if it is lost."""
        (prompt,), (output,) = self._drawn(1)
        self._numbered += 1
        number = self._numbered
        body = InferenceRequest(
            model=self.model,
            # Prompts have different first tokens, so that no request reuses another request's KV.
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
        served = ServedRequest(
            prompt_tokens=prompt,
            output_tokens=output,
            # `submitted_at` is the time of the last run, which may begin after the first token.
            begun_at=min(timings.submitted_at, timings.first_token_at),
            first_token_at=timings.first_token_at,
            finished_at=timings.finished_at,
        )
        predicted = timings.predicted_wait
        return Answer(
            served=served,
            grouped_at=timings.grouped_at,
            predicted_wait=None
            if predicted is None
            else TimeDistribution.of(predicted.mean_s, predicted.sd_s**2),
        )

    def _report(self, tokens: int, *, full: bool) -> None:
        """Report telemetry of a full engine, computed from its finished requests."""
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
