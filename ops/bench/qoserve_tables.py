"""The QoServe benchmark's results for tables 4 and 5 and figure 12 of the paper, with one seed."""

from collections.abc import Mapping
from typing import Any

from ops.bench import qoserve_cells as cells
from ops.bench.cells import Cell

Found = Mapping[Cell, Mapping[str, Any]]
Rows = dict[str, dict[str, Any]]

_PAPER: dict[str, dict[str, Any]] = {
    "Table 4": {"paper": "silo 7+3+3: 0.24 %, QoServe on 10: 0 %"},
    "Table 5, goodput": {"paper": "edf 2.75, dc 3.3, dc+er 3.6, qoserve 3.65"},
    "Table 5, % missed": {"paper": "edf 100, dc 74, dc+er 26, qoserve 16"},
    "Fig 12": {"paper": "FCFS 81.88, EDF 84.12, QoServe 8.64 (important 0)"},
}


def tables(found: Found, seed: int) -> Rows:
    """Rows of each table of the paper with data in *found*, with the paper's values."""
    rows: Rows = {}
    for table in (_table_4, _table_5_goodput, _table_5_missed, _figure_12):
        rows |= {name: row for name, row in table(found, seed).items() if row}
    return {
        name: row | next(paper for start, paper in _PAPER.items() if name.startswith(start))
        for name, row in rows.items()
    }


def percent(shares: Mapping[str, float]) -> dict[str, float]:
    """Shares 0..1 as percentages."""
    return {name: round(100 * share, 2) for name, share in shares.items()}


def _table_4(found: Found, seed: int) -> Rows:
    rows: Rows = {}
    for (profile, policy), count in cells.GPUS.items():
        figures = found.get(cells.gpus(profile, policy, seed=seed))
        if figures is not None:
            p99s = " ".join(
                f"{c['latency_s']['p99'] or 0:.3g}" for c in figures["classes"].values()
            )
            rows.setdefault(f"Table 4, 35/s, {profile}", {})[f"{policy} on {count}"] = (
                f"{100 * figures['violations']:.2f} %, p99 s {p99s}"
            )
    return rows


def _table_5_goodput(found: Found, seed: int) -> Rows:
    rows: Rows = {}
    for profile in cells.PROFILES:
        made = {p: cells.goodput(profile, p, seed=seed, hours=2) for p in cells.GOODPUT_POLICIES}
        rows[f"Table 5, goodput over 2 h, {profile}, 1/s"] = {
            policy: found[cell]["goodput_rps"] for policy, cell in made.items() if cell in found
        }
    return rows


def _table_5_missed(found: Found, seed: int) -> Rows:
    rows: Rows = {}
    for profile in cells.PROFILES:
        for hours in (1, 4):
            made = {
                policy: cells.overload(profile, policy, hours=hours, seed=seed)
                for policy in cells.ABLATION
            }
            missed = {p: found[cell]["violations"] for p, cell in made.items() if cell in found}
            rows[f"Table 5, % missed at 6/s over {hours} h, {profile}"] = percent(missed)
    return rows


def _figure_12(found: Found, seed: int) -> Rows:
    rows: Rows = {}
    for high in cells.WAVE_HIGHS_RPS:
        row = rows.setdefault(f"Fig 12, % missed, 2<->{high:g}", {})
        for policy in cells.WAVE_POLICIES:
            figures = found.get(cells.wave(policy, high, seed=seed))
            if figures is not None:
                by_class = " ".join(
                    f"{100 * c['violations']:.1f}" for c in figures["classes"].values()
                )
                row[policy] = (
                    f"{100 * figures['violations']:.2f} (important "
                    f"{100 * figures['important_violations']:.2f}; Q1 Q2 Q3 {by_class})"
                )
    return rows
