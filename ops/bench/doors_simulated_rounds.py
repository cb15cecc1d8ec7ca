"""One load of `ops.bench doors_simulated` at new servers, through one arm."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

import numpy as np

from ops.bench.doors_cells import Cell
from ops.bench.doors_fronts import OURS
from ops.bench.doors_report import IN_TURN
from ops.bench.doors_rounds import BATCH
from ops.bench.doors_scheduling import ServerLimits, Speed
from ops.bench.doors_server import VLLM
from ops.bench.doors_traffic import MakeSession, RequestClass, sessions
from ops.sim.attached.fronts import Front, LoadRequest
from ops.sim.attached.mesh import Mesh
from ops.sim.attached.outcomes import Outcome, is_missed
from ops.sim.attached.rounds import MakeFront, client, mesh
from ops.sim.attached.servers import Device, Server
from ops.sim.attached.timeline import Timeline
from shared.contracts.base import Seconds
from shared.contracts.estimates import LatencyCoefficients
from shared.contracts.qos import Importance

_SPEED = Speed()
LATENCY = LatencyCoefficients(constant_s=_SPEED.constant_s, linear_s=_SPEED.prefill_token_s)
"""Iterations as in `doors`, but for the time of an answer beside that of its token."""
CLIENTS: Mapping[str, MakeFront] = {
    IN_TURN: client(least_loaded=False, has_priorities=False),
    f"{IN_TURN}, priority": client(least_loaded=False, has_priorities=True),
    "least loaded": client(least_loaded=True, has_priorities=False),
    "least loaded, priority": client(least_loaded=True, has_priorities=True),
}
ARMS: Mapping[str, MakeFront] = {**CLIENTS, OURS: mesh(LATENCY)}
WARM_UP_S: Seconds = 2.0
"""Time for which the arms run before the load begins."""
PATIENCE_S: Seconds = 600.0
"""Time after the last arrival at which answers count as lost."""
_LOOK_S: Seconds = 5.0
_LOADS_KEPT = 8


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a load."""

    at_s: Seconds
    model: str
    request_class: RequestClass
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """A cell with its arrivals; equal values have equal arrivals."""

    cell: Cell
    rate_rps: float
    seconds: Seconds
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassFigures:
    """Answers of one class."""

    missed: float
    """Share of requests that were not in time, 0..1."""
    first_p50_s: Seconds
    first_p99_s: Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """What one arm has done under one load."""

    classes: Mapping[str, ClassFigures]
    missed: float
    """Share of requests with a first-token target that were not in time, 0..1."""
    first_p50_s: Seconds
    """Median time to the first token of these."""
    last_batch_s: Seconds | None
    """Time from the begin of the load to the last batch answer; None without batch requests."""
    lost: int
    evicted: int
    """Number of answers that the mesh broke off to begin others."""
    twice: float
    """Tokens that servers computed beyond those of the requests, as a share of these."""


def serve(arm: str, load: Load) -> Round:
    """Serve a load through an arm in front of new servers."""
    timeline, cell = Timeline(), load.cell
    servers: dict[str, list[Server]] = {}
    for model in cell.models:
        servers.setdefault(model, []).append(_server(timeline, cell))
    fronts = {model: ARMS[arm](timeline, every) for model, every in servers.items()}
    requests: list[LoadRequest] = []

    def send(arrival: Arrival) -> None:
        request = LoadRequest(
            class_name=arrival.request_class.name,
            prompt_tokens=arrival.prompt_tokens,
            output_tokens=arrival.output_tokens,
            slo=arrival.request_class.slo,
            importance=Importance.HIGH,
            outcome=Outcome(timeline.now),
            priority=arrival.request_class.priority,
        )
        requests.append(request)
        fronts[arrival.model].send(request)

    for arrival in _arrivals(cell.make, load.rate_rps, load.seconds, load.seed):
        timeline.at(WARM_UP_S + arrival.at_s, partial(send, arrival))
    end_at = WARM_UP_S + load.seconds
    timeline.run(end_at)
    while (
        not all(each.outcome.finished for each in requests) and timeline.now < end_at + PATIENCE_S
    ):
        timeline.run(timeline.now + _LOOK_S)
    computed = sum(server.num_computed for every in servers.values() for server in every)
    return _round_of(requests, computed, list(fronts.values()))


@lru_cache(_LOADS_KEPT)
def _arrivals(make: MakeSession, rate_rps: float, seconds: Seconds, seed: int) -> list[Arrival]:
    """The requests that `doors` would send."""
    made = sessions(make, rate_rps=rate_rps, seconds=seconds, seed=seed)
    return [
        Arrival(
            session.at_s,
            session.model,
            session.request_class,
            session.prompts_tokens,
            session.steps[0].branches[0].answer_tokens,
        )
        for session in made
    ]


def _server(timeline: Timeline, cell: Cell) -> Server:
    return Server(
        timeline,
        Device(timeline),
        LATENCY,
        max_running=cell.max_running,
        max_batched_tokens=ServerLimits(max_running=cell.max_running).budget,
        answer_s=_SPEED.answer_s - _SPEED.prefill_token_s,
        is_vllm=cell.kind == VLLM,
    )


def _round_of(requests: Sequence[LoadRequest], computed: int, fronts: Sequence[Front]) -> Round:
    by_class: dict[str, list[LoadRequest]] = {}
    for each in requests:
        by_class.setdefault(each.class_name, []).append(each)
    targeted = [each for each in requests if each.slo.ttft_s is not None]
    ends = [each.outcome.last_token_at for each in by_class.get(BATCH, ())]
    # The last token of an answer is not computed further.
    wanted = sum(e.prompt_tokens + e.outcome.num_tokens - 1 for e in requests if e.outcome.finished)
    return Round(
        classes={
            name: ClassFigures(
                missed=_missed(every),
                first_p50_s=_first_s(every, 0.5),
                first_p99_s=_first_s(every, 0.99),
            )
            for name, every in sorted(by_class.items())
        },
        missed=_missed(targeted),
        first_p50_s=_first_s(targeted, 0.5),
        last_batch_s=max((end - WARM_UP_S for end in ends if end is not None), default=None),
        lost=sum(not each.outcome.finished for each in requests),
        evicted=sum(each.num_evicted for each in fronts if isinstance(each, Mesh)),
        twice=computed / max(1, wanted) - 1.0,
    )


def _missed(requests: Sequence[LoadRequest]) -> float:
    return sum(is_missed(each.outcome, each.slo) for each in requests) / max(1, len(requests))


def _first_s(requests: Sequence[LoadRequest], share: float) -> Seconds:
    outcomes = [each.outcome for each in requests]
    known = [e.first_token_at - e.arrived_at for e in outcomes if e.first_token_at is not None]
    return float(np.quantile(known, share)) if known else float("inf")
