"""QLM's benchmark: simulations, storage, and judgement."""

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from ops.bench import qlm_plan as plan
from ops.bench.qlm_cells import MeshCell, measure_mesh
from ops.bench.qlm_motivation import eviction_and_swap, waiting_is_linear
from ops.bench.qlm_pictures import draw_figures
from ops.bench.qlm_tables import LABELS, PAPER, tables
from ops.bench.store import Store, kept
from ops.sim.mesh.arms import ARMS
from ops.sim.mesh.kinds import A10

FIGURES: dict[str, Any] = {
    "attainment": 0.5,
    "classes": {"interactive": 0.25},
    "throughput_rps": 3.0,
    "drained_s": 100.0,
    "swaps": 7,
    "plan_ms": 1.5,
    "kv_used": 0.4,
}


def every_cell() -> list[MeshCell]:
    swept = [cell for members in plan.swept(0).values() for cell in members]
    return [*plan.judged((0, 1, 2)), *plan.quick(0), *swept]


def test_every_cell_has_an_existing_system():
    assert {cell.arm for cell in every_cell()} <= set(ARMS)


def test_every_judged_workload_is_run_under_every_baseline():
    cells = plan.judged((4,))
    for reference in plan.JUDGED.values():
        for arm in plan.ALL:
            assert replace(reference, arm=arm, seed=4) in cells


def test_every_figure_has_an_axis_and_the_papers_values():
    for figure in plan.swept(0):
        assert figure in LABELS or figure == "21"
        assert figure.partition(",")[0] in PAPER


def test_the_load_is_a_share_of_the_instances_capacity():
    half, whole = (replace(plan.W_B, load=load).traffic().rate_rps for load in (0.5, 1.0))
    twice = replace(plan.W_B, load=0.5, instances=4).traffic().rate_rps

    assert 2 * half == pytest.approx(whole)
    assert whole == pytest.approx(twice)


def test_a10s_replace_a100s():
    devices = MeshCell(workload="7B", instances=6, a10=2).fleet().devices

    assert len(devices) == 6
    assert devices[-2:] == (A10, A10)
    assert devices.count(A10) == 2


def test_stored_cells_are_not_measured_again(tmp_path: Path):
    store: Store[MeshCell] = Store(tmp_path, lambda _: b"code")
    cell = MeshCell(seed=3)
    store.put(cell, FIGURES)

    assert list(kept([cell, cell], store, measure_mesh)) == [(cell, FIGURES)]
    assert store.get(replace(cell, seed=4)) is None


def test_figures_are_printed_and_drawn(tmp_path: Path):
    figures = plan.swept(0)
    found = dict.fromkeys(every_cell(), FIGURES)
    rows = tables(found, figures)
    file = draw_figures(found, {name: figures[name] for name in ("8", "10")}, tmp_path)

    assert rows["8, tail models' arrivals 0.1: qlm"]["1/s"] == 3.0
    assert rows["21, W_B: fcfs"] == {"memory used": 0.4}
    assert file.stat().st_size > 0


def test_waits_grow_with_the_place_in_the_queue():
    assert min(waiting_is_linear(0).values()) > 0.98


def test_restoring_is_compared_with_recomputing():
    rows = eviction_and_swap().values()

    assert all(row["again ms"] > 0 and row["back ms"] > 0 for row in rows)
    assert len({row["host MB"] for row in rows}) == 3
