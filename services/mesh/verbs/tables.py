"""Printing of tables in which names and ids stay whole."""

from collections.abc import Iterable

from rich.cells import cell_len
from rich.console import Console
from rich.table import Column, Table

_LEAST_COLUMN = 12
"""Width to which a column is narrowed that may be wrapped."""
_FRAME = 3
"""Width of padding and border of a column at most."""


def print_tables(*parts: Table | str, width: int | None = None) -> None:
    """
    Print tables, and texts between them, to standard output.

    Columns with `no_wrap` are printed whole, also if the lines are longer than the terminal's then.
    If the output is not a terminal, no column is wrapped, so that each row is one line.

    Args:
        parts: Tables and texts, in order.
        width: Width of an output that is not a terminal, whose columns are wrapped then.
    """
    console = Console(markup=False, highlight=False)
    if width is not None and not console.is_terminal:
        console.width = width
    is_wrapped = width is not None or console.is_terminal
    usual = console.width
    for part in parts:
        if isinstance(part, Table):
            needed = sum(_width(each, is_wrapped=is_wrapped) for each in part.columns) + 1
            console.width = max(usual, needed)
        console.print(part)
        console.width = usual


def add_columns(table: Table, names: Iterable[str], *, folded: bool = False) -> None:
    """
    Add columns of names or ids.

    Args:
        table: The table.
        names: Headers of the columns.
        folded: True: the columns are folded where they do not fit, for a screen of fixed width.
    """
    for name in names:
        table.add_column(name, no_wrap=not folded, overflow="fold")


def _width(column: Column, *, is_wrapped: bool) -> int:
    texts = (str(column.header), *(str(each) for each in column.cells))
    whole = max(cell_len(line) for text in texts for line in (text.splitlines() or [""]))
    if is_wrapped and not column.no_wrap:
        whole = min(whole, max(_LEAST_COLUMN, column.min_width or 0))
    return whole + _FRAME
