"""The number of instances that KEDA's autoscaler reads leads to the advised number."""

import math
import re
import subprocess
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry, generate_latest

from services.planner.metrics import LeaderMetrics
from services.planner.state import LeaderState
from tests.requirements import promtool
from tests.unit.ops.kustomize.manifests import Manifests

TOLERANCE = 0.1
"""Difference that a HorizontalPodAutoscaler ignores, as a share of the current number."""
PRESENT = range(1, 41)


def trigger(keda: Manifests) -> dict[str, Any]:
    (found,) = keda.named("ScaledObject", "headway-agent")["spec"]["triggers"]
    assert isinstance(found, dict)
    return found


def metric(advised: int, present: int, waiting: int) -> float:
    """What the query returns; `test_the_query_is_computed_as_here` compares it with Prometheus."""
    step_up = math.floor(0.1 * present) if advised > present else 0
    step_down = math.ceil(0.11 * advised) if not waiting else 0
    return float(advised + step_up - step_down)


def wanted(value: float, present: int) -> int:
    """Number that the autoscaler computes from a metric with the type AverageValue and target 1."""
    if abs(value / present - 1.0) <= TOLERANCE + 1e-9:
        return present
    return math.ceil(value)


@pytest.fixture
def keda(overlay: Callable[[str], Manifests]) -> Manifests:
    return overlay("keda")


def test_the_query_is_computed_as_here(keda: Manifests, tmp_path: Path):
    cases = [
        (advised, present, waiting)
        for present, more, waiting in product((1, 2, 9, 10, 16, 29), (0, 1, 8), (0, 7))
        for advised in (present + more,)
    ]
    tests = [
        {
            "interval": "1m",
            "input_series": [
                {"series": series, "values": str(value)}
                for series, value in (
                    ('headway_planner_advised_instances{device="d"}', advised),
                    ("headway_planner_instances", present),
                    ('headway_planner_lane_requests{lane="a"}', waiting),
                    ('headway_planner_lane_requests{lane="other"}', 0),
                )
            ],
            "promql_expr_test": [
                {
                    "expr": trigger(keda)["metadata"]["query"],
                    "eval_time": "0m",
                    "exp_samples": [{"labels": "{}", "value": metric(advised, present, waiting)}],
                }
            ],
        }
        for advised, present, waiting in cases
    ]
    file = tmp_path / "scaling.yaml"
    file.write_text(yaml.safe_dump({"rule_files": [], "tests": tests}))
    done = subprocess.run(
        [promtool(), "test", "rules", str(file)], capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stdout + done.stderr


def test_more_instances_are_started_when_the_leader_advises_them():
    for present, more in product(PRESENT, range(1, 9)):
        found = wanted(metric(present + more, present, waiting=5), present)

        assert present + more <= found <= math.ceil(1.1 * (present + more))


def test_the_number_stays_while_requests_wait_and_none_is_late():
    stays = [wanted(metric(present, present, waiting=5), present) for present in PRESENT]

    assert stays == list(PRESENT)


def test_instances_end_one_step_at_a_time_while_nothing_waits():
    """A step of one instance is within the tolerance from ten instances on."""
    for present in PRESENT:
        found = wanted(metric(present, present, waiting=0), present)

        assert present - math.ceil(present / 9) <= found < present


def test_without_a_leader_the_number_stays(keda: Manifests):
    """The query has no result then, which is an error instead of a zero."""
    assert trigger(keda)["metadata"]["ignoreNullValues"] == "false"
    assert "fallback" not in keda.named("ScaledObject", "headway-agent")["spec"]


def test_each_advised_instance_is_one_pod(keda: Manifests):
    assert trigger(keda)["metricType"] == "AverageValue"
    assert trigger(keda)["metadata"]["threshold"] == "1"


def test_an_active_leader_exports_the_metrics_of_the_query(keda: Manifests):
    registry = CollectorRegistry()
    LeaderMetrics(registry, LeaderState(active_since=1.0))
    names = set(re.findall(r"headway_\w+", trigger(keda)["metadata"]["query"]))
    exported = set(re.findall(r"^# TYPE (\w+)", generate_latest(registry).decode(), re.MULTILINE))

    assert len(names) == 3
    assert names - exported == set()
