"""A file that the front and the engine core map into memory."""

import mmap
from pathlib import Path
from typing import Any

import numpy as np


class SharedFile:
    """
    One record of *layout* in an existing file; unmapped when the object goes.

    Values have eight bytes, at multiples of eight, and each is written atomically; readers may see
    some values of a group before the others.

    Args:
        path: Created by the front.
        layout: Fields, known to the front and the engine core.
    """

    def __init__(self, path: Path, layout: np.dtype[Any]) -> None:
        self.path = path
        with path.open("r+b") as file:
            memory = mmap.mmap(file.fileno(), layout.itemsize)
        self.record: Any = np.frombuffer(memory, layout)[0]
        """The file's content by field; writes to it reach the other side."""


def named(values: Any) -> dict[str, Any]:
    """A copy of a group of *values* in a record, by name."""
    return dict(zip(values.dtype.names, values.item(), strict=True))
