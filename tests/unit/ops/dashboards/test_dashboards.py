"""Prometheus scrapes all services, and boards use its data source and exported series."""

import json
import re
from pathlib import Path

import pytest
import yaml

from ops.alerts import RULES
from ops.generate.boards import boards, render
from tests.unit.ops.dashboards.exported import of_services
from tests.unit.ops.dashboards.expressions import (
    BOARD_FILES,
    board_expressions,
    result_labels,
    unknown_labels,
    unknown_series,
)
from tests.unit.ops.dashboards.promql import names_in
from tests.unit.ops.deployment import ROOT, compose, containers
from tests.unit.ops.doc_tables import table

DASHBOARDS = ROOT / "ops" / "dashboards"
every_board = pytest.mark.parametrize("path", BOARD_FILES, ids=lambda path: path.stem)


def test_boards_by_role_are_current():
    """To update them: python -m ops.generate.boards"""
    made = {f"{board.name}.json": render(board) for board in boards()}

    assert made == {path.name: path.read_text() for path in BOARD_FILES if path.name in made}
    assert made.keys() == {"mesh.json", "capacity.json", "slo.json"}


@every_board
def test_every_drawn_series_is_exported(path: Path):
    drawn = {name for e in board_expressions(path) for name in names_in(e).series}

    assert {name for e in board_expressions(path) for name in unknown_series(e)} == set()
    assert len(drawn) > 10


@every_board
def test_every_label_in_a_query_is_exported(path: Path):
    assert {label for e in board_expressions(path) for label in unknown_labels(e)} == set()


@every_board
def test_every_label_in_a_legend_is_a_label_of_the_result(path: Path):
    panels = json.loads(path.read_text())["panels"]
    missing = {
        (panel["title"], label)
        for panel in panels
        for target in panel["targets"]
        for label in re.findall(r"{{(\w+)}}", target["legendFormat"])
        if label not in result_labels(target["expr"])
    }

    assert missing == set()


def test_metric_names_consist_of_component_noun_and_unit():
    components = {name.split("_")[1] for name in of_services()}

    assert components == {"gateway", "planner", "estimator", "agent", "instance"}


def test_the_documented_series_are_exactly_those_that_the_services_export():
    documented = {
        f"headway_{row[0].partition(',')[0]}_{name}"
        for row in table(ROOT / "ops/docs/operations.md", "component")
        for name in re.findall(r"`(\w+)(?:{[^}]*})?`", row[2])
    }
    exported = {re.sub(r"_(bucket|sum|count)$", "", name) for name in of_services()}

    assert documented == exported


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


@every_board
def test_panels_use_the_datasource_that_is_provisioned(path: Path):
    provisioning = DASHBOARDS / "grafana/provisioning/datasources/prometheus.yml"
    (source,) = yaml.safe_load(provisioning.read_text())["datasources"]
    panels = json.loads(path.read_text())["panels"]

    assert {panel["datasource"]["uid"] for panel in panels} == {source["uid"]}
    assert source["url"] == "http://prometheus:9090"


def test_boards_have_different_addresses():
    documents = [json.loads(path.read_text()) for path in BOARD_FILES]

    assert len({document["uid"] for document in documents}) == len(BOARD_FILES)
    assert len({document["title"] for document in documents}) == len(BOARD_FILES)


def test_prometheus_loads_the_rules_where_they_are_mounted():
    prometheus = yaml.safe_load((DASHBOARDS / "prometheus.yml").read_text())
    mounts = dict(
        volume.split(":")[:2] for volume in compose()["services"]["prometheus"]["volumes"]
    )

    assert prometheus["rule_files"] == [f"{mounts['./ops/dashboards/rules']}/*.yml"]
    assert RULES == DASHBOARDS / "rules"


def test_grafana_finds_the_dashboard_where_it_is_mounted():
    provisioning = DASHBOARDS / "grafana/provisioning/dashboards/headway.yml"
    (provider,) = yaml.safe_load(provisioning.read_text())["providers"]
    grafana = compose()["services"]["grafana"]
    mounts = dict(volume.split(":")[:2] for volume in grafana["volumes"])
    home = grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]

    assert mounts["./ops/dashboards/grafana/dashboards"] == provider["options"]["path"]
    assert home == f"{provider['options']['path']}/headway.json"
