"""Cost of one scheduling decision with many requests waiting, in units of a fixed CPU loop."""

import statistics
import time
from dataclasses import dataclass

from ops.bench.result import Line, Result, quantiles_ms
from ops.sim.profiles import load
from shared.contracts.base import RequestId
from shared.contracts.qos import Slo
from shared.contracts.telemetry import Iteration
from solver.scheduling.engine.decision import (
    BatchState,
    IterationOutcome,
    RequestView,
)
from solver.scheduling.engine.options import VARIANTS
from solver.scheduling.engine.qoserve import QoServePolicy

NUM_DECODES = 256
LOOP_ADDITIONS = 20_000
LOOP_S = 0.0006
"""Duration of the fixed CPU loop on the machine for which limits are stated (30 ns/addition)."""
_SLOS = (Slo(ttft_s=6, tbt_s=0.05), Slo(ttlt_s=600), Slo(ttlt_s=1800))


@dataclass(slots=True)
class _Running:
    request_id: RequestId
    num_prefill_tokens: int
    num_computed_tokens: int
    num_output_tokens: int
    is_prefill: bool


async def run(
    *,
    seed: int,
    quick: bool,
    broker: str | None,  # noqa: ARG001 - nothing here needs one
) -> Result:
    """Measure the time of decisions, in turn, with 1,000, 10,000 and 100,000 waiting requests."""
    result = Result(name="scheduler_cost", seed=seed, quick=quick)
    rounds = 100 if quick else 400
    arms = {waiting: _Arm(waiting) for waiting in (1_000, 10_000, 100_000)}
    costs: dict[int, list[float]] = {waiting: [] for waiting in arms}
    loops = []
    for _ in range(rounds):
        loops.append(loop_s())
        for waiting, arm in arms.items():
            costs[waiting].append(arm.decide_s())
    median_loop_s = statistics.median(loops)
    medians = {waiting: statistics.median(values) for waiting, values in costs.items()}
    for waiting, median_s in medians.items():
        result.figures[f"{waiting} waiting, median ms"] = 1000 * median_s
        result.figures[f"{waiting} waiting, median loops"] = median_s / median_loop_s
        result.figures[f"{waiting} waiting, p99 ms"] = quantiles_ms(costs[waiting])["p99"]
    result.figures["loop, ms"] = 1000 * median_loop_s
    normalised_ms = 1000 * medians[10_000] / median_loop_s * LOOP_S
    result.lines = [
        Line(name="decision at 10,000 waiting, normalised ms", value=normalised_ms, bound=1.0),
        Line(name="100,000 / 10,000 waiting", value=medians[100_000] / medians[10_000], bound=1.5),
    ]
    return result


class _Arm:
    """A policy with many waiting requests, 256 running decodes and a running prefill."""

    def __init__(self, num_waiting: int) -> None:
        self._num_waiting = num_waiting
        self._num_added = 0
        self._policy = QoServePolicy(load("28").latency, VARIANTS["adaptive"])
        self._now = 0.0
        self._running: list[_Running] = []
        for _ in range(num_waiting + NUM_DECODES):
            self._policy.add(self._arrival())
        while len(self._running) < NUM_DECODES:
            decision = self._policy.decide(self._now, self._state())
            admitted = []
            for request_id in decision.order:
                admitted.append(request_id)
                self._running.append(_Running(request_id, 1000, 1001, 1, is_prefill=False))
                if len(self._running) == NUM_DECODES or len(admitted) == 8:
                    break
            self._policy.observe(self._now, _outcome(tuple(admitted)))

    def decide_s(self) -> float:
        """
        Measured time of one decision: deciding, reading the order as far as an engine would, and
        applying the decision.

        In each iteration, one request arrives, and the first request of the order is admitted and
        ends. So the queue changes as under load and keeps its length.
        """
        self._now += 0.02
        state, arrival = self._state(), self._arrival()
        began = time.perf_counter()
        self._policy.add(arrival)
        decision = self._policy.decide(self._now, state)
        chosen = [each for _, each in zip(range(4), decision.order, strict=False)]
        self._policy.observe(self._now, _outcome(tuple(chosen[:1])))
        self._policy.remove(chosen[0] if chosen else arrival.request_id)
        return time.perf_counter() - began

    def _arrival(self) -> RequestView:
        number = self._num_added
        self._num_added += 1
        return RequestView(
            request_id=RequestId(str(number)),
            arrived_at=max(number * 1e-3, self._now),
            prompt_tokens=500 + number % 997,
            max_tokens=512,
            slo=_SLOS[number % 3],
        )

    def _state(self) -> BatchState:
        return BatchState(
            running=self._running,
            num_waiting=self._num_waiting,
            max_running=NUM_DECODES + 64,
            max_budget_tokens=8192,
            free_kv_tokens=200_000,
        )


def _outcome(admitted: tuple[RequestId, ...]) -> IterationOutcome:
    return IterationOutcome(
        iteration=Iteration(
            compute_tokens=NUM_DECODES, context_tokens=0, num_decodes=NUM_DECODES, duration_s=0.02
        ),
        admitted=admitted,
    )


def loop_s() -> float:
    """Run the fixed CPU loop, and return its time."""
    began = time.perf_counter()
    total = 0
    for number in range(LOOP_ADDITIONS):
        total += number & 7
    return time.perf_counter() - began
