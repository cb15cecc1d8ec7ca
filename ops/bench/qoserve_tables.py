"""The QoServe benchmark's tables without a bar: one row a scenario, one column a policy."""

from collections.abc import Mapping
from typing import Any

from ops.bench.cells import Cell


def tables(found: Mapping[Cell, dict[str, Any]], seed: int) -> dict[str, dict[str, Any]]:
    """Figures of one seed by scenario and policy."""
    made: dict[str, dict[str, Any]] = {}
    for cell, figures in found.items():
        if cell.seed != seed:
            continue
        if cell.kind == "goodput":
            kind = "prefill-only goodput" if cell.prefill_only else "goodput"
            row = made.setdefault(
                f"{kind}, {cell.lengths}, {cell.profile}, {cell.hours:g} h, one seed, 1/s", {}
            )
            row[cell.policy] = figures["goodput_rps"]
        elif cell.kind == "simulate":
            row = made.setdefault(f"{_scenario(cell)}, {cell.profile}, %", {})
            row[_column(cell, figures)] = round(100 * figures["violations"], 2)
    return dict(sorted(made.items()))


def percent(shares: Mapping[str, float]) -> dict[str, float]:
    """Shares 0..1 as percentages."""
    return {name: round(100 * share, 2) for name, share in shares.items()}


def _scenario(cell: Cell) -> str:
    if cell.wave is not None:
        return f"wave 2<->{cell.wave[1]:g}"
    if cell.replicas > 1:
        return "35/s"
    if min(cell.shares) != max(cell.shares):
        return "-".join(f"{100 * share:.0f}" for share in cell.shares) + " at 4.5/s"
    if cell.rate_rps == 6 and cell.hours != 2:
        return f"6/s over {cell.hours:g} h, one seed"
    return f"by load, {cell.policy}"


def _column(cell: Cell, figures: dict[str, Any]) -> str:
    if cell.wave is not None:
        important = round(100 * figures["important_violations"], 3)
        return f"{cell.policy} (important {important})"
    if cell.replicas > 1:
        return f"{cell.policy} on {cell.replicas}"
    if cell.hours == 2:
        return f"{cell.rate_rps:g}/s (long {100 * figures['long_violations']:.0f})"
    return cell.policy
