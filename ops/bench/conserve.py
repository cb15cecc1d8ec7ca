"""
ConServe's claims in simulation (Llama-3.1 8B, H100): Headway, baselines, the paper's values.

Throughput is offline prompt and answer tokens per second, each token counted once. TBT values
are the gaps between consecutive online tokens. `lost` is the work recomputed after preemption.
A full run takes about three minutes on two cores.
"""

import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from ops.bench.conserve_cells import WHOLE, Cell, judged, measure, printed
from ops.bench.progress import counted
from ops.bench.result import Line, Result

Figures = Mapping[Cell, dict[str, dict[str, Any]]]

TTFT_MOST, TBT_MOST, OFFLINE_LEAST = 0.85, 0.65, 0.80
WHOLE_TTFT_MOST = 0.70
"""Upper bound of the TTFT ratio, with checkpoints and preemption between layers."""

_PAPER = {
    "3, 2/s": "sarathi-p over online-only: TTFT 3.59x, TBT 3.01x; offline 4.27x below "
    "non-preemptive",
    "6a": "ConServe within 25 % (TTFT) and 19 % (TBT) of online-only, offline 82.3 % of "
    "non-preemptive; sarathi-p over it: TTFT 2.37x, TBT 2.72x, offline 1/3.00x on average",
    "6b": "offline 93 % of non-preemptive at 1.5; at least 86 % of targets met at 1.0",
    "8a": "best baseline over ConServe: TTFT 1.68x, TBT 2.38x, offline 1/3.62x on average",
    "table 2, mixed, 70B": "TTFT s 1.08/15.2/2.91/1.14, TBT ms 184/450/441/201, offline "
    "0/1995/895/1553 (online-only/non-preemptive/sarathi-p/ConServe)",
    "table 2, DuReader, 70B": "TTFT -/38.7/2.98/1.67, TBT -/659/400/204, offline 0/1276/715/1187",
    "table 2, MultiNews, 70B": "TTFT -/11.0/2.11/1.04, TBT -/305/212/194, offline 0/2765/1698/2281",
    "table 2, VCSUM, 70B": "TTFT -/46.2/3.01/1.68, TBT -/566/453/208, offline 0/1218/255/1064",
    "9, 8B": "offline ConServe 2645, 88 % of non-preemptive; sarathi-p 661",
    "ablation": "sarathi-p TTFT 1399 TBT 375; scheduler 686, 73; layers TTFT 523; checkpoints "
    "offline 8810 -> 11366",
}  # fmt: skip


async def run(
    *,
    seed: int,
    quick: bool,
    broker: str | None,  # noqa: ARG001 - nothing here needs one
    workers: int | None = None,
) -> Result:
    """Run the benchmark: simulate and compare."""
    result = Result(name="conserve", seed=seed, quick=quick)
    cells = judged(seed) + ([] if quick else printed(seed))
    with ProcessPoolExecutor(max_workers=workers or os.cpu_count()) as pool:
        made = counted(pool.map(measure, cells), len(cells), "simulations")
        found = dict(zip(cells, made, strict=True))
    _judge(result, found)
    result.figures |= _tables(found)
    result.figures |= {f"paper, {name}": text for name, text in _PAPER.items()}
    return result


def _judge(result: Result, found: Figures) -> None:
    """Add acceptance lines with the worst value over the seeds."""
    rows = [figures for cell, figures in found.items() if cell.figure == "judged"]
    for name, figure, system, most in (
        ("P99 TTFT", "ttft_p99_ms", "ours", TTFT_MOST),
        ("P99 TBT", "tbt_p99_ms", "ours", TBT_MOST),
        ("P99 TTFT", "ttft_p99_ms", WHOLE, WHOLE_TTFT_MOST),
    ):
        value = max(row[system][figure] / row["sarathi-p"][figure] for row in rows)
        line = f"{name}, {system} / sarathi-p, 2/s, worst of 3 seeds"
        result.lines.append(Line(name=line, value=value, bound=most))
    value = max(row["non-preemptive"]["offline_tps"] / row["ours"]["offline_tps"] for row in rows)
    result.lines.append(
        Line(
            name="offline tokens/s, non-preemptive / ours, 2/s, worst of 3 seeds",
            value=value,
            bound=1 / OFFLINE_LEAST,
        )
    )


def _tables(found: Figures) -> dict[str, dict[str, Any]]:
    """Tables with one row per system, for each of the paper's figures and each traffic."""
    made: dict[str, dict[str, Any]] = {}
    for cell, by_system in found.items():
        for system, figures in by_system.items():
            made[f"{_traffic(cell)}: {system}"] = _row(cell, figures)
    return made


def _traffic(cell: Cell) -> str:
    name = {
        "judged": f"2/s, seed {cell.seed}",
        "6a": f"{cell.rate_rps:g}/s",
        "6b": f"targets x{cell.scale or 1:g}",
        "8a": f"CV {cell.variation:g}",
        "8b": f"prompt {cell.prompt_tokens}",
        "8c": f"answer {cell.output_tokens}",
        "table 2": _joined(cell.datasets),
    }[cell.figure]
    return f"{cell.figure}, {name}"


def _joined(names: Iterable[str]) -> str:
    listed = tuple(names)
    return listed[0] if len(listed) == 1 else "mixed"


def _row(cell: Cell, figures: Mapping[str, Any]) -> dict[str, Any]:
    """Table row: median and P99 of TTFT and P99 of TBT, in ms; throughput in tokens per second."""
    row = {
        "median": round(figures["ttft_p50_ms"]),
        "TTFT": round(figures["ttft_p99_ms"]),
        "TBT": round(figures["tbt_p99_ms"], 1),
        "offline": round(figures["offline_tps"]),
        "lost": round(figures["wasted_tps"]),
    }
    if cell.figure == "6b":
        row["met"] = f"{figures['ttft_attainment']:.0%} {figures['tbt_attainment']:.1%}"
    return row
