"""Tables of QLM's figures: Headway and the baselines, and the paper's values."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ops.bench.qlm_cells import MeshCell, MeshFigures

PAPER = {
    "3": "R2 0.99, three models on A100",
    "4": "state swap: throughput +20 % for Mistral-7B at 20 GB of host memory; nothing for "
    "Vicuna-13B at 220 GB",
    "5": "EDF takes substantially longer to drain the queue than grouping by model (no numbers)",
    "8": "QLM 3-4x the baselines' throughput, W_A",
    "9": "QLM above 90 % of SLOs while latency-sensitive requests are below 5 %",
    "10": "warm start contributes most (throughput 3x)",
    "11": "QLM 20 % above vLLM and EDF, 50 % above SHEPHERD, W_B",
    "12": "QLM 40-90 % above vLLM, 50-90 % above SHEPHERD (abstract)",
    "13": "scheduling and eviction contribute most (eviction: 80 %); model swap nothing",
    "14": "QLM over random 2-5x larger at 20-50 % A10 than at 0 or 100 %",
    "15": "benefit largest for few mega prompts",
    "16": "baselines fall as the queue grows, QLM does not",
    "18": "delta 4: nearly no loss against 1; 16 is too coarse",
    "19": "5 ms a request at 400,000 requests",
    "20": "EDF meets all SLOs from 3 times the SLOs on, SHEPHERD from 5, vLLM from 11 times",
    "21": "W_A: QLM much higher; W_B: like EDF and vLLM, SHEPHERD lower",
}  # fmt: skip
"""
Numbers in the paper's text, by figure; the axes of the figures are missing in the copy that was
used.
"""

Label = Callable[[MeshCell], float]
LABELS: dict[str, tuple[str, Label]] = {
    "5": ("queue", lambda cell: cell.queue),
    "8": ("tail models' arrivals", lambda cell: cell.tail),
    "8, look-ahead": ("load", lambda cell: cell.load),
    "8, swaps": ("swap scale", lambda cell: cell.swap_scale),
    "9": ("latency-sensitive", lambda cell: cell.interactive),
    "10": ("load", lambda cell: cell.load),
    "11": ("load", lambda cell: cell.load),
    "12": ("latency-sensitive", lambda cell: cell.interactive),
    "13": ("load", lambda cell: cell.load),
    "14": ("A10s of the instances", lambda cell: cell.a10 / cell.instances),
    "15": ("mega prompts", lambda cell: cell.mega),
    "16": ("load", lambda cell: cell.load),
    "18": ("delta", lambda cell: cell.delta),
    "20": ("SLO scale", lambda cell: cell.slo_scale),
}
"""Label and value of the horizontal axis of each figure."""
VALUES: dict[str, tuple[str, str]] = {
    "5": ("time to drain the queue, s", "drained_s"),
    "8": ("throughput, 1/s", "throughput_rps"),
    "8, look-ahead": ("throughput, 1/s", "throughput_rps"),
    "8, swaps": ("throughput, 1/s", "throughput_rps"),
    "11": ("throughput, 1/s", "throughput_rps"),
    "14": ("throughput, 1/s", "throughput_rps"),
}
"""Figure of the paper -> value that it shows; figures without an entry show attainment."""


def value_of(figure: str) -> tuple[str, str]:
    """Name and key of the value that *figure* shows."""
    return VALUES.get(figure, ("attainment", "attainment"))


def tables(
    found: MeshFigures, figures: Mapping[str, Sequence[MeshCell]]
) -> dict[str, dict[str, Any]]:
    """Table rows for each figure, point and system."""
    made: dict[str, dict[str, Any]] = {}
    for figure, cells in figures.items():
        if figure == "21":
            made |= {
                f"21, W_{cell.workload}: {cell.arm}": {"memory used": round(_kv(found, cell), 3)}
                for cell in cells
            }
            continue
        name, label = LABELS[figure]
        for cell in cells:
            row = f"{figure}, {name} {label(cell):g}: {cell.arm}"
            made[row] = _row(found[cell])
    return made


def _kv(found: MeshFigures, cell: MeshCell) -> float:
    used: float = found[cell]["kv_used"]
    return used


def _row(figures: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "met": round(figures["attainment"], 3),
        "interactive": round(figures["classes"].get("interactive", 1.0), 3),
        "1/s": round(figures["throughput_rps"], 2),
        "drained s": round(figures["drained_s"]),
        "swaps": figures["swaps"],
        "plan ms": round(figures["plan_ms"], 1),
    }
