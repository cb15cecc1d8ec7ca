"""QUARTZ's benchmark: which simulations, at which loads, and what of them is told."""

from typing import Any

import pytest

from ops.bench import quartz_plan as plan
from ops.bench.quartz_cells import LoadCell, RoutingCell
from ops.bench.quartz_tables import tables
from solver.routing.options import VARIANTS

FIGURES: dict[str, Any] = {
    "p95_s": 1.0,
    "p99_s": 2.0,
    "violations": 0.05,
    "throughput_tps": 1000.0,
    "jain": 0.9,
    "max_wait_s": 4.0,
    "long_slowdown": 1.2,
    "coverage": {
        level: {"raw": 0.9, "corrected": 0.95, "raw residual ms": 1.0} for level in ("0.9", "0.95")
    },
}


@pytest.mark.parametrize("quick", [True, False])
def test_every_load_that_is_needed_is_searched_and_every_cell_told(*, quick: bool):
    seeds = (0,) if quick else (0, 1, 2)
    loads = {cell: {"rate_rps": 5.0} for cell in plan.searches(seeds, quick=quick)}
    cells = plan.cells(loads, seeds, quick=quick)
    rows = tables(loads, dict.fromkeys(cells, FIGURES), seeds, quick=quick)

    assert {cell.variant for cell in cells} <= set(VARIANTS)
    assert rows["5, mixed: default"]["P99 ms"] == 2000
    assert rows["5, mixed: default"]["wait s"] == 4.0
    assert quick or {cell.scale for cell in cells} == {1.0, 2.0, 4.0}


def test_every_policy_of_a_workload_gets_the_same_traffic():
    loads = {LoadCell(seed=0): {"rate_rps": 5.0}}
    first, second = (plan.heavy(loads, 0, name) for name in ("fifo-ll", "default"))
    short = [
        RoutingCell(variant=cell.variant, rate_rps=cell.rate_rps, num_requests=50).arrivals()
        for cell in (first, second)
    ]

    assert short[0] == short[1]
    assert first.heaviest == second.heaviest == plan.HEAVIEST


def test_the_heaviest_tenant_sends_its_share():
    arrivals = RoutingCell(
        variant="quartz", rate_rps=5.0, num_requests=2000, heaviest=0.6
    ).arrivals()
    share = sum(each.tenant == "tenant 0" for each in arrivals) / len(arrivals)

    assert share == pytest.approx(0.6, abs=0.05)
