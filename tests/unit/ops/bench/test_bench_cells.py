"""Cells of the QoServe benchmark: their traffic, and the figures of a measurement."""

from pathlib import Path

import msgspec
import pytest

from ops.bench.cells import CLASS_SETS, Cell, code_of, measure
from ops.bench.store import Store
from ops.sim.pulling import PullOptions
from ops.sim.workload import CLASSES, TrafficClass


@pytest.mark.parametrize("name", CLASS_SETS)
def test_the_shares_of_a_set_of_classes_add_up(name: str) -> None:
    assert sum(c.share for c in Cell(classes=name).scenario().classes) == pytest.approx(1)


def test_without_shares_the_classes_are_those_of_table_3() -> None:
    assert Cell().scenario().classes == CLASSES


def test_shares_are_normalised() -> None:
    classes = Cell(classes="two-tbt", shares=(1, 3)).scenario().classes

    assert [c.share for c in classes] == [0.25, 0.75]
    assert [c.slo.tbt_s for c in classes] == [0.05, 0.1]


def test_a_single_class_has_all_of_the_traffic() -> None:
    expected = TrafficClass(name="Q3", slo=CLASS_SETS["tight"][2].slo, share=1.0)

    assert Cell(classes="tight", only_class="Q3").scenario().classes == (expected,)


def test_replicas_have_a_round_robin_unless_they_pull() -> None:
    assert Cell().scenario().pull is None
    assert Cell(dispatch="pull").scenario().pull == PullOptions()


def test_the_window_of_pulling_replicas_is_passed_on() -> None:
    pull = Cell(dispatch="pull", window=3).scenario().pull

    assert pull is not None
    assert pull.bounds.window == 3


def test_a_goodput_is_between_two_tried_rates() -> None:
    cell = Cell(kind="goodput", policy="sarathi-fcfs", rate_rps=3.0, hours=0.02, only_class="Q1",
                tolerance=0.05)  # fmt: skip
    figures = measure(cell)
    tried = dict(figures["tried"])
    too_high = min(rate for rate, share in tried.items() if share > cell.allowed)

    assert tried[figures["goodput_rps"]] <= cell.allowed
    assert too_high - figures["goodput_rps"] <= 0.05 * 3.0


def test_a_wave_gives_the_rolling_p99_of_each_class() -> None:
    figures = measure(Cell(wave=(1.0, 2.0), hours=0.05, low_share=0.2))

    assert list(figures["rolling_p99_s"]) == ["Q1", "Q2", "Q3"]
    assert all(0 < part["median"] <= part["max"] for part in figures["rolling_p99_s"].values())


@pytest.mark.parametrize("kind", ["simulate", "goodput", "replicas", "iterations"])
def test_every_kind_reports_its_cost_and_is_json_able(kind: str) -> None:
    figures = measure(Cell(kind=kind, rate_rps=2.0, hours=0.01, tolerance=0.5, allowed=0.5))

    assert figures["cell_cpu_s"] > 0
    assert msgspec.json.decode(msgspec.json.encode(figures)).keys() == figures.keys()


def test_the_number_of_stored_cells_counts_each_once(tmp_path: Path) -> None:
    store = Store(tmp_path, code_of())
    held, missing = Cell(hours=1), Cell(hours=2)
    store.put(held, {"violations": 0.0})

    assert store.num_held([held, held, missing]) == 1
