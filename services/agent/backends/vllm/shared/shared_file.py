"""A file that the front and the engine core map into memory."""

import mmap
from pathlib import Path
from typing import Any

import numpy as np


class SharedFile:
    """
    One record of type *layout* in an existing file, which is unmapped with this object.

    Each value has eight bytes, is aligned to eight bytes, and is written atomically. A group of
    values is not written atomically: a reader may see only some of its new values.

    Args:
        path: Created by the front.
        layout: Fields of the record; the front and the engine core use the same layout.
    """

    def __init__(self, path: Path, layout: np.dtype[Any]) -> None:
        self.path = path
        with path.open("r+b") as file:
            memory = mmap.mmap(file.fileno(), layout.itemsize)
        self.record: Any = np.frombuffer(memory, layout)[0]
        """The file's content by field; writes are visible to the other process."""


def named(values: Any) -> dict[str, Any]:
    """Copy of a group of *values* in a record, by name."""
    return dict(zip(values.dtype.names, values.item(), strict=True))
