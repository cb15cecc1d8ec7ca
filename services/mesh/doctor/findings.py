"""Result of one check."""

from enum import Enum

import msgspec


class Level(Enum):
    """Weight of a finding."""

    OK = "ok"
    NOTE = "note"
    """Nothing is wrong; the operator should know it."""
    DEVIATION = "deviation"
    """The mesh does not work, or not as described."""


class Finding(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What was found, what follows from it, and what to do."""

    check: str
    """Subject: `connection`, `version`, `rights`, `objects`, `policies`, `alarms`, ..."""
    level: Level
    what: str
    consequence: str = ""
    remedy: str = ""

    @property
    def text(self) -> str:
        """The finding in up to three lines."""
        first = f"{self.level.value:<9}  {self.check}: {self.what}"
        further = ((" so", self.consequence), ("do", self.remedy))
        lines = [f"{word:>9}  {text}" for word, text in further if text]
        return "\n".join((first, *lines))


def ok(check: str, what: str) -> Finding:
    """A finding that needs no attention."""
    return Finding(check=check, level=Level.OK, what=what)


def note(check: str, what: str, *, so: str = "", do: str = "") -> Finding:
    """A finding that the operator should know."""
    return Finding(check=check, level=Level.NOTE, what=what, consequence=so, remedy=do)


def deviation(check: str, what: str, *, so: str, do: str) -> Finding:
    """A finding with which the mesh does not work as described."""
    return Finding(check=check, level=Level.DEVIATION, what=what, consequence=so, remedy=do)
