"""Series that the services export, and series that other programs are known to export."""

from cachetools import FIFOCache
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

import services.agent.metrics as agent
import services.estimator.metrics as estimator
import services.gateway.metrics as gateway
import services.planner.metrics as planner
from services.agent.backends.settings import SimulatedSettings
from services.agent.backends.simulated.backend import SimulatedEngine
from services.estimator.state import EstimatorState
from services.planner.routed.routing import Routing
from services.planner.settings import RoutingSettings
from services.planner.state import GrouperState, LeaderState
from shared.broker.memory.broker import MemoryBroker
from shared.broker.memory.hub import MemoryHub
from shared.contracts.base import InstanceId
from shared.contracts.lanes import LaneLayout
from shared.runtime.clock import SystemClock
from shared.runtime.metrics import StateCollector
from solver.instance.instance import Instance
from solver.instance.state import InstanceSettings
from solver.prediction.lengths.prompt_lengths import PromptLengths
from solver.routing.shares import TenantShares

Labels = frozenset[str]
TARGET: Labels = frozenset({"instance", "job", "service", "exported_instance"})
"""
Labels that scraping adds. `exported_instance` is the label `instance` of an agent with several
attached servers (`services.agent.attached.replicas`).
"""
PROMETHEUS: dict[str, Labels] = {
    "ALERTS": frozenset({"alertname", "alertstate"}),
    "up": frozenset(),
}
"""Series of Prometheus itself. Alerts also have the labels of their rules and of the results."""
BROKER: dict[str, Labels] = dict.fromkeys(
    (
        "rabbitmq_alarms_file_descriptor_limit",
        "rabbitmq_alarms_free_disk_space_watermark",
        "rabbitmq_alarms_memory_used_watermark",
        "rabbitmq_process_max_fds",
        "rabbitmq_process_open_fds",
        "rabbitmq_process_resident_memory_bytes",
        "rabbitmq_queue_messages_ready",
        "rabbitmq_queue_messages_unacked",
        "rabbitmq_resident_memory_limit_bytes",
    ),
    frozenset(),
)
"""
Series of RabbitMQ without per-object metrics that rules and boards use; tests/e2e/alerts compares
them with those of a broker.
"""


class RecordingRegistry(CollectorRegistry):
    """A registry whose collectors can be listed."""

    def __init__(self) -> None:
        super().__init__()
        self.collectors: list[Collector] = []

    def register(self, collector: Collector) -> None:
        self.collectors.append(collector)
        super().register(collector)


def registry() -> RecordingRegistry:
    """A registry with the metrics of every service."""
    made = RecordingRegistry()
    gateway.GatewayMetrics(made)
    planner.grouper_metrics(
        made,
        GrouperState(shares=TenantShares(max_share=1.0, free_tokens=0), recent=FIFOCache(1)),
        PromptLengths(),
    )
    broker = MemoryBroker(MemoryHub())
    routing = Routing(
        broker=broker,
        settings=RoutingSettings(policy="default"),
        clock=SystemClock(),
        sender="of-the-test",
    )
    planner.routing_metrics(made, routing)
    planner.LeaderMetrics(made, LeaderState(active_since=1.0))
    estimator.estimator_metrics(
        made, EstimatorState(iteration_memory=100, request_memory=100, max_applications=1)
    )
    settings = InstanceSettings(
        instance_id=InstanceId("a"),
        incarnation="i",
        engine="simulated",
        device="simulated",
        capabilities=frozenset(),
        layout=LaneLayout(),
    )
    engine = SimulatedEngine((), SimulatedSettings(), SystemClock())
    agent.AgentMetrics(made, instance=Instance(settings, {}, 0.0), engine=engine)
    return made


def of_services() -> dict[str, Labels]:
    """Name of each series that the services can export -> its labels."""
    found: dict[str, Labels] = {}
    for collector in registry().collectors:
        found |= _series_of(collector)
    return found


def _series_of(collector: Collector) -> dict[str, Labels]:
    if isinstance(collector, StateCollector):
        suffixes = {CounterMetricFamily: "_total", GaugeMetricFamily: ""}
        return {
            each.name + suffixes[each.family]: frozenset(each.labels) for each in collector.series
        }
    assert isinstance(collector, Counter | Gauge | Histogram), collector
    # No sample shows the labels before the first event.
    labels = frozenset(collector._labelnames)
    if isinstance(collector, Histogram):
        name = collector._name
        return {
            f"{name}_bucket": labels | {"le"},
            f"{name}_sum": labels,
            f"{name}_count": labels,
        }
    suffix = "_total" if isinstance(collector, Counter) else ""
    return {collector._name + suffix: labels}
