"""Expressions of rules and boards, and what they use that is not exported."""

import functools
import json
import re
from pathlib import Path

from ops.alerts import rules
from ops.generate.boards import FOLDER
from tests.unit.ops.dashboards.exported import BROKER, PROMETHEUS, TARGET, Labels, of_services
from tests.unit.ops.dashboards.promql import names_in

BOARD_FILES = sorted(FOLDER.glob("*.json"))
_AGGREGATES = re.compile(r"\b(?:sum|max|min|avg|count|absent_over_time)\b")


def board_expressions(path: Path) -> list[str]:
    """The expressions of a board."""
    panels = json.loads(path.read_text())["panels"]
    return [target["expr"] for panel in panels for target in panel["targets"]]


@functools.cache
def exported() -> dict[str, Labels]:
    """Name of each series that services, broker and Prometheus export -> its labels."""
    return of_services() | BROKER | PROMETHEUS


@functools.cache
def known() -> dict[str, Labels]:
    """Name of each exported or recorded series, or of the alerts -> its labels."""
    found = dict(exported())
    for rule in rules():
        labels = result_labels(rule["expr"], found) | {*rule.get("labels", ())}
        name = rule.get("record", "ALERTS")
        found[name] = found.get(name, frozenset()) | labels
    return found


def unknown_series(expression: str) -> set[str]:
    """Series in *expression* that are neither exported nor recorded."""
    return names_in(expression).series - known().keys()


def unknown_labels(expression: str) -> set[str]:
    """
    Labels in *expression* that its series do not have: `series.label` for matchers, and `label` for
    lists, whose labels one of the series must have.
    """
    names, every = names_in(expression), known()
    unmatched = {
        f"{series}.{label}"
        for series, labels in names.selected
        for label in labels - TARGET - every.get(series, frozenset())
    }
    of_any = TARGET.union(*(every.get(series, frozenset()) for series in names.series))
    return unmatched | (names.listed - of_any)


def result_labels(expression: str, series: dict[str, Labels] | None = None) -> Labels:
    """
    Labels that the results of *expression* may have: after an aggregation, only those that it or a
    matching of two vectors lists.

    Args:
        series: Labels of the series; None: of all that are known.
    """
    names, every = names_in(expression), known() if series is None else series
    if _AGGREGATES.search(expression):
        return frozenset(names.kept)
    of_any = TARGET.union(*(every.get(name, frozenset()) for name in names.series))
    return of_any | names.kept
