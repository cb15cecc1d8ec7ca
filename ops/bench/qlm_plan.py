"""Cells of QLM's benchmark for each figure of the paper."""

from collections.abc import Sequence

from msgspec.structs import replace

from ops.bench.qlm_cells import MeshCell
from ops.sim.mesh.arms import ABLATIONS, BASELINES, LOOK_AHEADS

PUBLISHED = ("fcfs", "edf", "shepherd")
"""Baselines of the QLM paper."""
SHOWN = ("qlm", *PUBLISHED)
ALL = ("qlm", *BASELINES)
SPREAD = ("qlm", "round-robin", "random")

W_A = MeshCell(workload="A")
W_B = MeshCell(workload="B", load=2.0, instances=2, interactive=0.5)
W_C = replace(W_B, mega=0.1)
SATURATED = replace(W_A, load=0.8, duration_s=240.0, stops=True)
JUDGED = {"W_A": W_A, "W_B": W_B, "W_C": W_C}
"""
Workloads with an acceptance line.

In W_B and W_C, work that is due within a minute (three of four requests) is 1.5 times the
capacity of the instances. In W_A, swaps take so much time that most systems cannot serve a load
of 0.3 times the capacity without swaps.
"""
DRAINED = MeshCell(workload="A", load=0.0, queue=600, duration_s=1.0)

TAILS = (0.1, 0.3, 0.6, 1.0)
INTERACTIVE_A = (0.05, 0.25, 0.5)
INTERACTIVE_B = (0.25, 0.5, 0.75)
A10S = (0, 1, 2, 3, 6)
MEGAS = (0.0, 0.02, 0.05, 0.1, 0.2)
LOADS = (0.7, 1.0, 1.5, 2.0)
SWAP_SCALES = (1.0, 2.0, 5.0)
DELTAS = (1.0, 2.0, 4.0, 8.0, 16.0)
SLO_SCALES = (1.0, 3.0, 5.0, 11.0)


def with_arms(cell: MeshCell, arms: Sequence[str]) -> list[MeshCell]:
    """Cells with the traffic of *cell*, one for each system."""
    return [replace(cell, arm=arm) for arm in arms]


def judged(seeds: Sequence[int]) -> list[MeshCell]:
    """Cells that have an acceptance line."""
    cells: list[MeshCell] = []
    for seed in seeds:
        for cell in JUDGED.values():
            cells += with_arms(replace(cell, seed=seed), ALL)
        cells += with_arms(replace(SATURATED, seed=seed), ("qlm", "edf"))
    return cells


def swept(seed: int) -> dict[str, list[MeshCell]]:
    """Cells that have no acceptance line, by figure of the paper."""
    a, b, c = (replace(cell, seed=seed) for cell in (W_A, W_B, W_C))
    full = replace(SATURATED, seed=seed)
    mixed = replace(full, workload="7B", load=1.2)
    return {
        "5": with_arms(replace(DRAINED, seed=seed), ("qlm", "edf", "edf-batching")),
        "8": [x for v in TAILS for x in with_arms(replace(full, tail=v), SHOWN)],
        "8, look-ahead": with_arms(full, ("qlm", "edf", *LOOK_AHEADS)),
        "8, swaps": [
            x for v in SWAP_SCALES for x in with_arms(replace(full, swap_scale=v), ("qlm", "edf"))
        ],
        "9": [x for v in INTERACTIVE_A for x in with_arms(replace(a, interactive=v), SHOWN)],
        "10": with_arms(a, ("qlm", *ABLATIONS)),
        "11": with_arms(b, SHOWN),
        "12": [x for v in INTERACTIVE_B for x in with_arms(replace(b, interactive=v), SHOWN)],
        "13": with_arms(c, ("qlm", *ABLATIONS)),
        "14": [x for v in A10S for x in with_arms(replace(mixed, a10=v), SPREAD)],
        "15": [x for v in MEGAS for x in with_arms(replace(c, mega=v), SHOWN)],
        "16": [x for v in LOADS for x in with_arms(replace(b, load=v), SHOWN)],
        "18": [replace(a, delta=v) for v in DELTAS],
        "20": [x for v in SLO_SCALES for x in with_arms(replace(a, slo_scale=v), SHOWN)],
        "21": [*with_arms(a, SHOWN), *with_arms(b, SHOWN)],
    }


def quick(seed: int) -> list[MeshCell]:
    """Cells of a quick run: each workload under QLM, EDF and FCFS, with W_A for a minute only."""
    short = replace(W_A, duration_s=60.0)
    cells = [replace(cell, seed=seed) for cell in (short, W_B, W_C)]
    cells = [x for cell in cells for x in with_arms(cell, ("qlm", "edf", "fcfs"))]
    return cells + with_arms(replace(SATURATED, duration_s=90.0, seed=seed), ("qlm", "edf"))
