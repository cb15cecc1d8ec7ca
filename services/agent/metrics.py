"""Metrics of an agent, read from the instance and its engine at each scrape."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import attrgetter

from prometheus_client import CollectorRegistry, Counter, Histogram

from services.agent.backends.base import EngineBackend, EngineSnapshot
from shared.contracts.control import LsoOutcome
from shared.contracts.qos import QosClass
from shared.contracts.telemetry import RequestObserved, Residency
from shared.runtime.metrics import BoundedCounts, Series, StateCollector, counter, gauge
from solver.instance.instance import Instance
from solver.instance.views import plan_epoch
from solver.planning.lso.results import LsoResult

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2, 5, 10, 20, 60, 120, 300, 900)
LSO_SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2, 5, 10, 30, 60, 120, 300)
COMPLETED = "completed"
CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class Sources:
    """What the metrics of one scrape are read from."""

    instance: Instance
    engine: EngineBackend
    now: EngineSnapshot
    """Snapshot of the engine, made at the scrape."""


GAUGES = """
requests_running = instance.requests.num_runs: Requests on the engine
requests_running_limit = now.max_running: Maximum number of requests that the engine runs at once
requests_waiting = instance.requests.num_waiting: Pulled requests that are not running
requests_resting = instance.requests.num_swapped_out: Waiting requests that are swapped out
window_tokens = instance.requests.window.tokens: Maximum number of tokens that the waiting requests may need
kv_utilization_ratio = now.kv_utilization: Used share of the KV cache
kv_capacity_tokens = now.kv_capacity_tokens: Size of the KV cache in tokens
host_kv_bytes = now.host_kv_bytes: Host memory used by KV checkpoints
host_kv_capacity_bytes = now.host_kv_capacity_bytes: Host memory available for KV checkpoints
iteration_token_budget = now.token_budget: Token budget of the engine's last iteration
draining = instance.draining: 1 while the instance drains and pulls nothing
engine_up = engine.alive: 1 while the engine is alive
"""  # noqa: E501 - rows of a table
"""Rows `name = path: help`; the path leads from `Sources` to the value."""

COUNTERS = """
requests_pulled = instance.totals.pulled: Requests pulled from queues
requests_completed = instance.totals.completed: Requests answered
requests_failed = instance.totals.failed: Requests that ended with an error
requests_evicted = instance.totals.evicted: Runs evicted: requests requeued with their progress
requests_swapped_out = instance.totals.swapped_out: Runs swapped out: removed from the engine and kept by the agent
requests_renewed = instance.totals.renewed: Copies of held requests that replaced their deliveries
requests_relegated = instance.totals.relegated: Requests that were relegated when they were pulled
swaps = instance.totals.swaps: Changes of the active model
crashes = instance.totals.crashes: Crashes of the engine
prompt_tokens = instance.totals.prompt_tokens: Prompt tokens of completed requests
output_tokens = instance.totals.output_tokens: Output tokens of completed requests
scheduler_holds = now.scheduling.held: Held prefills, counted once per iteration
scheduler_preemptions = now.scheduling.preempted: Requests that lost their KV
scheduler_relegations = now.scheduling.relegated: Ended requests that the scheduling policy had relegated as late
scheduler_layer_preemptions = now.scheduling.layer_preemptions: Iterations whose best-effort part was dropped between two layers
scheduler_dropped_tokens = now.scheduling.dropped_tokens: Best-effort tokens that were scheduled, and dropped between two layers
scheduler_yield_seconds = now.scheduling.yield_s: Total time from demands for layer preemption to the safepoints
kv_saved_blocks = now.checkpoints.saved_blocks: KV blocks copied to host memory
kv_saved_bytes = now.checkpoints.saved_bytes: Bytes of KV copied to host memory
kv_save_seconds = now.checkpoints.save_s: Engine time spent on copying KV to host memory
kv_restored_blocks = now.checkpoints.restored_blocks: KV blocks copied back from host memory
kv_restored_bytes = now.checkpoints.restored_bytes: Bytes of KV copied back from host memory
kv_restore_seconds = now.checkpoints.restore_s: Time spent on copying KV back from host memory
"""  # noqa: E501 - rows of a table
"""Rows as in `GAUGES`."""


def _rows(table: str) -> Iterator[tuple[str, str, Callable[[Sources], float]]]:
    """Name, help and function of each row of a table."""
    for row in table.strip().splitlines():
        name, _, rest = row.partition(" = ")
        path, _, text = rest.partition(": ")
        yield f"headway_agent_{name}", text, attrgetter(path)


def _series() -> list[Series[Sources]]:
    return [
        *(gauge(name, text, read) for name, text, read in _rows(GAUGES)),
        *(counter(name, text, read) for name, text, read in _rows(COUNTERS)),
        counter(
            "headway_agent_requests_expired",
            "Requests that reached their ends: when they were pulled, in the window or as runs",
            lambda sources: [
                ((place,), float(count))
                for place, count in sorted(sources.instance.totals.expired.items())
            ],
            "place",
        ),
        gauge(
            "headway_agent_plan_epoch",
            "Epoch of the current plan",
            lambda sources: plan_epoch(sources.instance),
        ),
        gauge(
            "headway_agent_model_active",
            "1 for the active model",
            lambda sources: [
                ((each.model,), float(each.residency is Residency.ACTIVE))
                for each in sources.now.models
            ],
            "model",
        ),
        Series(
            "headway_agent_info",
            "The instance",
            lambda sources: [(_identity(sources.instance), 1.0)],
            ("instance_id", "engine", "device"),
        ),
    ]


def _identity(instance: Instance) -> tuple[str, str, str]:
    settings = instance.settings
    return settings.instance_id, settings.engine, settings.device


class AgentMetrics:
    """
    Prometheus metrics of one agent.

    Only finished requests and operations are counted when they occur.
    """

    def __init__(
        self, registry: CollectorRegistry, *, instance: Instance, engine: EngineBackend
    ) -> None:
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
        self.lsos = Counter(
            "headway_agent_lsos",
            "LLM serving operations that ended, by kind and outcome",
            ("kind", "outcome"),
            registry=registry,
        )
        self.lso_duration_s = Histogram(
            "headway_agent_lso_duration_seconds",
            "Duration of LLM serving operations that were not refused",
            ("kind",),
            buckets=LSO_SECONDS,
            registry=registry,
        )
        self.lso_bytes = Counter(
            "headway_agent_lso_bytes",
            "Bytes of KV and weights that LLM serving operations moved or dropped, if known",
            ("kind",),
            registry=registry,
        )
        for qos_class in QosClass:
            for series in (self.ttft_s, self.e2e_s, self.attained, self.violated):
                series.labels(qos_class.value)
        self.attained_by_tenant, self.violated_by_tenant = BoundedCounts(), BoundedCounts()
        StateCollector(registry, lambda: Sources(instance, engine, engine.snapshot()), _series())
        StateCollector(registry, lambda: self, TENANTS)

    def finished(self, observed: RequestObserved) -> None:
        """Count a finished request."""
        qos_class = observed.qos_class.value
        if observed.outcome == COMPLETED:
            self.ttft_s.labels(qos_class).observe(observed.first_token_at - observed.arrived_at)
            self.e2e_s.labels(qos_class).observe(observed.finished_at - observed.arrived_at)
        if observed.outcome != CANCELLED:
            verdict = self.attained if observed.attained else self.violated
            verdict.labels(qos_class).inc()
            self.attained_by_tenant.add(observed.tenant, qos_class, number=int(observed.attained))
            self.violated_by_tenant.add(
                observed.tenant, qos_class, number=int(not observed.attained)
            )

    def ended(self, kind: str, result: LsoResult) -> None:
        """Count a finished LLM serving operation."""
        self.lsos.labels(kind, result.outcome.value).inc()
        if result.outcome is not LsoOutcome.REFUSED:
            self.lso_duration_s.labels(kind).observe(result.duration_s)
        if result.ok:
            self.lso_bytes.labels(kind).inc(result.num_bytes)


TENANTS: tuple[Series[AgentMetrics], ...] = (
    counter(
        "headway_agent_tenant_slo_attained",
        "Completed requests that met all of their targets, by tenant",
        lambda metrics: metrics.attained_by_tenant.samples(),
        "tenant",
        "qos_class",
    ),
    counter(
        "headway_agent_tenant_slo_violated",
        "Requests that missed a target or failed, by tenant; cancelled ones are not counted",
        lambda metrics: metrics.violated_by_tenant.samples(),
        "tenant",
        "qos_class",
    ),
)
"""The first 100 tenants of an agent have counts of their own; later ones count as `other`."""
