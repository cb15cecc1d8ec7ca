"""QUARTZ's benchmark: simulations, loads, and reported figures."""

from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from ops.bench import quartz_plan as plan
from ops.bench.quartz import judge_several_routers
from ops.bench.quartz_cells import PULL, LoadCell, RoutingCell, measure_routing
from ops.bench.quartz_tables import tables
from ops.bench.result import Result
from solver.routing.options import VARIANTS

FIGURES: dict[str, Any] = {
    "p50_s": 0.4,
    "hits": 0.15,
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
def test_every_needed_load_is_searched_and_every_cell_reported(*, quick: bool):
    seeds = (0,) if quick else (0, 1, 2)
    loads = {cell: {"rate_rps": 5.0} for cell in plan.searches(seeds, quick=quick)}
    cells = plan.cells(loads, seeds, quick=quick)
    rows = tables(loads, dict.fromkeys(cells, FIGURES), seeds, quick=quick)

    assert {cell.variant for cell in cells} <= {*VARIANTS, PULL}
    assert quick or {cell.routers for cell in cells} == {1, plan.ROUTERS}
    assert quick or rows["policy, bursty: pull"]["P50 ms"] == 400
    assert quick or rows["routers, 3: default"]["hits %"] == 15.0
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


@pytest.mark.parametrize(
    "cell",
    [
        RoutingCell(variant=PULL, rate_rps=4.0, num_requests=60),
        RoutingCell(variant="fifo-ll", rate_rps=4.0, num_requests=60),
    ],
    ids=lambda cell: cell.variant,
)
def test_pulling_is_measured_like_any_policy(cell: RoutingCell):
    found = measure_routing(cell)

    assert 0 < found["p50_s"] <= found["p99_s"]
    assert 0 <= found["violations"] < 0.5


def test_cells_of_a_single_router_omit_the_number_of_routers():
    """Without the field, stored figures of cells with one router remain valid."""
    one = RoutingCell(variant="quartz", rate_rps=4.0)

    assert b"routers" not in msgspec.json.encode(one)
    assert b"routers" in msgspec.json.encode(replace(one, routers=3))


def figures(violations: float, p99_s: float) -> dict[str, Any]:
    return {**FIGURES, "violations": violations, "p99_s": p99_s}


@pytest.mark.parametrize(
    ("violations", "p99_s", "holds"),
    [(0.05, 2.0, [True, True]), (0.12, 2.0, [False, True]), (0.05, 2.2, [True, False])],
)
def test_three_routers_are_compared_with_one_router(
    violations: float, p99_s: float, holds: list[bool]
):
    """Attainment 0.88 is below 0.95 times 0.95, and P99 2.2 s is above 1.05 times 2 s."""
    loads = {LoadCell(seed=0): {"rate_rps": 5.0}}
    found = {
        place(loads, 0, name): reported
        for name in plan.SHARED
        for place, reported in ((plan.main, FIGURES), (plan.shared, figures(violations, p99_s)))
    }
    result = Result(name="quartz", seed=0, quick=False)
    judge_several_routers(result, loads, found, (0,), quick=False)

    assert [line.holds for line in result.lines] == 2 * holds
