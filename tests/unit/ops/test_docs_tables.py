"""Tables of the documents agree with the code's settings, policies, counters and benches."""

import dataclasses
import re
from typing import get_args

import msgspec
import pytest
from msgspec.structs import fields

from ops.bench.__main__ import BENCHES, BY_NAME
from ops.bench.__main__ import parser as bench_parser
from ops.sim.cli import SIMULATE
from ops.sim.lengths import MIXES
from ops.sim.policies import policy_names
from ops.sim.profiles import ALIASES
from services.agent.backends.policies import PolicyName, SchedulingSettings
from services.agent.backends.settings import VllmSettings
from services.agent.backends.totals import SchedulingTotals
from services.agent.settings import PullSettings
from services.estimator.settings import AlarmSettings, TreesSettings
from services.planner.leader.policies import PLAN_POLICIES
from services.planner.settings import RoutingSettings
from shared.store.settings import StoreSettings
from solver.planning.review import Cause
from solver.prediction.calibration.coverage import CoverageOptions
from solver.prediction.prefill.features import FEATURES
from solver.routing.options import VARIANTS
from tests.unit.ops.deployment import ROOT
from tests.unit.ops.doc_tables import names, table

SCHEDULING = ROOT / "ops/docs/scheduling.md"
PLANNING = ROOT / "ops/docs/planning.md"
PREDICTION = ROOT / "ops/docs/prediction.md"
ROUTING = ROOT / "ops/docs/routing.md"
BENCH_TABLE = ROOT / "ops/docs/benches.md"
STORE = ROOT / "ops/docs/store.md"
SIMULATOR = ROOT / "ops/docs/simulate.md"
SOURCES = ("solver", "shared", "services", "ops/sim", "ops/baselines", "ops/profiling")


@pytest.mark.parametrize(
    ("header", "settings"), [("scheduling", SchedulingSettings), ("pull", PullSettings)]
)
def test_settings_are_listed_with_their_defaults(header: str, settings: type[msgspec.Struct]):
    documented = {row[0].strip("`"): row[1] for row in table(SCHEDULING, header)}

    assert documented == {
        field.name: "none" if field.default is None else str(field.default)
        for field in fields(settings)
    }


def test_policies_of_the_backends_are_listed():
    listed = set(names(SCHEDULING, "policy"))

    assert listed == {*get_args(PolicyName), "stock"}
    for policy in listed:
        msgspec.convert({"policy": policy}, VllmSettings)


def test_counters_are_listed():
    assert set(names(SCHEDULING, "counter")) == set(SchedulingTotals.__dataclass_fields__)


def test_listed_files_are_exactly_those_that_depart_from_a_paper():
    paths = [path for folder in SOURCES for path in (ROOT / folder).rglob("*.py")]
    depart = {
        str(path.relative_to(ROOT))
        for path in paths
        if re.search(r"^ +(?:Differs|Decided): ", path.read_text(), re.MULTILINE)
    }

    pages = (SCHEDULING, PLANNING, PREDICTION, ROUTING)
    listed = {name for page in pages for name in names(page, "file")}

    assert listed == depart


def test_plan_policies_and_causes_are_listed():
    assert set(names(PLANNING, "plan policy")) == set(PLAN_POLICIES)
    assert set(names(PLANNING, "cause")) == {cause.value for cause in Cause}


def test_features_of_prefill_times_are_listed():
    assert tuple(names(PREDICTION, "feature")) == FEATURES


def test_bounds_of_trust_are_listed_with_their_defaults():
    documented = {row[0].strip("`"): row[1] for row in table(PREDICTION, "coverage")}

    assert documented == {
        each.name: str(each.default) for each in dataclasses.fields(CoverageOptions)
    }


def test_thresholds_of_alarms_are_listed_with_their_defaults():
    documented = {row[0].strip("`"): row[1] for row in table(PREDICTION, "estimator setting")}

    assert documented == {
        f"alarms.{field.name}": str(field.default) for field in fields(AlarmSettings)
    }


def test_settings_of_trees_are_listed_with_their_defaults():
    documented = {row[0].strip("`"): row[1] for row in table(PREDICTION, "trees setting")}

    assert documented == {
        f"trees.{field.name}": "none" if field.default is None else str(field.default)
        for field in fields(TreesSettings)
    }


def test_settings_of_routing_are_listed_with_their_defaults():
    documented = {row[0].strip("`"): row[1] for row in table(ROUTING, "routing setting")}

    assert documented == {field.name: str(field.default) for field in fields(RoutingSettings)}


def test_settings_of_the_store_are_listed_with_their_defaults():
    documented = {row[0].strip("`"): row[1] for row in table(STORE, "store setting")}
    plain = {
        field.name: "none" if field.default is None else str(field.default)
        for field in fields(StoreSettings)
        if isinstance(field.default, (int, float, type(None)))
    }

    assert documented.keys() == set(StoreSettings.__struct_fields__)
    assert {name: documented[name] for name in plain} == plain


def test_routing_policies_are_listed():
    assert set(names(ROUTING, "routing policy")) == set(VARIANTS)


def test_policies_of_the_simulator_are_listed():
    listed = [name for name in names(SIMULATOR, "name") if not name.startswith(":")]

    assert sorted(listed) == policy_names()


def test_profiles_of_the_simulator_are_listed():
    assert names(SIMULATOR, "profile") == list(ALIASES)


def test_options_of_the_simulator_are_listed():
    known = {each.name for each in SIMULATE.assemble_argument_collection() if each.show}

    assert set(names(SIMULATOR, "option")) == known


def test_workloads_of_the_simulator_are_named():
    line = next(line for line in SIMULATOR.read_text().splitlines() if "`--workload` is" in line)

    assert set(re.findall(r"`([a-z]+)`", line)) == set(MIXES)


def test_benches_are_listed():
    assert set(names(BENCH_TABLE, "bench")) == {*BENCHES, *BY_NAME}


def test_options_of_the_benches_are_listed():
    known = set(re.findall(r"--[a-z]+", bench_parser().format_help())) - {"--help"}
    listed = {option.split()[0] for option in names(BENCH_TABLE, "option")}

    assert listed == known


def test_the_help_of_the_benches_refers_to_a_document_that_exists():
    mentioned = re.findall(r"[\w/]+\.md", bench_parser().format_help())

    assert [(ROOT / path).exists() for path in mentioned] == [True]
