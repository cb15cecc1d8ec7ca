"""Tables that the simulator prints."""

from collections.abc import Collection
from typing import Any

from rich.console import Console
from rich.table import Table

from ops.sim.workload import CLASSES
from shared.contracts.qos import Slo


def print_table(figures: dict[str, Any], title: str) -> None:
    """Print misses by class, and figures of the replicas' work."""
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
    console.print(_targets(figures["classes"]))
    pace = figures["pace"]
    console.print(
        f"{figures['requests']} requests, {figures['violations']:.2%} missed "
        f"({figures['important_violations']:.2%} of the important, "
        f"{figures['long_violations']:.2%} of the long); "
        f"goodput {figures['goodput_rps']:.2f}/s, utilization {figures['utilization']:.0%}, "
        f"{figures['tokens_per_iteration']:.0f} tokens an iteration; "
        f"late tokens {pace['late']:.3%}, gaps above TBT {pace['gaps']:.1%} (no miss "
        "while a token is in time); "
        f"{figures['preempted']} preemptions; "
        f"simulated {figures['simulated_s'] / 3600:.1f} h in {figures['cpu_s']:.1f} s of CPU, "
        f"{figures['speed']:.0f}x real time"
    )


def _targets(names: Collection[str]) -> str:
    """Legend of the classes *names*."""
    targets = [f"{c.name} {_target(c.slo)}" for c in CLASSES if c.name in names]
    return f"targets of the classes: {'; '.join(targets)}."


def _target(slo: Slo) -> str:
    parts = ((slo.ttft_s, "first token in {:g} s"), (slo.tbt_s, "{:g} s per token (TBT)"),
             (slo.ttlt_s, "last token in {:g} s"))  # fmt: skip
    return ", ".join(text.format(value) for value, text in parts if value is not None)


def _pair(quantiles: dict[str, float] | None, scale: float = 1.0) -> str:
    if quantiles is None:
        return "-"
    return f"{scale * quantiles['p50']:.3g} / {scale * quantiles['p99']:.3g}"


def print_comparison(rows: list[dict[str, Any]], title: str) -> None:
    """Print a table with one row per policy."""
    table = Table(title=title)
    classes = sorted(rows[0]["classes"])
    found = [name for name in ("least_replicas", "goodput_rps_at_allowed") if name in rows[0]]
    for name in ("policy", *found, "missed", *classes, "important", "long", "goodput/s", "busy"):
        table.add_column(name, justify="left" if name == "policy" else "right")
    for row in rows:
        table.add_row(
            row["policy"],
            *(f"{row[name]:.4g}" for name in found),
            f"{row['violations']:.2%}",
            *(f"{row['classes'][name]['violations']:.2%}" for name in classes),
            f"{row['important_violations']:.2%}",
            f"{row['long_violations']:.2%}",
            f"{row['goodput_rps']:.2f}",
            f"{row['utilization']:.0%}",
        )
    console = Console(width=100)
    console.print(table)
    console.print(
        "columns from `missed` to `long` have the shares of requests that missed their target, "
        f"`long` of the tenth with the longest prompts; {_targets(classes)}"
    )
