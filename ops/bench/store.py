"""Figures that are kept once they were made, so that a long benchmark can be resumed."""

import hashlib
import os
from collections.abc import Callable, Container, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

ROOT = Path(__file__).parents[2]

Figures = dict[str, Any]
Cell = TypeVar("Cell", bound=msgspec.Struct)
"""What one measurement is of; equal cells of equal code give equal figures."""


class Store(Generic[Cell]):
    """
    Figures on disk, by the cell and the digest of the code that made them.

    Args:
        directory: Holds a file a cell.
        digest: Of the code that a cell depends on.
    """

    def __init__(self, directory: Path, digest: Callable[[Cell], bytes]) -> None:
        self._directory = directory
        self._digest = digest

    def get(self, cell: Cell) -> Figures | None:
        """The figures, if they were made."""
        file = self._file(cell)
        return msgspec.json.decode(file.read_bytes()) if file.exists() else None

    def num_held(self, cells: Iterable[Cell]) -> int:
        """How many of *cells* were made already."""
        return sum(self._file(cell).exists() for cell in set(cells))

    def put(self, cell: Cell, figures: Figures) -> None:
        """Keep them."""
        self._directory.mkdir(parents=True, exist_ok=True)
        partial = self._file(cell).with_suffix(".partial")
        partial.write_bytes(msgspec.json.encode(figures))
        partial.rename(self._file(cell))

    def _file(self, cell: Cell) -> Path:
        key = hashlib.blake2b(msgspec.json.encode(cell) + self._digest(cell), digest_size=12)
        return self._directory / f"{key.hexdigest()}.json"


def kept(
    cells: Iterable[Cell],
    store: Store[Cell],
    make: Callable[[Cell], Figures],
    *,
    workers: int | None = None,
    prepare: Callable[[], object] | None = None,
) -> Iterator[tuple[Cell, Figures]]:
    """
    Figures of each cell, as they come.

    Args:
        cells: Made in this order, except those that are in the store.
        store: Gets what is made.
        make: Measures one, in a process of its own.
        workers: Processes; none is one per core.
        prepare: Called in each of them before, and here before there is any.
    """
    missing = []
    for cell in dict.fromkeys(cells):
        figures = store.get(cell)
        if figures is None:
            missing.append(cell)
        else:
            yield cell, figures
    if not missing:
        return
    if prepare is not None:
        prepare()
    with ProcessPoolExecutor(max_workers=workers or os.cpu_count(), initializer=prepare) as pool:
        made = {pool.submit(make, cell): cell for cell in missing}
        for future in as_completed(made):
            store.put(made[future], future.result())
            yield made[future], future.result()


def code_digest(sources: Iterable[str], *, excluded: Container[str] = ()) -> bytes:
    """Of the Python and JSON files of *sources*, relative to the repository, but for *excluded*."""
    digest = hashlib.blake2b(digest_size=16)
    for source in sources:
        path = ROOT / source
        for file in [path] if path.is_file() else sorted(path.rglob("*.*"), key=str):
            if file.suffix in {".py", ".json"} and file.name not in excluded:
                digest.update(str(file.relative_to(ROOT)).encode())
                digest.update(file.read_bytes())
    return digest.digest()
