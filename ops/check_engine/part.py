"""Parts of the check and their results."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec import Struct

from shared.contracts.base import Seconds


class PartFailedError(Exception):
    """A part failed; the message has the reason and where to read more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the user asked for."""

    out: Path
    quick: bool
    model: Path | None
    has_gpu: bool


class AcceptanceLine(Struct, kw_only=True):
    """A line of a bench: a value that must be at most its bound."""

    line: str
    value: float | None
    """None if this run did not measure the line."""
    bound: float
    holds: bool | None


class Found(Struct, kw_only=True):
    """Figures of a part, also of a part that failed later."""

    figures: dict[str, Any] = {}
    """Name -> number, text, or a mapping or list of these."""
    lines: list[AcceptanceLine] = []
    failure: str = ""
    """Why the part failed after it had measured the figures; empty if it did not."""


class PartResult(Struct, kw_only=True):
    """Result of one part."""

    name: str
    about: str
    found: Found
    duration_s: Seconds

    @property
    def failed(self) -> bool:
        """True if the part failed."""
        return bool(self.found.failure)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One part of the check."""

    name: str
    about: str
    """One sentence about what the part does."""
    run: Callable[[Options], Found]
    """Raises any exception if the part fails; the other parts run nevertheless."""
    log: str = ""
    """File in the folder of the report with the output of the part while it runs."""

    def result(self, options: Options) -> PartResult:
        """Run the part; its failure becomes part of the result."""
        began = time.monotonic()
        try:
            found = self.run(options)
        except Exception as error:  # noqa: BLE001 - a failing part must not stop the others
            found = Found(failure=str(error) or type(error).__name__)
        duration_s = round(time.monotonic() - began, 1)
        return PartResult(name=self.name, about=self.about, found=found, duration_s=duration_s)
