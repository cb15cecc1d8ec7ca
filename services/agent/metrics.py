"""Metrics of an agent."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from services.agent.backends.base import EngineBackend
from services.agent.endings import Observe
from services.agent.state import AgentState
from shared.contracts.qos import QosClass
from shared.contracts.telemetry import RequestObserved, Residency

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2, 5, 10, 20, 60, 120, 300, 900)
COMPLETED = "completed"
CANCELLED = "cancelled"


class AgentMetrics(Collector):
    """
    Prometheus metrics of one agent, read from the agent's state at collection.

    Only finished requests are counted when they occur, so counting tokens costs nothing.
    """

    def __init__(
        self, registry: CollectorRegistry, *, state: AgentState, engine: EngineBackend
    ) -> None:
        self._state = state
        self._engine = engine
        self.ttft_s = Histogram(
            "headway_agent_request_ttft_seconds",
            "Time from arrival at the mesh to the first token, of completed requests",
            ("qos_class",),
            buckets=SECONDS,
            registry=registry,
        )
        self.e2e_s = Histogram(
            "headway_agent_request_e2e_seconds",
            "Time from arrival at the mesh to the last token, of completed requests",
            ("qos_class",),
            buckets=SECONDS,
            registry=registry,
        )
        self.attained = Counter(
            "headway_agent_request_slo_attained_total",
            "Completed requests that met all of their targets",
            ("qos_class",),
            registry=registry,
        )
        self.violated = Counter(
            "headway_agent_request_slo_violated_total",
            "Requests that missed a target or failed; cancelled ones are not counted",
            ("qos_class",),
            registry=registry,
        )
        for qos_class in QosClass:
            for series in (self.ttft_s, self.e2e_s, self.attained, self.violated):
                series.labels(qos_class.value)
        registry.register(self)

    def counting(self, observe: Observe) -> Observe:
        """Wrap *observe* so that every observation is counted."""

        async def counted(observed: RequestObserved) -> None:
            self._count(observed)
            await observe(observed)

        return counted

    def _count(self, observed: RequestObserved) -> None:
        qos_class = observed.qos_class.value
        if observed.outcome == COMPLETED:
            self.ttft_s.labels(qos_class).observe(observed.first_token_at - observed.arrived_at)
            self.e2e_s.labels(qos_class).observe(observed.finished_at - observed.arrived_at)
        if observed.outcome != CANCELLED:
            verdict = self.attained if observed.attained else self.violated
            verdict.labels(qos_class).inc()

    def collect(self) -> Iterator[Metric]:
        """Return the metrics of the agent's current state."""
        state, snapshot, identity = self._state, self._engine.snapshot(), self._engine.identity
        yield InfoMetricFamily(
            "headway_agent",
            "The instance",
            {
                "instance_id": state.instance_id,
                "engine": identity.engine,
                "device": identity.device,
            },
        )
        yield from self._totals()
        for name, text, value in (
            ("requests_running", "Requests on the engine", len(state.runs)),
            (
                "requests_running_limit",
                ("Maximum number of requests that the engine runs at once"),
                snapshot.max_running,
            ),
            ("requests_waiting", "Pulled requests that are not running", state.num_waiting),
            ("requests_resting", "Waiting requests that are swapped out", len(state.swapped_out)),
            (
                "window_tokens",
                "Maximum number of tokens that the waiting requests may need",
                state.window.tokens,
            ),
            ("kv_utilization_ratio", "Used share of the KV cache", snapshot.kv_utilization),
            ("kv_capacity_tokens", "Size of the KV cache in tokens", snapshot.kv_capacity_tokens),
            ("host_kv_bytes", "Host memory used by KV checkpoints", snapshot.host_kv_bytes),
            (
                "host_kv_capacity_bytes",
                "Host memory available for KV checkpoints",
                snapshot.host_kv_capacity_bytes,
            ),
            (
                "iteration_token_budget",
                "Token budget of the engine's last iteration",
                snapshot.token_budget,
            ),
            ("plan_epoch", "Epoch of the current plan", state.plan.epoch if state.plan else 0),
            ("draining", "1 while the instance drains and pulls nothing", int(state.draining)),
            ("engine_up", "1 while the engine is alive", int(self._engine.alive)),
        ):
            yield GaugeMetricFamily(f"headway_agent_{name}", text, value)
        active = GaugeMetricFamily(
            "headway_agent_model_active", "1 for the active model", labels=("model",)
        )
        for entry in snapshot.models:
            active.add_metric((entry.model,), float(entry.residency is Residency.ACTIVE))
        yield active

    def _totals(self) -> Iterator[Metric]:
        snapshot = self._engine.snapshot()
        totals, scheduling, copied = self._state.totals, snapshot.scheduling, snapshot.checkpoints
        for name, text, value in (
            ("requests_pulled", "Requests pulled from queues", totals.pulled),
            ("requests_completed", "Requests answered", totals.completed),
            ("requests_failed", "Requests that ended with an error", totals.failed),
            (
                "requests_evicted",
                "Runs evicted: requests requeued with their progress",
                totals.evicted,
            ),
            (
                "requests_swapped_out",
                ("Runs swapped out: removed from the engine and kept by the agent"),
                totals.swapped_out,
            ),
            (
                "requests_relegated",
                "Requests that were relegated when they were pulled",
                totals.relegated,
            ),
            ("swaps", "Changes of the active model", totals.swaps),
            ("crashes", "Crashes of the engine", totals.crashes),
            ("prompt_tokens", "Prompt tokens of completed requests", totals.prompt_tokens),
            ("output_tokens", "Output tokens of completed requests", totals.output_tokens),
            ("scheduler_holds", "Held prefills, counted once per iteration", scheduling.held),
            ("scheduler_preemptions", "Requests that lost their KV", scheduling.preempted),
            (
                "scheduler_relegations",
                "Ended requests that the scheduling policy had relegated as late",
                scheduling.relegated,
            ),
            (
                "scheduler_layer_preemptions",
                "Iterations whose best-effort part was dropped between two layers",
                scheduling.layer_preemptions,
            ),
            (
                "scheduler_dropped_tokens",
                "Best-effort tokens that were scheduled, and dropped between two layers",
                scheduling.dropped_tokens,
            ),
            (
                "scheduler_yield_seconds",
                "Total time from demands for layer preemption to the safepoints",
                scheduling.yield_s,
            ),
            ("kv_saved_blocks", "KV blocks copied to host memory", copied.saved_blocks),
            ("kv_saved_bytes", "Bytes of KV copied to host memory", copied.saved_bytes),
            ("kv_save_seconds", "Engine time spent on copying KV to host memory", copied.save_s),
            (
                "kv_restored_blocks",
                "KV blocks copied back from host memory",
                copied.restored_blocks,
            ),
            (
                "kv_restored_bytes",
                "Bytes of KV copied back from host memory",
                copied.restored_bytes,
            ),
            (
                "kv_restore_seconds",
                "Time spent on copying KV back from host memory",
                copied.restore_s,
            ),
        ):
            yield CounterMetricFamily(f"headway_agent_{name}", text, value)
