"""The simulator's table and picture."""

from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from rich.console import Console
from rich.table import Table

from ops.sim.cluster import Outcome
from ops.sim.request import SimRequest

mpl.use("Agg")
import matplotlib.pyplot as plt

_BINS = 48


def print_table(figures: dict[str, Any], title: str) -> None:
    """Who misses, class by class, and what the replicas did."""
    table = Table(title=title)
    for name in ("class", "requests", "missed", "TTFT p50/p99 s", "TBT p50/p99 ms",
                 "TTLT p50/p99 s"):  # fmt: skip
        table.add_column(name, justify="left" if name == "class" else "right")
    for name, row in figures["classes"].items():
        table.add_row(
            name,
            str(row["requests"]),
            f"{row['violations']:.2%}",
            _pair(row["ttft_s"]),
            _pair(row["mean_tbt_s"], 1000),
            _pair(row["ttlt_s"]),
        )
    console = Console(width=100)
    console.print(table)
    pace = figures["pace"]
    console.print(
        f"{figures['requests']} requests, {figures['violations']:.2%} missed "
        f"({figures['important_violations']:.2%} of the important, "
        f"{figures['long_violations']:.2%} of the long); "
        f"goodput {figures['goodput_rps']:.2f}/s, utilization {figures['utilization']:.0%}, "
        f"{figures['tokens_per_iteration']:.0f} tokens an iteration; "
        f"late tokens {pace['late']:.3%}, gaps above TBT {pace['gaps']:.1%}; "
        f"{figures['preempted']} preemptions; "
        f"simulated {figures['simulated_s'] / 3600:.1f} h in {figures['cpu_s']:.1f} s of CPU, "
        f"{figures['speed']:.0f}x real time"
    )


def _pair(quantiles: dict[str, float] | None, scale: float = 1.0) -> str:
    if quantiles is None:
        return "-"
    return f"{scale * quantiles['p50']:.3g} / {scale * quantiles['p99']:.3g}"


def plot(outcome: Outcome, file: Path, title: str) -> None:
    """Share missed by time of arrival, and time used of each target."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.2), layout="constrained")
    names = sorted({r.arrival.class_name for r in outcome.requests})
    for number, name in enumerate(names):
        members = [r for r in outcome.requests if r.arrival.class_name == name]
        arrived = np.array([r.arrival.arrived_at for r in members])
        missed = np.array([r.violated for r in members], dtype=float)
        totals, edges = np.histogram(arrived, bins=_BINS)
        counts, _ = np.histogram(arrived, bins=edges, weights=missed)
        share = counts / np.maximum(1, totals)
        left.step(edges[:-1] / 60, 100 * share, where="post", color=f"C{number}", label=name)
        used = np.sort([value for r in members if (value := _used(r)) is not None])
        right.plot(used, np.arange(1, len(used) + 1) / max(1, len(members)), color=f"C{number}",
                   label=name)  # fmt: skip
    left.set(xlabel="arrival, min", ylabel="missed, %", title=title)
    right.axvline(1, color="black", linestyle=":", linewidth=1)
    right.set(xlabel="latency as a share of the target", ylabel="share of requests", xscale="log",
              title="First tokens (interactive) and whole answers")  # fmt: skip
    left.legend()
    right.grid(alpha=0.3)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=120)
    plt.close(figure)


def _used(request: SimRequest) -> float | None:
    """Latency over target; None when it did not finish or has none."""
    done_at = request.first_token_at if request.interactive else request.finished_at
    allowed_s = request.deadline_at - request.arrival.arrived_at
    if done_at is None or allowed_s == float("inf"):
        return None
    return max(1e-3, (done_at - request.arrival.arrived_at) / allowed_s)
