"""Progress of long measurements, on standard error because standard output carries the data."""

import sys
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")

_PERIOD_S = 30.0


def say(text: str) -> None:
    """Print one line of progress to standard error."""
    print(text, file=sys.stderr, flush=True)


def counted(parts: Iterable[T], total: int, what: str) -> Iterator[T]:
    """Yield the items of *parts*, *total* in number, and print the count periodically."""
    began = reported_at = time.monotonic()
    for number, part in enumerate(parts, start=1):
        yield part
        now = time.monotonic()
        if now - reported_at >= _PERIOD_S:
            reported_at = now
            say(f"{what}: {number} of {total} after {(now - began) / 60:.1f} min")
