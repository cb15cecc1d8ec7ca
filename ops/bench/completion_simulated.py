"""
Simulated engines: groups that arrive behind queues of several lengths are predicted before they are
served.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ops.bench.completion_forecasts import Forecaster, GroupForecast, Lengths, PassedGroup
from ops.sim.mesh.engine import BatchEngine
from ops.sim.mesh.kinds import DeviceKind, ModelKind, served
from ops.sim.mesh.limits import BatchLimits
from ops.sim.mesh.request import MeshRequest
from ops.sim.mesh.workload import SHAREGPT
from ops.sim.request import Arrival
from shared.contracts.base import ModelName, RequestId, UnixTime
from shared.contracts.qos import Importance, Slo
from solver.prediction.service_parameters import ServedRequest

HISTORY = 1000
"""Number of requests whose lengths are known before the benchmark begins."""
GROUP = 32
"""Number of requests in a group."""
MOST_OUTPUT = 2048
"""Number of tokens of ShareGPT's longest answer."""
REPORT_S = 5.0
"""Interval between two telemetry reports."""
_MODEL = ModelName("only")


@dataclass(slots=True)
class _Group:
    forecast: GroupForecast
    requests: list[MeshRequest]
    came_at: UnixTime


class _Traffic:
    """A sequence of requests with ShareGPT's lengths."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)
        self._count = 0

    def lengths(self) -> Lengths:
        return Lengths(
            SHAREGPT.prompt.draw(self._random, HISTORY), SHAREGPT.output.draw(self._random, HISTORY)
        )

    def take(self, count: int, now: UnixTime) -> list[MeshRequest]:
        prompts = SHAREGPT.prompt.draw(self._random, count)
        outputs = SHAREGPT.output.draw(self._random, count)
        found = []
        for prompt, output in zip(prompts, outputs, strict=True):
            arrival = Arrival(
                arrived_at=now,
                prompt_tokens=prompt,
                output_tokens=output,
                class_name="batch",
                slo=Slo(ttlt_s=3600.0),
                importance=Importance.HIGH,
            )
            found.append(MeshRequest(self._count, arrival, _MODEL))
            self._count += 1
        return found


def first_batch(engine: BatchEngine, requests: Sequence[MeshRequest]) -> list[ServedRequest]:
    """
    Serve *requests* on an idle engine; return those that began before a quarter of all had
    finished.
    """
    for request in requests:
        engine.add(request, engine.now)
    begun: dict[RequestId, UnixTime] = {}
    while engine.num_unfinished:
        begins_at = engine.now
        engine.iterate()
        for request in requests:
            if request.num_computed_tokens > 0:
                begun.setdefault(request.request_id, begins_at)
    emptying_at = sorted(request.finished_at or 0.0 for request in requests)[len(requests) // 4]
    return [
        served_request(request, begun[request.request_id])
        for request in requests
        if begun[request.request_id] < emptying_at
    ]


def served_request(request: MeshRequest, begun_at: UnixTime) -> ServedRequest:
    """Convert a finished *request* to the form that forecasts learn from."""
    return ServedRequest(
        prompt_tokens=request.arrival.prompt_tokens,
        output_tokens=request.output_tokens,
        begun_at=begun_at,
        first_token_at=request.first_token_at or 0.0,
        finished_at=request.finished_at or 0.0,
    )


class Load:
    """
    A queue that is held at a sequence of lengths: a group of requests arrives when the queue is
    shorter.

    Args:
        seed: Seed of the traffic.
    """

    def __init__(self, model: ModelKind, device: DeviceKind, *, seed: int) -> None:
        how = served(model, device)
        if how is None:
            raise ValueError(f"{device.name} cannot serve {model.name}")
        limits = BatchLimits(kv_capacity_tokens=how.kv_capacity_tokens)
        self._traffic = _Traffic(seed)
        lengths = self._traffic.lengths()
        batch = self._traffic.take(limits.max_running, 0.0)
        self.forecaster = Forecaster(
            first_batch(BatchEngine(how.latency, limits), batch), lengths, most_output=MOST_OUTPUT
        )
        self._engine = BatchEngine(how.latency, limits)
        self._waiting: deque[MeshRequest] = deque()
        self._begun_at: dict[RequestId, UnixTime] = {}
        self._groups: list[_Group] = []
        self._reported = (0.0, 0)

    def keep(self, queue_length: int, *, groups: int) -> None:
        """
        Run until *groups* groups have arrived at *queue_length*; requests that first fill the queue
        do not count.
        """
        engine = self._engine
        while engine.num_waiting < queue_length - GROUP:
            self._come()
        while groups:
            if engine.num_waiting < queue_length:
                forecast = self.forecaster.predict(
                    queue_length=queue_length,
                    ahead=engine.num_waiting,
                    num_requests=GROUP,
                    running=engine.num_running,
                )
                self._groups.append(_Group(forecast, self._come(), engine.now))
                groups -= 1
            else:
                self._step()

    def drain(self) -> None:
        """Serve all requests that remain in the queue."""
        while self._engine.num_unfinished:
            self._step()

    def _come(self) -> list[MeshRequest]:
        requests = self._traffic.take(GROUP, self._engine.now)
        for request in requests:
            self._engine.add(request, self._engine.now)
        self._waiting.extend(requests)
        return requests

    def _step(self) -> None:
        engine = self._engine
        engine.catch_up(engine.wake_at())
        begins_at = engine.now
        if engine.num_unfinished:
            engine.iterate()
        while self._waiting and self._waiting[0].num_computed_tokens > 0:
            self._begun_at[self._waiting.popleft().request_id] = begins_at
        if finished := engine.take_finished():
            for request in finished:
                self.forecaster.served(served_request(request, self._begun_at[request.request_id]))
            self._close()
        self._report()

    def _close(self) -> None:
        """Record the waiting and completion times of groups whose requests have all finished."""
        for group in [g for g in self._groups if all(r.finished_at for r in g.requests)]:
            self._groups.remove(group)
            done_at = max(request.finished_at or 0.0 for request in group.requests)
            passed = PassedGroup(
                forecast=group.forecast,
                came_at=group.came_at,
                wait_s=self._begun_at[group.requests[0].request_id] - group.came_at,
                completion_s=done_at - group.came_at,
            )
            self.forecaster.observe(passed)

    def _report(self) -> None:
        """Report the telemetry of a full engine."""
        engine, totals = self._engine, self._engine.totals
        at, tokens = self._reported
        useful = totals.tokens - totals.wasted_tokens
        if engine.now - at < REPORT_S:
            return
        if engine.num_waiting:
            self.forecaster.telemetry.observe_busy(
                tokens=useful - tokens, busy_s=engine.now - at, running=engine.num_running
            )
        self._reported = (engine.now, useful)
