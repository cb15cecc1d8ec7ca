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


def metric(advised: int, present: int) -> float:
    """What the query returns; `test_the_query_is_computed_as_here` compares it with Prometheus."""
    return float(advised + (math.floor(0.1 * present) if advised > present else 0))


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
        (advised, present)
        for present, more in product((0, 1, 2, 9, 10, 16, 29), (-9, -1, 0, 1, 8))
        if (advised := present + more) >= 0
    ]
    tests = [
        {
            "interval": "1m",
            "input_series": [
                {"series": series, "values": str(value)}
                for series, value in (
                    ('headway_planner_advised_instances{device="d"}', advised),
                    ("headway_planner_instances", present),
                )
            ],
            "promql_expr_test": [
                {
                    "expr": trigger(keda)["metadata"]["query"],
                    "eval_time": "0m",
                    "exp_samples": [{"labels": "{}", "value": metric(advised, present)}],
                }
            ],
        }
        for advised, present in cases
    ]
    file = tmp_path / "scaling.yaml"
    file.write_text(yaml.safe_dump({"rule_files": [], "tests": tests}))
    done = subprocess.run(
        [promtool(), "test", "rules", str(file)], capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stdout + done.stderr


def test_more_instances_are_started_when_the_leader_advises_them():
    for present, more in product(PRESENT, range(1, 9)):
        found = wanted(metric(present + more, present), present)

        assert present + more <= found <= math.ceil(1.1 * (present + more))


def test_the_number_stays_while_the_leader_advises_it():
    assert [wanted(metric(present, present), present) for present in PRESENT] == list(PRESENT)


def test_instances_end_down_to_the_advised_number_and_never_below():
    """A difference up to a tenth is ignored, so that a few more may stay."""
    for present, advised in ((p, a) for p in PRESENT for a in range(1, p)):
        found = wanted(metric(advised, present), present)

        assert found in {advised, present}
        assert found == advised or present - advised <= TOLERANCE * present + 1e-9


def test_the_last_instance_ends_if_zero_is_advised_and_starts_if_more_is(keda: Manifests):
    """KEDA itself goes to zero and back: it compares the metric with the activation threshold."""
    spec = keda.named("ScaledObject", "headway-agent")["spec"]
    threshold = float(trigger(keda)["metadata"]["activationThreshold"])

    assert spec["minReplicaCount"] == 0
    assert metric(0, 1) <= threshold < metric(1, 0)


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

    assert len(names) == 2
    assert names - exported == set()
