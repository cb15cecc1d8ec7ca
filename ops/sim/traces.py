"""Reads traces from files; errors state the location in the file."""

import csv
from datetime import datetime
from pathlib import Path

from ops.sim.workload import Trace, read_trace

_TIMESTAMP = "TIMESTAMP"
_COUNTS = ("ContextTokens", "GeneratedTokens")
_WHOLE_SECONDS = 19
"""Number of characters of a timestamp without fractions: `2023-11-16 18:15:46`."""


def checked_trace(file: Path, *, match: str | None = None) -> Trace:
    """
    Read an Azure LLM inference trace.

    Args:
        file: CSV with the columns `TIMESTAMP,ContextTokens,GeneratedTokens`.
        match: Percentiles of the lengths, as for `ops.sim.workload.read_trace`.

    Raises:
        ValueError: The trace is invalid; the message names file, line and field.
        OSError: The file cannot be read.
    """
    with file.open(newline="", encoding="utf-8-sig") as lines:
        rows = csv.DictReader(lines)
        missing = [name for name in (_TIMESTAMP, *_COUNTS) if name not in (rows.fieldnames or ())]
        if missing:
            raise ValueError(f"{file}:1: no column {', '.join(missing)}")
        for row in rows:
            if (fault := _fault(row)) is not None:
                raise ValueError(f"{file}:{rows.line_num}: {fault}")
    return read_trace(file, match=match)


def _fault(row: dict[str, str | None]) -> str | None:
    """The invalid field of a row and the reason; None for a valid row."""
    at = (row[_TIMESTAMP] or "").strip()
    try:
        datetime.fromisoformat(at[:_WHOLE_SECONDS])
    except ValueError:
        return f"{_TIMESTAMP}: {at!r} is not a date and time such as 2023-11-16 18:15:46.68"
    for name in _COUNTS:
        text = (row[name] or "").strip()
        if not text.isdecimal():
            return f"{name}: {text!r} is not a number of tokens"
    return None
