"""The demo's table, plot and figures."""

from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from rich.console import Console
from rich.table import Table

from ops.demo.drive import Outcome, Record
from ops.demo.workload import CLASSES

mpl.use("Agg")
import matplotlib.pyplot as plt


def figures(record: Record, *, engine: str, broker: str) -> dict[str, Any]:
    """All that the table shows, for machines."""
    return {
        "engine": engine,
        "broker": broker,
        "sent": record.sent,
        "lost": record.lost,
        "duration_s": round(record.duration_s, 2),
        "refusals": record.refusals,
        "classes": [_class_figures(record, c.name) for c in CLASSES],
        "swaps": sum(status.totals.swaps for status in record.instances.values()),
        "evictions": sum(status.totals.evicted for status in record.instances.values()),
        "relegated": sum(status.totals.relegated for status in record.instances.values()),
    }


def _class_figures(record: Record, name: str) -> dict[str, Any]:
    members = [o for o in record.outcomes if o.class_name == name]
    done = [o for o in members if o.answered and o.error is None]
    return {
        "class": name,
        "requests": len(members),
        "completed": len(done),
        "attained": sum(o.attained for o in done) / len(members) if members else None,
        "ttft_s": _quantiles([o.ttft_s for o in done]),
        "max_tbt_s": _quantiles([o.max_tbt_s for o in done]),
        "ttlt_s": _quantiles([o.ttlt_s for o in done]),
        "tokens_per_s": sum(o.output_tokens for o in done) / record.duration_s
        if record.duration_s
        else None,
    }


def _quantiles(values: list[float | None]) -> dict[str, float] | None:
    known = [value for value in values if value is not None]
    if not known:
        return None
    return {"p50": float(np.quantile(known, 0.5)), "p99": float(np.quantile(known, 0.99))}


def print_table(data: dict[str, Any]) -> None:
    """One table, and one line about the rest."""
    table = Table(title=f"Headway demo: engine {data['engine']}, broker {data['broker']}")
    for name in ("class", "requests", "attained", "TTFT p50/p99 s", "worst TBT p50/p99 s",
                 "TTLT p50/p99 s", "tokens/s"):  # fmt: skip
        table.add_column(name, justify="left" if name == "class" else "right")
    for row in data["classes"]:
        table.add_row(
            row["class"],
            str(row["requests"]),
            "-" if row["attained"] is None else f"{row['attained']:.1%}",
            _pair(row["ttft_s"]),
            _pair(row["max_tbt_s"]),
            _pair(row["ttlt_s"]),
            "-" if row["tokens_per_s"] is None else f"{row['tokens_per_s']:.1f}",
        )
    console = Console(width=110)
    console.print(table)
    refused = sum(data["refusals"].values())
    console.print(
        f"sent {data['sent']}, lost {data['lost']}; malformed refused with the right error "
        f"{refused} of {len(data['refusals'])}; model swaps {data['swaps']}, evictions "
        f"{data['evictions']}, relegated {data['relegated']}; {data['duration_s']:.0f} s"
    )


def _pair(quantiles: dict[str, float] | None) -> str:
    return "-" if quantiles is None else f"{quantiles['p50']:.3f} / {quantiles['p99']:.3f}"


def plot(record: Record, file: Path) -> None:
    """Time to first token over the run, one colour a class, with each class's target."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.2), layout="constrained")
    for number, request_class in enumerate(CLASSES):
        members = _done(record, request_class.name)
        left.scatter(
            [o.sent_at_s for o in members],
            [o.ttft_s for o in members],
            s=12,
            color=f"C{number}",
            label=request_class.name,
        )
        if request_class.slo.ttft_s is not None:
            left.axhline(request_class.slo.ttft_s, color=f"C{number}", linestyle=":", linewidth=1)
        ttlt_s = np.sort([o.ttlt_s for o in members if o.ttlt_s is not None])
        right.plot(
            ttlt_s,
            np.arange(1, len(ttlt_s) + 1) / max(1, len(ttlt_s)),
            color=f"C{number}",
            label=request_class.name,
        )
    left.set(xlabel="sent at, s", ylabel="time to first token, s", yscale="log",
             title="First tokens; dotted: targets")  # fmt: skip
    right.set(xlabel="time to last token, s", ylabel="share of requests", xscale="log",
              title="Whole answers")  # fmt: skip
    left.legend()
    right.grid(alpha=0.3)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=120)
    plt.close(figure)


def _done(record: Record, name: str) -> list[Outcome]:
    return [o for o in record.outcomes if o.class_name == name and o.error is None and o.ttft_s]
