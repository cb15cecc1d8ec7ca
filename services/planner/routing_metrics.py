"""What a routing grouper shows of its routers."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from services.planner.routing import Routing

_DEVICE = ["model", "engine", "device"]


class RoutingMetrics(Collector):
    """
    Prometheus series, read when they are asked for.

    Args:
        registry: Where they are registered.
        routing: The grouper's.
    """

    def __init__(self, registry: CollectorRegistry, routing: Routing) -> None:
        self._routing = routing
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """The state now."""
        routing = self._routing
        yield CounterMetricFamily(
            "headway_planner_requests_routed", "Requests sent to an inbox", routing.num_routed
        )
        yield CounterMetricFamily(
            "headway_planner_requests_unrouted",
            "Requests left to lanes for want of an instance or of room",
            routing.num_left_to_lanes,
        )
        yield GaugeMetricFamily(
            "headway_planner_routing_waiting",
            "Requests that wait for their turn",
            routing.num_waiting,
        )
        yield from self._by_model()
        yield from self._by_device()

    def _by_model(self) -> Iterator[Metric]:
        instances = GaugeMetricFamily(
            "headway_planner_routing_instances", "That requests go to", labels=["model"]
        )
        fallen_back = GaugeMetricFamily(
            "headway_planner_routing_fallen_back",
            "1 while predictions are not trusted: first come, first served and least loaded",
            labels=["model"],
        )
        for each in self._routing.routers:
            instances.add_metric([each.model], len(each.router.instances))
            fallen_back.add_metric([each.model], float(each.router.is_fallen_back))
        yield from (instances, fallen_back)

    def _by_device(self) -> Iterator[Metric]:
        covered = GaugeMetricFamily(
            "headway_planner_prefill_coverage",
            "Share of the latest prefills within their watched quantile",
            labels=_DEVICE,
        )
        residual = GaugeMetricFamily(
            "headway_planner_prefill_residual_seconds",
            "Mean of predicted less realised prefill times; negative is optimistic",
            labels=_DEVICE,
        )
        for each in self._routing.routers:
            for trust in each.trusts():
                labels = [each.model, trust.engine, trust.device]
                covered.add_metric(labels, trust.covered)
                residual.add_metric(labels, trust.residual_s)
        yield from (covered, residual)
