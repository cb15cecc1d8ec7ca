"""Tables of the documents."""

import re
from pathlib import Path


def table(document: Path, header: str) -> list[list[str]]:
    """Cells by row of the only table whose first columns have the headings *header*."""
    _, body = document.read_text().split(f"| {header} |")
    rows = body.split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def names(document: Path, header: str) -> list[str]:
    """Names in backticks in the first column of the table that `table` returns."""
    return [name for row in table(document, header) for name in re.findall(r"`([^`]+)`", row[0])]
