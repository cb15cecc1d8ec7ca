"""Text tables of the estimator's commands."""

from collections.abc import Iterator, Sequence

from shared.contracts.base import UnixTime

_UNITS = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))
_FEW = 2
"""
Minimum count of a time unit in a printed age; a lower count is printed in the next smaller unit.
"""


def aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Text lines of a table: names in the first column are left-aligned, figures right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for name, *cells in rows:
        figures = (cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True))
        yield "  ".join((name.ljust(widths[0]), *figures))


def age(at: UnixTime, now: UnixTime) -> str:
    """Age as text; a negative age counts as zero, since clocks of machines differ slightly."""
    seconds = max(0.0, now - at)
    unit, name = next((unit, name) for unit, name in _UNITS if seconds >= _FEW * unit or unit == 1)
    return f"{seconds / unit:.1f} {name} ago"


def shares(coverage: Sequence[tuple[float, float]]) -> str:
    """Share of outcomes below each predicted quantile, as text: `50 % in p50, 88 % in p90`."""
    return ", ".join(f"{100 * share:.0f} % in p{100 * level:g}" for level, share in coverage)
