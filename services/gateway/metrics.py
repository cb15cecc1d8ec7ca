"""Metrics of a gateway."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from services.gateway.outcomes import Outcome
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
