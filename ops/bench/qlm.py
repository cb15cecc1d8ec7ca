"""
QLM's claims in simulation: the whole system, ablations, baselines, and the paper's values.

Simulations are kept under `results/qlm/` by cell and code, so that an interrupted full run (about
a quarter of an hour on two cores) resumes. Pictures of the figures are stored in the same folder.
"""

from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import replace

from ops.bench import qlm_plan as plan
from ops.bench.progress import counted
from ops.bench.qlm_cells import MeshCell, MeshFigures, measure_mesh
from ops.bench.qlm_motivation import eviction_and_swap, waiting_is_linear
from ops.bench.qlm_pictures import draw_figures
from ops.bench.qlm_tables import PAPER, tables
from ops.bench.result import Line, Result
from ops.bench.store import Store, code_digest, kept
from ops.sim.mesh.arms import BASELINES

THROUGHPUT_LEAST = 2.5
"""Minimum ratio of Headway's throughput to EDF's throughput, on saturated W_A."""
MOST_BELOW, LEAST_ABOVE = 0.005, 0.05
"""Largest loss of attainment against any baseline, and required gain within `_OPEN`."""
_OPEN = (0.2, 0.95)
"""Range of the best baseline's attainment in which a higher attainment is possible."""
_LINEAR = 0.98
MOST_IDLE_SWAPS = 2.0


async def run(
    *,
    seed: int,
    quick: bool,
    broker: str | None,  # noqa: ARG001 - nothing here needs one
    workers: int | None = None,
) -> Result:
    """Run the benchmark: simulate all systems and compare."""
    result = Result(name="qlm", seed=seed, quick=quick)
    directory = Path("results") / "qlm"
    code = code_digest(["ops.bench.qlm_cells"], data=["ops/sim/profiles"])
    seeds = (seed,) if quick else (seed, seed + 1, seed + 2)
    figures = {} if quick else plan.swept(seed)
    cells = plan.quick(seed) if quick else plan.judged(seeds)
    cells += [cell for members in figures.values() for cell in members]
    store: Store[MeshCell] = Store(directory, lambda _: code)
    num_held = store.num_held(cells)
    found = dict(
        counted(kept(cells, store, measure_mesh, workers=workers), len(set(cells)), "simulations")
    )
    _throughput(result, found, cells)
    _attainment(result, found, cells)
    result.lines.append(
        Line(
            name="longest idle time beside work of ours, in swap times",
            value=max(found[cell]["longest_idle_swaps"] for cell in cells if cell.arm == "qlm"),
            bound=MOST_IDLE_SWAPS,
        )
    )
    linear = waiting_is_linear(seed)
    result.figures["3: R2 of waiting time over queue position"] = linear
    result.lines.append(
        Line(name="1 - R2 of fig. 3, worst", value=1 - min(linear.values()), bound=1 - _LINEAR)
    )
    result.figures |= eviction_and_swap()
    result.figures |= tables(found, figures)
    result.figures |= {f"paper, {name}": text for name, text in PAPER.items()}
    result.figures["simulations"] = {"all": len(found), "reused from earlier runs": num_held}
    if figures:
        result.figures["pictures"] = str(draw_figures(found, figures, directory))
    return result


def _throughput(result: Result, found: MeshFigures, cells: Sequence[MeshCell]) -> None:
    """Add acceptance lines about throughput for the worst seed."""
    ours = [cell for cell in cells if _is_saturated(cell) and cell.arm == "qlm"]
    ratios = [
        found[replace(cell, arm="edf")]["throughput_rps"] / found[cell]["throughput_rps"]
        for cell in ours
    ]
    result.lines.append(
        Line(
            name="throughput, EDF / ours, W_A saturated, worst seed",
            value=max(ratios, default=None),
            bound=1 / THROUGHPUT_LEAST,
        )
    )


def _is_saturated(cell: MeshCell) -> bool:
    """True if the line about throughput uses *cell*; any system, seed and duration is accepted."""
    reference = plan.SATURATED
    return cell in (
        replace(reference, arm=cell.arm, seed=cell.seed),
        replace(reference, arm=cell.arm, seed=cell.seed, duration_s=cell.duration_s),
    )


def _attainment(result: Result, found: MeshFigures, cells: Sequence[MeshCell]) -> None:
    """Add acceptance lines about attainment, for means over the seeds."""
    for name, reference in plan.JUDGED.items():
        by_arm: dict[str, list[float]] = {}
        for cell in dict.fromkeys(cells):
            same = replace(reference, arm=cell.arm, seed=cell.seed, duration_s=cell.duration_s)
            if cell == same and cell.arm in plan.ALL:
                by_arm.setdefault(cell.arm, []).append(found[cell]["attainment"])
        means = {arm: sum(values) / len(values) for arm, values in by_arm.items()}
        result.figures[f"attainment, {name}"] = {arm: round(v, 3) for arm, v in means.items()}
        ours = means.pop("qlm")
        best = max(means.values())
        is_open = _OPEN[0] <= best <= _OPEN[1]
        # A quick run omits most baselines, possibly the best baseline.
        has_all = means.keys() == set(BASELINES)
        result.lines.append(
            Line(
                name=f"attainment, best baseline - ours, {name}",
                value=best - ours if has_all else None,
                bound=-LEAST_ABOVE if is_open else MOST_BELOW,
            )
        )
