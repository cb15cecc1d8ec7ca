"""Storage of figures, so that a long benchmark can be resumed."""

import ast
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

ROOT = Path(__file__).parents[2]

Figures = dict[str, Any]
Cell = TypeVar("Cell", bound=msgspec.Struct)
"""Type of the parameters of one measurement; equal cells and code give equal figures."""


class Store(Generic[Cell]):
    """
    Figures on disk, by cell and digest of the code that measured them.

    Args:
        directory: Folder with one file per cell.
        digest: Returns the digest of the code that a cell depends on.
    """

    def __init__(self, directory: Path, digest: Callable[[Cell], bytes]) -> None:
        self._directory = directory
        self._digest = digest

    def get(self, cell: Cell) -> Figures | None:
        """Return the stored figures of *cell*; None if the store has none."""
        file = self._file(cell)
        return msgspec.json.decode(file.read_bytes()) if file.exists() else None

    def num_held(self, cells: Iterable[Cell]) -> int:
        """Number of *cells* with stored figures."""
        return sum(self._file(cell).exists() for cell in set(cells))

    def put(self, cell: Cell, figures: Figures) -> None:
        """Store the figures of *cell*."""
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
    Yield the figures of each cell as soon as they are available.

    Args:
        cells: Cells in order of measurement; cells with stored figures are not measured.
        store: Store that provides known figures and receives new figures.
        make: Measures one cell, in a separate process.
        workers: Number of processes; None: one per core.
        prepare: Called in this process before any worker exists, and first in each worker.
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


def code_digest(modules: Iterable[str], *, data: Iterable[str] = ()) -> bytes:
    """
    Digest of *modules* and of all modules of this repository that they import, transitively.

    Args:
        modules: Dotted names, including modules that are only started as a process.
        data: Folders, relative to the repository, whose JSON files are part of the digest.
    """
    digest = hashlib.blake2b(digest_size=16)
    files = imported_files(modules)
    files |= {file for folder in data for file in (ROOT / folder).rglob("*.json")}
    for file in sorted(files):
        digest.update(str(file.relative_to(ROOT)).encode())
        digest.update(file.read_bytes())
    return digest.digest()


def imported_files(modules: Iterable[str]) -> set[Path]:
    """Files of *modules* and of all imports within this repository, transitively."""
    found: dict[str, Path | None] = {}
    left = list(modules)
    while left:
        module = left.pop()
        if module not in found:
            found[module] = file = _file_of(module)
            left += [] if file is None else _imports(file)
    return {file for file in found.values() if file is not None}


def _file_of(module: str) -> Path | None:
    """Source file of a module of this repository; None for other modules."""
    path = ROOT.joinpath(*module.split("."))
    files = (path.with_suffix(".py"), path / "__init__.py")
    return next((file for file in files if file.exists()), None)


def _imports(file: Path) -> list[str]:
    """Modules that *file* imports, and imported names that may be modules."""
    found: list[str] = []
    for node in ast.walk(ast.parse(file.read_bytes())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            found += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return found
