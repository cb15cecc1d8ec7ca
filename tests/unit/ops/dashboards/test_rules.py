"""Alert rules use exported series, say what to do, and pass their unit tests."""

import re
import subprocess
from pathlib import Path

import pytest
import yaml

from ops.alerts import RULES, UNIT_S, main, rule_files, rules, seconds_of, shortened
from services.planner.grouper.dead_letter_replies import DEAD_LETTER_REASONS, MESH_REASONS
from shared.contracts.errors import SettingsError
from shared.contracts.qos import QosClass
from shared.runtime.metrics import OTHER
from tests import requirements
from tests.unit.ops.dashboards.expressions import (
    BOARD_FILES,
    board_expressions,
    result_labels,
    unknown_labels,
    unknown_series,
)
from tests.unit.ops.dashboards.promql import names_in
from tests.unit.ops.deployment import ROOT
from tests.unit.ops.doc_tables import table

UNIT_TESTS = sorted((RULES / "tests").glob("*.yml"))
PAGE = ROOT / "ops/docs/alerts.md"
ALERTS = [rule for rule in rules() if "alert" in rule]


@pytest.fixture(scope="module")
def promtool() -> str:
    return requirements.promtool()


def test_every_series_in_a_rule_is_exported():
    assert {name for rule in rules() for name in unknown_series(rule["expr"])} == set()


def test_every_label_in_a_rule_is_exported():
    assert {label for rule in rules() for label in unknown_labels(rule["expr"])} == set()


def test_every_label_in_a_text_is_a_label_of_the_alert():
    missing = {
        (rule["alert"], label)
        for rule in ALERTS
        for text in rule["annotations"].values()
        for label in re.findall(r"\$labels\.(\w+)", text)
        if label not in result_labels(rule["expr"]) | rule["labels"].keys()
    }

    assert missing == set()


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: rule["alert"])
def test_an_alert_has_a_severity_a_summary_and_a_command(rule: dict[str, dict[str, str]]):
    assert rule["labels"]["severity"] in ("critical", "warning", "info")
    assert rule["annotations"].keys() == {"summary", "description"}
    assert re.search(r"`headway[a-z-]* [a-z]", rule["annotations"]["description"])


def test_the_page_of_alerts_lists_exactly_the_alerts_with_their_severities():
    listed = {row[0].strip("`"): row[1] for row in table(PAGE, "alert")}

    assert listed == {rule["alert"]: rule["labels"]["severity"] for rule in ALERTS}


def test_every_class_has_an_objective():
    recorded = [rule for rule in rules() if rule.get("record", "").endswith("objective:ratio")]

    assert [rule["labels"]["qos_class"] for rule in recorded] == [each.value for each in QosClass]


def test_series_that_are_named_after_a_window_cover_it():
    for rule in rules():
        named = re.search(r":increase(\w+)$", rule.get("record", ""))
        if named is not None and "_missed:" in rule["record"]:
            assert set(re.findall(r"\[(\w+)\]", rule["expr"])) == {named[1]}, rule["record"]


def test_the_alert_of_dead_letters_has_the_reasons_of_the_mesh_and_the_other_alert_the_rest():
    matched = {
        rule["alert"]: re.findall(r'reason(=~|!~)"([^"]+)"', rule["expr"])
        for rule in ALERTS
        if "dead_letters_total" in rule["expr"]
    }
    reasons = "|".join((*MESH_REASONS, OTHER))

    assert matched == {
        "HeadwayDeadLetters": [("=~", reasons)],
        "HeadwayRequestsRefused": [("!~", reasons)],
    }


def test_every_documented_code_of_a_dead_letter_is_a_reason():
    producers = (ROOT / "ops/docs/producers.md").read_text()
    codes = set(re.findall(r"^\|((?: `[a-z_]+`,?)+) \| \d{3} \|", producers, re.MULTILINE))
    documented = {code for cell in codes for code in re.findall(r"[a-z_]+", cell)}
    # These never are dead letters, or their dead letters have the broker's reason.
    without = {"cancelled", "answer_too_large", "dead_lettered"}

    assert len(documented) > 15
    assert documented - without - {*DEAD_LETTER_REASONS} == set()


def test_promtool_accepts_rules_and_their_unit_tests_pass(promtool: str):
    checked = subprocess.run([promtool, "check", "rules", *rule_files()], check=False)
    tested = subprocess.run(
        [promtool, "test", "rules", *UNIT_TESTS], capture_output=True, text=True, check=False
    )

    assert checked.returncode == 0
    assert tested.returncode == 0, tested.stdout + tested.stderr


def test_promtool_accepts_the_queries_of_boards(promtool: str, tmp_path: Path):
    expressions = [e for path in BOARD_FILES for e in board_expressions(path)]
    recorded = [{"record": f"query:{n}", "expr": e} for n, e in enumerate(expressions)]
    file = tmp_path / "queries.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": recorded}]}))
    done = subprocess.run(
        [promtool, "check", "rules", file], capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_fires_in_a_unit_test_that_expects_no_other_alert():
    fired = set()
    for path in UNIT_TESTS:
        for group in yaml.safe_load(path.read_text())["tests"]:
            for test in group["promql_expr_test"]:
                if test["expr"] != 'ALERTS{alertstate="firing"}':
                    continue
                labels = " ".join(sample["labels"] for sample in test["exp_samples"])
                fired |= {*re.findall(r'alertname="(\w+)"', labels)}

    assert fired == {rule["alert"] for rule in ALERTS}


class TestShortened:
    RULE = """
groups:
  - name: g
    rules:
      - alert: A
        expr: |-
          max_over_time(x_seconds[5m]) > 120 # seconds
          and y:increase1h > 7
        for: 1m
"""

    def test_ranges_times_and_numbers_in_seconds_are_divided(self):
        (group,) = yaml.safe_load(shortened(self.RULE, 60))["groups"]
        (rule,) = group["rules"]

        assert rule["expr"].split() == [
            *("max_over_time(x_seconds[5000ms])", ">", "2", "#", "seconds"),
            *("and", "y:increase1h", ">", "7"),
        ]
        assert rule["for"] == "1000ms"

    def test_every_rule_keeps_its_names_and_thresholds(self):
        for path in rule_files():
            before, after = (
                [rule for group in yaml.safe_load(text)["groups"] for rule in group["rules"]]
                for text in (path.read_text(), shortened(path.read_text(), 20))
            )
            for old, new in zip(before, after, strict=True):
                names = [(n.series, n.listed) for n in map(names_in, (old["expr"], new["expr"]))]

                assert names[0] == names[1]
                assert old.keys() == new.keys()

    def test_a_whole_day_of_a_short_copy_is_a_day_divided_by_the_factor(self):
        text = (RULES / "slo.yml").read_text()

        assert "[1d]" in text
        assert "[1d]" not in shortened(text, 60)
        assert f"[{round(1000 * UNIT_S['d'] / 60)}ms]" in shortened(text, 60)

    @pytest.mark.parametrize("duration", ["", "5", "5m:1m", "1h30m", "5w"])
    def test_other_durations_are_refused(self, duration: str):
        with pytest.raises(SettingsError, match="duration"):
            seconds_of(duration)

    def test_command_writes_a_copy_of_each_file(self, tmp_path: Path):
        assert main(["shorten", "--by", "60", str(tmp_path)]) == 0
        assert [p.name for p in rule_files(tmp_path)] == [p.name for p in rule_files()]
