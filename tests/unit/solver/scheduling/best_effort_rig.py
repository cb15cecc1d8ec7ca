"""Fixtures for tests of the limits of best-effort work beside interactive work."""

from dataclasses import replace

from shared.contracts.base import RequestId
from shared.contracts.qos import Slo
from shared.contracts.telemetry import Iteration
from solver.scheduling.engine.decision import (
    BatchState,
    IterationDecision,
    IterationOutcome,
    RequestView,
)
from solver.scheduling.engine.entry import Entry
from solver.scheduling.engine.latency import LatencyTable
from solver.scheduling.engine.options import VARIANTS, SchedulingOptions
from solver.scheduling.engine.qoserve import QoServePolicy
from tests.unit.solver.scheduling.running import Running

LATENCY = LatencyTable(tuple(1e-4 * n for n in range(8193)), context_s=1e-6)
"""A token takes 0.1 ms; reading a token of context takes 1 µs."""
OPTIONS = replace(VARIANTS["conserve"], curve_chunking=False, latency_margin=0.0)
CHAT, DUMP = Slo(ttft_s=1, tbt_s=0.1), Slo()


def entry_of(place: int, prompt: int = 1000) -> Entry:
    view = RequestView(
        request_id=RequestId(str(place)),
        arrived_at=0.0,
        prompt_tokens=prompt,
        max_tokens=100,
        slo=DUMP,
    )
    return Entry(view, place)


def batch_of(*running: Running, free_kv_tokens: int = 10_000) -> BatchState:
    return BatchState(
        running=running,
        num_waiting=0,
        max_running=64,
        max_budget_tokens=4096,
        free_kv_tokens=free_kv_tokens,
    )


class Rig:
    """A policy, and an engine with given requests."""

    def __init__(self, options: SchedulingOptions = OPTIONS) -> None:
        self.policy = QoServePolicy(LATENCY, options)
        self.running: list[Running] = []
        self.free_kv_tokens = 100_000

    def wait(self, name: str, slo: Slo, *, prompt: int = 1000) -> None:
        self.policy.add(
            RequestView(
                request_id=RequestId(name),
                arrived_at=0.0,
                prompt_tokens=prompt,
                max_tokens=100,
                slo=slo,
            )
        )

    def start(
        self, name: str, slo: Slo, *, computed: int, prompt: int = 1000, outputs: int = 0
    ) -> None:
        self.wait(name, slo, prompt=prompt)
        offered = self.policy.decide(0.0, batch_of(free_kv_tokens=10**9)).order
        assert RequestId(name) in list(offered)
        iteration = Iteration(compute_tokens=0, context_tokens=0, num_decodes=0, duration_s=0.0)
        outcome = IterationOutcome(iteration=iteration, admitted=(RequestId(name),))
        self.policy.observe(0.0, outcome)
        run = Running(
            request_id=RequestId(name),
            num_prefill_tokens=prompt,
            num_computed_tokens=computed,
            num_output_tokens=outputs,
        )
        self.running.append(run)

    def decide(self, now: float = 0.5) -> IterationDecision:
        return self.policy.decide(now, batch_of(*self.running, free_kv_tokens=self.free_kv_tokens))
