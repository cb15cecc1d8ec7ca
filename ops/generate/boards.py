"""
Grafana boards from `ops/dashboards/boards.yml`: `python -m ops.generate.boards` writes them.

The panels of a board are in rows of three, in the order of the file.
"""

import json
import sys
from pathlib import Path
from typing import Any, Literal

import msgspec
import yaml

DASHBOARDS = Path(__file__).resolve().parents[1] / "dashboards"
SOURCE = DASHBOARDS / "boards.yml"
FOLDER = DASHBOARDS / "grafana" / "dashboards"
DATASOURCE = {"type": "prometheus", "uid": "prometheus"}
"""As in `grafana/provisioning/datasources`."""
_WIDTH, _HEIGHT, _COLUMNS = 8, 8, 3
"""Size of a panel in Grafana's grid of 24 columns, and panels in a row."""


class Panel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One panel of a board."""

    title: str
    unit: str
    """Grafana's name of the unit."""
    queries: dict[str, str]
    """Legend of the series of a query -> PromQL expression."""
    description: str = ""
    kind: Literal["timeseries", "stat"] = "timeseries"
    """`timeseries`, or `stat` for the last value."""
    ceiling: float | None = None
    """Maximum of the axis; None: the data's."""


class Board(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One board."""

    name: str
    """Name of its file without `.json`, and part of its address."""
    title: str
    description: str
    panels: tuple[Panel, ...]
    window: str = "1h"
    """Time that the board shows at first."""


def boards() -> tuple[Board, ...]:
    """The boards of `SOURCE`."""
    return msgspec.convert(yaml.safe_load(SOURCE.read_text()), tuple[Board, ...])


def document(board: Board) -> dict[str, Any]:
    """The board in Grafana's format."""
    return {
        "uid": f"headway-{board.name}",
        "title": board.title,
        "description": board.description,
        "tags": ["headway"],
        "timezone": "browser",
        "schemaVersion": 39,
        "version": 1,
        "refresh": "30s",
        "time": {"from": f"now-{board.window}", "to": "now"},
        "editable": True,
        "templating": {"list": []},
        "annotations": {"list": []},
        "panels": [_panel(number, panel) for number, panel in enumerate(board.panels)],
    }


def _panel(number: int, panel: Panel) -> dict[str, Any]:
    row, column = divmod(number, _COLUMNS)
    axis: dict[str, Any] = {"unit": panel.unit, "min": 0}
    if panel.ceiling is not None:
        axis["max"] = panel.ceiling
    options: dict[str, Any] = {
        "legend": {"displayMode": "list", "placement": "bottom"},
        "tooltip": {"mode": "multi"},
    }
    if panel.kind == "stat":
        options = {"reduceOptions": {"calcs": ["lastNotNull"]}}
    return {
        "id": number + 1,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": DATASOURCE,
        "gridPos": {"h": _HEIGHT, "w": _WIDTH, "x": _WIDTH * column, "y": _HEIGHT * row},
        "fieldConfig": {"defaults": axis, "overrides": []},
        "options": options,
        "targets": [
            {
                "refId": chr(ord("A") + query),
                "datasource": DATASOURCE,
                "expr": expression,
                "legendFormat": legend,
            }
            for query, (legend, expression) in enumerate(panel.queries.items())
        ],
    }


def render(board: Board) -> str:
    """The text of the board's file."""
    return json.dumps(document(board), indent=1) + "\n"


def main() -> int:
    """Write every board."""
    for board in boards():
        path = FOLDER / f"{board.name}.json"
        path.write_text(render(board))
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
