"""A file that the front and the engine core have in memory together."""

import mmap
import struct
from pathlib import Path
from typing import Any


class SharedFile:
    """
    *size* bytes of a file that is there already.

    Values are of eight bytes, at multiples of eight, and each changes at once. `struct.pack_into`
    would show zeros first: it clears what it is about to write.

    Args:
        path: Made by the front.
        size: Of all that both sides know of.
    """

    def __init__(self, path: Path, size: int) -> None:
        self.path = path
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), size)

    def put(self, layout: struct.Struct, at: int, *values: float) -> None:
        """Write *values* from byte *at* on; readers may see some of them before the others."""
        self._memory[at : at + layout.size] = layout.pack(*values)

    def get(self, layout: struct.Struct, at: int) -> tuple[Any, ...]:
        """The values of *layout* from byte *at* on."""
        return layout.unpack(self._memory[at : at + layout.size])

    def close(self) -> None:
        """Let go of the memory; the file stays."""
        self._memory.close()
