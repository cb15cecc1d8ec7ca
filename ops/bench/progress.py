"""Progress of long measurements: on standard error, so that the data stays clean."""

import sys
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")

_PERIOD_S = 30.0


def say(text: str) -> None:
    """One line."""
    print(text, file=sys.stderr, flush=True)


def counted(parts: Iterable[T], total: int, what: str) -> Iterator[T]:
    """*parts* as they come, *total* in all; says now and then how many there are."""
    began = told = time.monotonic()
    for number, part in enumerate(parts, start=1):
        yield part
        now = time.monotonic()
        if now - told >= _PERIOD_S:
            told = now
            say(f"{what}: {number} of {total} after {(now - began) / 60:.1f} min")
