"""A file that the front and the engine core have in memory together."""

import mmap
from pathlib import Path


class SharedFile:
    """
    *size* bytes of a file that is there already.

    Args:
        path: Made by the front.
        size: Of all that both sides know of.
    """

    def __init__(self, path: Path, size: int) -> None:
        self.path = path
        with path.open("r+b") as file:
            self.memory = mmap.mmap(file.fileno(), size)

    def close(self) -> None:
        """Let go of the memory; the file stays."""
        self.memory.close()
