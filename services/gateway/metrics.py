"""Metrics of a gateway."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from services.gateway.call import Call
from services.gateway.outcomes import Outcome
from shared.contracts.base import UnixTime
from shared.contracts.qos import QosClass

ENDPOINTS = (
    *("chat", "completions", "responses", "messages"),
    *("count_tokens", "tokenize", "detokenize", "files", "batches"),
)
SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2, 5, 10, 20, 60, 120, 300, 900)


class GatewayMetrics:
    """Prometheus metrics of one gateway; all label combinations are exported from the start."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.requests = Counter(
            "headway_gateway_requests_total",
            "Requests by outcome",
            ("endpoint", "outcome"),
            registry=registry,
        )
        self.ttft_s = Histogram(
            "headway_gateway_request_ttft_seconds",
            "Time from a request's arrival at the gateway to its first token",
            ("qos_class",),
            buckets=SECONDS,
            registry=registry,
        )
        self.e2e_s = Histogram(
            "headway_gateway_request_e2e_seconds",
            "Time from a request's arrival at the gateway to its whole answer",
            ("qos_class",),
            buckets=SECONDS,
            registry=registry,
        )
        self.attained = Counter(
            "headway_gateway_request_slo_attained_total",
            "Requests that met all of their targets",
            ("qos_class",),
            registry=registry,
        )
        self.violated = Counter(
            "headway_gateway_request_slo_violated_total",
            "Accepted requests that missed a target or ended without an answer",
            ("qos_class",),
            registry=registry,
        )
        self.streams_open = Gauge(
            "headway_gateway_streams_open", "Streamed answers in progress", registry=registry
        )
        for endpoint in ENDPOINTS:
            for outcome in Outcome:
                self.requests.labels(endpoint, outcome.value)
        for qos_class in QosClass:
            for series in (self.ttft_s, self.e2e_s, self.attained, self.violated):
                series.labels(qos_class.value)

    def observe(self, call: Call, outcome: Outcome, *, now: UnixTime) -> None:
        """Count an accepted call that has ended, and its times if it was answered now."""
        qos_class = call.slo.qos_class.value
        final = call.final
        if final is None:
            if outcome not in (Outcome.CANCELLED, Outcome.REFUSED):
                self.violated.labels(qos_class).inc()
            return
        first_token_at = final.timings.first_token_at
        if first_token_at < call.arrived_at:
            return  # the stored answer of an earlier call
        self.ttft_s.labels(qos_class).observe(first_token_at - call.arrived_at)
        self.e2e_s.labels(qos_class).observe(now - call.arrived_at)
        (self.attained if final.verdict.attained else self.violated).labels(qos_class).inc()
