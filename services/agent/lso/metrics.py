"""Metrics of LLM serving operations."""

from prometheus_client import CollectorRegistry, Counter, Histogram

from services.agent.lso.results import LsoResult
from shared.contracts.control import LsoOutcome

SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2, 5, 10, 30, 60, 120, 300)


class LsoMetrics:
    """Metrics of the LLM serving operations of one agent."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._ended = Counter(
            "headway_agent_lsos",
            "LLM serving operations that ended, by kind and outcome",
            ("kind", "outcome"),
            registry=registry,
        )
        self._duration_s = Histogram(
            "headway_agent_lso_duration_seconds",
            "Duration of LLM serving operations that were not refused",
            ("kind",),
            buckets=SECONDS,
            registry=registry,
        )
        self._num_bytes = Counter(
            "headway_agent_lso_bytes",
            "Bytes of KV and weights that LLM serving operations moved or dropped, if known",
            ("kind",),
            registry=registry,
        )

    def ended(self, kind: str, result: LsoResult) -> None:
        """Count one finished LLM serving operation."""
        self._ended.labels(kind, result.outcome.value).inc()
        if result.outcome is not LsoOutcome.REFUSED:
            self._duration_s.labels(kind).observe(result.duration_s)
        if result.ok:
            self._num_bytes.labels(kind).inc(result.num_bytes)
