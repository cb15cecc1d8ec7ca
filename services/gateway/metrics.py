"""What a gateway counts."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from services.gateway.outcomes import Outcome
from shared.contracts.qos import QosClass

ENDPOINTS = ("chat", "completions")
TIERS = {
    QosClass.INTERACTIVE: "interactive",
    QosClass.NON_INTERACTIVE: "async",
    QosClass.BEST_EFFORT: "batch",
}
SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2, 5, 10, 20, 60, 120, 300, 900)


class GatewayMetrics:
    """
    Prometheus series of one gateway; every label set is there from the start.

    Args:
        registry: Where they are registered.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self.requests = Counter(
            "headway_gateway_requests_total",
            "Requests by how they ended",
            ("endpoint", "outcome"),
            registry=registry,
        )
        self.ttft_s = Histogram(
            "headway_gateway_request_ttft_seconds",
            "Arrival to the first token, at the gateway",
            ("tier",),
            buckets=SECONDS,
            registry=registry,
        )
        self.e2e_s = Histogram(
            "headway_gateway_request_e2e_seconds",
            "Arrival to the whole answer, at the gateway",
            ("tier",),
            buckets=SECONDS,
            registry=registry,
        )
        self.attained = Counter(
            "headway_gateway_request_slo_attained_total",
            "Requests that met every target they had",
            ("tier",),
            registry=registry,
        )
        self.violated = Counter(
            "headway_gateway_request_slo_violated_total",
            "Accepted requests that missed a target or ended without an answer",
            ("tier",),
            registry=registry,
        )
        self.streams_open = Gauge(
            "headway_gateway_streams_open", "Streamed answers going out now", registry=registry
        )
        for endpoint in ENDPOINTS:
            for outcome in Outcome:
                self.requests.labels(endpoint, outcome.value)
        for tier in TIERS.values():
            for series in (self.ttft_s, self.e2e_s, self.attained, self.violated):
                series.labels(tier)
