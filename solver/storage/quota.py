"""Limits on the stored files of a tenant."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Use:
    """What the files of one tenant take, or may take."""

    num_files: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Excess:
    """A limit that one more file would exceed."""

    limit: Literal["max_files", "max_bytes"]
    allowed: int
    used: int
    """Without the file."""


def excess(used: Use, allowed: Use, *, added_bytes: int) -> Excess | None:
    """
    The first limit that one more file of *added_bytes* would exceed; None if the file fits.

    Limits may be below what is used, after they were lowered: then no file fits.
    """
    if used.num_files + 1 > allowed.num_files:
        return Excess("max_files", allowed.num_files, used.num_files)
    if used.num_bytes + added_bytes > allowed.num_bytes:
        return Excess("max_bytes", allowed.num_bytes, used.num_bytes)
    return None
