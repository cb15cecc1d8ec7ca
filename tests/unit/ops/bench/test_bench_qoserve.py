"""QoServe's figures are derived from cells; figures with missing cells are omitted."""

from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from ops.bench import qoserve_cells as cells
from ops.bench.cells import Cell, measure
from ops.bench.qoserve_cells import full, quick
from ops.bench.qoserve_figures import num_gpus, numbered
from ops.bench.qoserve_tables import tables

Figures = dict[Cell, dict[str, Any]]


def tiny(cell: Cell) -> Figures:
    """Figures of *cell*, simulated for half a minute."""
    return {cell: measure(replace(cell, hours=1 / 120))}


def goodputs(rates: dict[Cell, float]) -> Figures:
    return {cell: {"goodput_rps": rate} for cell, rate in rates.items()}


def test_without_measurements_there_is_no_figure() -> None:
    assert numbered({}, 0) == tables({}, 0) == {}


def test_figures_use_one_seed_only() -> None:
    found = goodputs({cells.prefill_goodput("prefill", seed=1): 7.0})

    assert numbered(found, 0) == {}
    assert len(numbered(found, 1)) == 1


@pytest.mark.parametrize(
    ("cell", "titles"),
    [
        (cells.iterations("qoserve", seed=0), ["Fig 9", "Fig 9"]),
        (cells.load("adaptive", 2.0, seed=0), ["Fig 10", "Fig 11"]),
        (cells.load("qoserve-1ms", 4.0, seed=0), ["Fig 14"]),
        (cells.wave("adaptive", 6.0, seed=0), ["Fig 13"]),
        (cells.long_iterations("shrinking", seed=0), ["Fig 15a"]),
        (cells.mix("28", "qoserve", "70-15-15", seed=0), ["Table 6"]),
    ],
)
def test_the_result_of_a_simulation_is_in_its_figures(cell: Cell, titles: list[str]) -> None:
    rows = numbered(tiny(cell), 0)

    assert [name.split(",")[0] for name in rows] == titles
    assert all(row["paper"] for row in rows.values())


@pytest.mark.parametrize(
    ("cell", "title"),
    [
        (cells.gpus("28", "qoserve", seed=0), "Table 4, 35/s, 28"),
        (cells.overload("28", "edf", hours=1, seed=0), "Table 5, % missed at 6/s over 1 h, 28"),
        (cells.wave("adaptive", 6.0, seed=0), "Fig 12, % missed, 2<->6"),
    ],
)
def test_the_result_of_a_simulation_is_in_its_table(cell: Cell, title: str) -> None:
    rows = tables(tiny(cell), 0)

    assert list(rows) == [title]
    assert rows[title].keys() == {cell_column(cell), "paper"}


def cell_column(cell: Cell) -> str:
    return f"{cell.policy} on {cell.replicas}" if cell.replicas > 1 else cell.policy


def test_gains_over_the_baselines_are_ratios_of_goodputs() -> None:
    rates = dict(zip(cells.SHARED, (2.0, 3.0, 4.2), strict=True))
    found = goodputs({cells.goodput("28", p, seed=0): rate for p, rate in rates.items()})
    row = numbered(found, 0)["Fig 7, goodput, code, 28, 4 h, 1/s"]

    assert row["ours / FCFS"] == pytest.approx(2.1)
    assert row["ours / EDF"] == pytest.approx(1.4)


def test_polyserve_counts_engines_for_each_bin() -> None:
    found = goodputs(
        {cells.polyserve("Q1", seed=0): 2.5, cells.polyserve("Q2", seed=0): 4.0}
        | {cells.two_tbt(share, seed=0): 5.0 for share in cells.TBT_SHARES}
    )
    row = numbered(found, 0)["Fig 15b, GPUs for 50/s of conversation"]

    assert row["25 % at 50 ms"] == "PolyServe 5+10, ours 10"
    assert row["75 % at 50 ms"] == "PolyServe 15+4, ours 10"


def test_incomplete_polyserve_figures_are_not_shown() -> None:
    assert numbered(goodputs({cells.polyserve("Q1", seed=0): 2.5}), 0) == {}


def test_gpus_of_a_silo_are_the_sum_over_its_classes() -> None:
    rates = {"Q1": 2.0, "Q2": 4.0, "Q3": 5.0}
    found = goodputs(
        {cells.silo_goodput(name, "code", seed=0): rate for name, rate in rates.items()}
        | {cells.niyama_goodput("code", "qoserve+curve", seed=0): 4.0}
    )
    row = numbered(found, 0)["Niyama Fig 7a, GPUs for 50/s"]

    # 50/3 requests per second of each class need 9 + 5 + 4 GPUs; the shared replicas need 50 / 4.
    assert row["code"] == "silo 9+5+4, ours 13 (28 % fewer)"


@pytest.mark.parametrize(("rate_rps", "per_replica_rps", "count"), [(50, 5, 10), (50, 4.9, 11)])
def test_numbers_of_gpus_are_whole(rate_rps: float, per_replica_rps: float, count: int) -> None:
    assert num_gpus(rate_rps, per_replica_rps) == count


def test_a_replica_without_capacity_is_never_enough() -> None:
    assert num_gpus(50, 0.0) == float("inf")


@pytest.mark.parametrize("made", [quick, full])
def test_every_cell_has_a_scenario(made: Callable[[int], list[Cell]]) -> None:
    assert all(cell.scenario().classes for cell in made(0))
