"""The services export every series that Prometheus scrapes or a dashboard draws."""

import json
import re

import pytest
import yaml
from cachetools import FIFOCache
from prometheus_client import CollectorRegistry, generate_latest

from services.agent.backends.settings import SimulatedSettings
from services.agent.backends.simulated.backend import SimulatedEngine
from services.agent.metrics import AgentMetrics
from services.estimator.metrics import estimator_metrics
from services.estimator.state import EstimatorState
from services.gateway.metrics import GatewayMetrics
from services.planner.metrics import LeaderMetrics, grouper_metrics
from services.planner.state import GrouperState, LeaderState
from shared.contracts.base import InstanceId
from shared.contracts.lanes import LaneLayout
from shared.runtime.clock import SystemClock
from solver.instance.instance import Instance
from solver.instance.state import InstanceSettings
from solver.prediction.lengths.prompt_lengths import PromptLengths
from solver.routing.shares import TenantShares
from tests.unit.ops.deployment import ROOT, compose, containers

DASHBOARDS = ROOT / "ops" / "dashboards"
FAMILY = re.compile(r"^# TYPE (\S+) (\S+)$", re.MULTILINE)


@pytest.fixture
def series() -> set[str]:
    """Names of all series that the services can export."""
    registry = CollectorRegistry()
    GatewayMetrics(registry)
    grouper_metrics(
        registry,
        GrouperState(shares=TenantShares(max_share=1.0, free_tokens=0), recent=FIFOCache(1)),
        PromptLengths(),
    )
    leader = LeaderState(active_since=1.0)
    LeaderMetrics(registry, leader)
    estimator_metrics(
        registry, EstimatorState(iteration_memory=100, request_memory=100, max_applications=1)
    )
    settings = InstanceSettings(
        instance_id=InstanceId("a"),
        incarnation="i",
        engine="simulated",
        device="simulated",
        capabilities=frozenset(),
        layout=LaneLayout(),
    )
    instance = Instance(settings, {}, 0.0)
    AgentMetrics(
        registry, instance=instance, engine=SimulatedEngine((), SimulatedSettings(), SystemClock())
    )
    names: set[str] = set()
    for name, kind in FAMILY.findall(generate_latest(registry).decode()):
        suffixes = ("_bucket", "_sum", "_count") if kind == "histogram" else ("",)
        names.update(name + suffix for suffix in suffixes)
    return names


def expressions() -> list[str]:
    dashboard = json.loads((DASHBOARDS / "grafana/dashboards/headway.json").read_text())
    return [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]


def test_every_drawn_series_is_exported(series: set[str]):
    drawn = {name for e in expressions() for name in re.findall(r"headway_\w+", e)}

    assert drawn - series == set()
    assert len(drawn) > 15


def test_metric_names_consist_of_component_noun_and_unit(series: set[str]):
    components = {name.split("_")[1] for name in series if not name.endswith("_created")}

    assert components == {"gateway", "planner", "estimator", "agent"}


def test_prometheus_scrapes_every_container_at_its_health_port():
    prometheus = yaml.safe_load((DASHBOARDS / "prometheus.yml").read_text())
    job = next(j for j in prometheus["scrape_configs"] if j["job_name"] == "headway")
    lookups = job["dns_sd_configs"]
    scraped = [(name, lookup["port"]) for lookup in lookups for name in lookup["names"]]

    assert scraped == [(c.name, c.settings.health_port) for c in containers()]
    assert {c.settings.health_host for c in containers()} == {"0.0.0.0"}


def test_prometheus_scrapes_the_broker_where_it_serves():
    prometheus = yaml.safe_load((DASHBOARDS / "prometheus.yml").read_text())
    job = next(j for j in prometheus["scrape_configs"] if j["job_name"] == "rabbitmq")
    port = re.search(
        r"prometheus\.tcp\.port = (\d+)", (ROOT / "ops/rabbitmq/rabbitmq.conf").read_text()
    )

    assert port is not None
    assert job["static_configs"] == [{"targets": [f"rabbitmq:{port.group(1)}"]}]
    override = (ROOT / "ops/docker/rabbitmq.conf").read_text()
    assert "prometheus.tcp.ip = 0.0.0.0" in override


def test_panels_use_the_datasource_that_is_provisioned():
    provisioning = DASHBOARDS / "grafana/provisioning/datasources/prometheus.yml"
    (source,) = yaml.safe_load(provisioning.read_text())["datasources"]
    dashboard = json.loads((DASHBOARDS / "grafana/dashboards/headway.json").read_text())

    assert {panel["datasource"]["uid"] for panel in dashboard["panels"]} == {source["uid"]}
    assert source["url"] == "http://prometheus:9090"


def test_grafana_finds_the_dashboard_where_it_is_mounted():
    provisioning = DASHBOARDS / "grafana/provisioning/dashboards/headway.yml"
    (provider,) = yaml.safe_load(provisioning.read_text())["providers"]
    grafana = compose()["services"]["grafana"]
    mounts = dict(volume.split(":")[:2] for volume in grafana["volumes"])
    home = grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]

    assert mounts["./ops/dashboards/grafana/dashboards"] == provider["options"]["path"]
    assert home == f"{provider['options']['path']}/headway.json"
