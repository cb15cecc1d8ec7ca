"""
The wheel `headway-client`: the modules that `shared.client` imports, under one import name.

`shared.client` is `headway_client` in the wheel, and the other modules of `shared` are in the
private package `headway_client._shared`. Only wheels can rename packages; an editable install
cannot.
"""

import ast
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ops.clients.packing import ROOT, run_builder, version

SOURCE = "shared"
ENTRY = "shared.client"
PACKAGE = "headway_client"
PRIVATE = f"{PACKAGE}._shared"
HERE = Path(__file__).parent / "python"
_NAMES = re.compile(rf"\b{SOURCE}\.(?=[a-z_])")


def build_wheel(out: Path) -> Path:
    """
    Build the wheel into the folder *out*; return its path.

    Raises:
        SettingsError: The build fails; the message has its output.
    """
    with tempfile.TemporaryDirectory() as directory:
        tree = Path(directory)
        write_tree(tree)
        target = str(out.resolve())
        run_builder([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", target], tree)
    return next(out.glob(f"{PACKAGE}-{version()}-*.whl"))


def write_tree(tree: Path) -> None:
    """Write the sources of the wheel, with its build file, into the folder *tree*."""
    shutil.copytree(HERE, tree, dirs_exist_ok=True)
    shutil.copy(ROOT / "LICENSE", tree)
    for module, path in closure(ENTRY).items():
        target = tree / _place(module, path)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(renamed(path.read_text()))
    (tree / PACKAGE / "_version.py").write_text(f'__version__ = "{version()}"\n')
    shutil.copy(ROOT / SOURCE / "py.typed", tree / PACKAGE)


def closure(entry: str) -> dict[str, Path]:
    """Modules of `shared` that module *entry* imports, directly or not, with their packages."""
    found: dict[str, Path] = {}
    todo = [entry]
    while todo:
        module = todo.pop()
        if module in found or (path := _file(module)) is None:
            continue
        found[module] = path
        todo += imports(path)
        todo.append(module.rpartition(".")[0])
    return found


def imports(path: Path) -> Iterator[str]:
    """Names in the imports of a file that may be modules."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def renamed(source: str) -> str:
    """*source* with the module names of the wheel."""
    public = re.sub(rf"\b{re.escape(ENTRY)}\b", PACKAGE, source)
    return _NAMES.sub(f"{PRIVATE}.", public)


def _file(module: str) -> Path | None:
    """File of a module of `shared`; None if there is no such module."""
    if module.partition(".")[0] != SOURCE:
        return None
    place = ROOT.joinpath(*module.split("."))
    files = (place / "__init__.py", place.with_suffix(".py"))
    return next((file for file in files if file.is_file()), None)


def _place(module: str, path: Path) -> Path:
    """Path in the wheel of a module."""
    name = renamed(f"{module}.").removesuffix(".") if module != SOURCE else PRIVATE
    parts = name.split(".")
    if path.name == "__init__.py":
        return Path(*parts, path.name)
    return Path(*parts[:-1], path.name)
