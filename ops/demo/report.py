"""Figures, table, plot and closing sentence, all computed from the two arms' records."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from rich.console import Console
from rich.table import Table

from ops.demo.arms import FCFS, HEADWAY, Arm
from ops.demo.drive import ANSWER_TIMEOUT_S, Record
from ops.demo.judging import Outcome, has_target
from ops.demo.workload import BURST, BURST_FACTOR, CLASSES
from shared.contracts.base import Seconds
from shared.contracts.qos import QosClass

mpl.use("Agg")
import matplotlib.pyplot as plt

COLOURS = {FCFS.name: "C1", HEADWAY.name: "C0"}
NUM_BINS = 12
"""Number of bins of sending time in the plot."""


def arm_figures(record: Record) -> dict[str, Any]:
    """Figures of one arm of the demo: times in seconds, rates per second of `wall_s`."""
    judged = [o for o in record.outcomes if has_target(o)]
    attained = sum(o.attained for o in judged)
    return {
        "sent": record.sent,
        "lost": record.sent - sum(o.completed for o in record.outcomes),
        "diverged": sum(o.diverged for o in record.outcomes),
        "errors": sorted({o.error for o in record.outcomes if o.error is not None}),
        "refusals": record.refusals,
        "capacity_rps": round(record.capacity_rps, 2),
        "wall_s": round(record.wall_s, 2),
        "kill_s": record.kill_s and round(record.kill_s, 2),
        "most_send_lag_s": round(record.most_send_lag_s, 3),
        "with_target": len(judged),
        "attained": attained,
        "attainment": attained / len(judged) if judged else None,
        "goodput_rps": attained / record.wall_s if record.wall_s else None,
        "late_tokens": sum(o.late_tokens for o in judged),
        "interactive_tokens": sum(o.output_tokens for o in judged if o.ttft_s is not None),
        "classes": {
            c.name: _class_figures(
                [o for o in record.outcomes if o.class_name == c.name], c.qos_class
            )
            for c in CLASSES
        },
        "counts": record.counts,
    }


def _class_figures(outcomes: list[Outcome], qos_class: QosClass) -> dict[str, Any]:
    done = [o for o in outcomes if o.completed]
    attained = sum(o.attained for o in outcomes)
    return {
        "qos_class": qos_class.value,
        "requests": len(outcomes),
        "completed": len(done),
        "attained": attained,
        "attainment": attained / len(outcomes) if outcomes else None,
        "ttft_s": _quantiles([o.ttft_s for o in done]),
        "ttlt_s": _quantiles([o.ttlt_s for o in done]),
    }


def _quantiles(values: list[Seconds | None]) -> dict[str, float] | None:
    known = [value for value in values if value is not None]
    if not known:
        return None
    return {"p50": float(np.quantile(known, 0.5)), "p99": float(np.quantile(known, 0.99))}


def is_ahead(arms: Mapping[str, Any]) -> bool:
    """True if Headway met a larger share of the targets than FCFS."""
    ours, theirs = arms[HEADWAY.name]["attainment"], arms[FCFS.name]["attainment"]
    return ours is not None and theirs is not None and ours > theirs


def is_success(arms: Mapping[str, Any]) -> bool:
    """True if no request was lost, every malformed request was refused, and Headway is ahead."""
    whole = all(arm["lost"] == 0 and all(arm["refusals"].values()) for arm in arms.values())
    return whole and is_ahead(arms)


def sentence(arms: Mapping[str, Any]) -> str:
    """One sentence that summarises this run, with figures of this run only."""
    ours, theirs = arms[HEADWAY.name], arms[FCFS.name]
    if ours["attainment"] is None or theirs["attainment"] is None:
        return "This run has no result: no request with a target was sent."
    gap = 100 * (ours["attainment"] - theirs["attainment"])
    verdict = (
        f"ahead by {gap:.1f} points"
        if gap > 0
        else f"not ahead ({gap:+.1f} points): this run does not show an advantage"
    )
    lost = ours["lost"] + theirs["lost"]
    text = (
        f"In this run, with the same {ours['sent']} requests, a burst of {BURST_FACTOR} times the "
        f"measured capacity and one agent killed, Headway met {ours['attainment']:.1%} of the "
        f"targets and FCFS {theirs['attainment']:.1%}, so Headway is {verdict}; "
        f"{_lost(lost)}"
    )
    if diverged := ours["diverged"] + theirs["diverged"]:
        text += (
            f"; {diverged} of the streams ended early, since a replay after the kill gave other "
            "tokens (finals have the whole answers)"
        )
    behind = [
        f"{name} ({ours['classes'][name]['attainment']:.1%} against {row['attainment']:.1%})"
        for name, row in theirs["classes"].items()
        if row["attainment"] is not None
        and ours["classes"][name]["attainment"] is not None
        and row["attainment"] > ours["classes"][name]["attainment"]
    ]
    if gap > 0 and behind:
        text += f"; Headway was behind for {', '.join(behind)}"
    return text + "."


def _lost(number: int) -> str:
    if number == 0:
        return "no request was lost"
    were = "1 request was" if number == 1 else f"{number} requests were"
    return f"{were} lost (failed, or not answered within {ANSWER_TIMEOUT_S:g} s)"


def print_table(data: Mapping[str, Any]) -> None:
    """Print a table with the figures of the two arms side by side."""
    arms = data["arms"]
    table = Table(title=f"Same load, two arms: engine {data['engine']}, broker {data['broker']}")
    table.add_column("")
    for arm in (FCFS, HEADWAY):
        table.add_column(arm.title, justify="right")
    for label, cells in _rows([arms[FCFS.name], arms[HEADWAY.name]]):
        table.add_row(label, *cells)
    console = Console(width=100)
    console.print(table)
    console.print(f"Killed in each arm: {data['killed']}.")


def _rows(arms: list[Mapping[str, Any]]) -> list[tuple[str, list[str]]]:
    rows = []
    for c in CLASSES:
        members = [arm["classes"][c.name] for arm in arms]
        verb = "answered" if c.qos_class is QosClass.BEST_EFFORT else "in time"
        target = _target(c.slo.ttft_s, c.slo.tbt_s, c.slo.ttlt_s)
        rows.append((f"{c.name} {verb}{target}", [_share(m) for m in members]))
    rows.append(("all with a target in time", [_percent(arm["attainment"]) for arm in arms]))
    rows.append(("goodput, requests in time/s", [_number(arm["goodput_rps"], 2) for arm in arms]))
    for c in CLASSES:
        key = "ttft_s" if c.qos_class is QosClass.INTERACTIVE else "ttlt_s"
        pairs = [_pair(arm["classes"][c.name][key]) for arm in arms]
        rows.append((f"{c.name} {key[:4].upper()} p50/p99, s", pairs))
    late = [f"{arm['late_tokens']} of {arm['interactive_tokens']}" for arm in arms]
    rows.append(("late tokens", late))
    for label, name in (
        ("evictions", "evicted"),
        ("swap-outs of requests", "swapped_out"),
        ("model swaps", "swaps"),
        ("relegations", "relegated"),
    ):
        rows.append((label, [str(arm["counts"].get(name, 0)) for arm in arms]))
    rows.append(
        (
            f"lost: failed, or no answer in {ANSWER_TIMEOUT_S:g} s",
            [f"{arm['lost']} of {arm['sent']}" for arm in arms],
        )
    )
    rows.append(("streams that a replay ended early", [str(arm["diverged"]) for arm in arms]))
    refused = [f"{sum(a['refusals'].values())} of {len(a['refusals'])}" for a in arms]
    rows.append(("malformed, refused with the right error", refused))
    rows.append(("measured capacity, requests/s", [_number(a["capacity_rps"], 1) for a in arms]))
    rows.append(("first sending to last answer, s", [_number(a["wall_s"], 1) for a in arms]))
    return rows


def _target(ttft_s: Seconds | None, tbt_s: Seconds | None, ttlt_s: Seconds | None) -> str:
    parts = (("TTFT", ttft_s), ("TBT", tbt_s), ("TTLT", ttlt_s))
    text = ", ".join(f"{name} {value:g} s" for name, value in parts if value is not None)
    return f" ({text})" if text else ""


def _share(row: Mapping[str, Any]) -> str:
    return f"{_percent(row['attainment'])} of {row['requests']}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _pair(quantiles: Mapping[str, float] | None) -> str:
    return "-" if quantiles is None else f"{quantiles['p50']:.2f} / {quantiles['p99']:.2f}"


def plot(
    records: Mapping[str, Record], arms: tuple[Arm, ...], *, duration_s: Seconds, file: Path
) -> None:
    """Plot attainment and TTFT of both arms over sending time, with marks at burst and kill."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.2), layout="constrained")
    for arm in arms:
        record = records[arm.name]
        at_s, shares = attainment_over_time(record.outcomes, duration_s=duration_s)
        left.plot(at_s, shares, color=COLOURS[arm.name], marker="o", label=arm.title)
        streamed = [o for o in record.outcomes if o.ttft_s is not None]
        right.scatter(
            [o.sent_at_s for o in streamed],
            [o.ttft_s for o in streamed],
            s=10,
            color=COLOURS[arm.name],
            label=arm.title,
        )
        for axes in (left, right):
            if record.kill_s is not None:
                axes.axvline(record.kill_s, color=COLOURS[arm.name], linestyle="--", linewidth=1)
    for c in CLASSES:
        if c.slo.ttft_s is not None:
            right.axhline(c.slo.ttft_s, color="grey", linestyle=":", linewidth=1)
    for axes in (left, right):
        axes.axvspan(BURST[0] * duration_s, BURST[1] * duration_s, color="grey", alpha=0.15)
        axes.set_xlabel("sent at, s")
        axes.legend()
    left.set(ylabel="share of requests in time", ylim=(-0.03, 1.03),
             title="Targets met; grey: burst, dashed: agent killed")  # fmt: skip
    right.set(ylabel="time to first token, s", yscale="log",
              title="Interactive requests; dotted: targets")  # fmt: skip
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=120)
    plt.close(figure)


def attainment_over_time(
    outcomes: list[Outcome], *, duration_s: Seconds
) -> tuple[list[Seconds], list[float]]:
    """Centres of non-empty bins of sending time, and the share of targets met in each."""
    at_s, shares = [], []
    width_s = duration_s / NUM_BINS
    judged = [o for o in outcomes if has_target(o)]
    for number in range(NUM_BINS):
        members = [o for o in judged if int(o.sent_at_s / width_s) == number]
        if members:
            at_s.append((number + 0.5) * width_s)
            shares.append(sum(o.attained for o in members) / len(members))
    return at_s, shares
