"""
Limits on tiny modules and on waits in tests: `python -m ops.rooms` checks them.

- At most `MAX_SLIVERS` modules of `SLIVER_LINES` lines or fewer have one importer in their folder.
- Every module is imported or started by a module that is not a test.
- Unit and property tests neither sleep nor poll wall time, except modules that are marked
  `virtual_time` or call `run_virtually`, and helpers that only these modules import.

`LATER` lists folders to which the limits do not apply until a planned rewrite.
"""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PRODUCT = ("ops", "services", "shared", "solver")
MAX_SLIVERS = 10
SLIVER_LINES = 45
WALL_TIME = frozenset({"asyncio.sleep", "time.sleep", "eventually"})
"""Calls that make a test wait for wall time; `asyncio.sleep(0)` is allowed, as it only yields."""
LATER = (
    "ops/bench",
    "ops/sim",
    "services/gateway",
    "solver/scheduling/*",
    "tests/unit/gateway",
    "tests/unit/ops/bench",
    "tests/unit/ops/sim",
    "tests/unit/solver/scheduling/*",
)
"""Folders to which the limits do not apply yet; `/*` is a folder without its sub-folders."""
_VIRTUAL = re.compile(r"^pytestmark = .*\bvirtual_time\b|\brun_virtually\(", re.MULTILINE)
_ENTRIES = re.compile(r"(?:ops|services|shared|solver)(?:\.\w+)+")

Modules = Mapping[str, Path]


def modules(root: Path = ROOT) -> Modules:
    """Every module of the product and of the tests by its dotted name."""
    found: dict[str, Path] = {}
    for top in (*PRODUCT, "tests"):
        for path in sorted((root / top).rglob("*.py")):
            name = ".".join(path.relative_to(root).with_suffix("").parts)
            found[name.removesuffix(".__init__")] = path
    return found


def importers(known: Modules) -> Mapping[str, set[str]]:
    """Module -> modules that import it, or that name it in a string (for example a class path)."""
    found: defaultdict[str, set[str]] = defaultdict(set)
    for name, path in known.items():
        for node in ast.walk(ast.parse(path.read_text())):
            for used in _names_in(node):
                parts = used.split(".")
                ends = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
                if (module := next((each for each in ends if each in known), name)) != name:
                    found[module].add(name)
    return found


def _names_in(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
        yield from (f"{node.module}.{alias.name}" for alias in node.names)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield from _ENTRIES.findall(node.value)


def is_later(path: Path, root: Path = ROOT) -> bool:
    """True if *path* is in a folder to which the limits do not apply until a later rewrite."""
    folder = path.relative_to(root).parent.as_posix()
    return any(
        folder == place.removesuffix("/*")
        if place.endswith("/*")
        else f"{folder}/".startswith(f"{place}/")
        for place in LATER
    )


def slivers(known: Modules, used_by: Mapping[str, set[str]]) -> list[str]:
    """Short modules with exactly one importer in their folder."""
    found = []
    for name, path in known.items():
        if name.startswith("tests.") or path.name in ("__init__.py", "__main__.py"):
            continue
        lines = len(path.read_text().splitlines())
        beside = [each for each in used_by.get(name, ()) if known[each].parent == path.parent]
        if lines <= SLIVER_LINES and len(beside) == 1 and not is_later(path):
            found.append(f"{path.relative_to(ROOT)}: {lines} lines, imported by {beside[0]} alone")
    return found


def unreached(known: Modules, used_by: Mapping[str, set[str]]) -> list[str]:
    """Modules that only tests import and that are not programs."""
    return [
        f"{path.relative_to(ROOT)}: imported by tests only"
        for name, path in known.items()
        if not name.startswith("tests.")
        and path.name not in ("__init__.py", "__main__.py")
        and "__main__" not in path.read_text()
        and all(each.startswith("tests.") for each in used_by.get(name, ()))
        and not is_later(path)
    ]


def in_virtual_time(name: str, known: Modules, used_by: Mapping[str, set[str]]) -> bool:
    """True if module *name* runs in virtual time only."""
    if known[name].name.startswith("test_"):
        return bool(_VIRTUAL.search(known[name].read_text()))
    users = used_by.get(name, set())
    return bool(users) and all(in_virtual_time(each, known, used_by) for each in users)


def waits(known: Modules, used_by: Mapping[str, set[str]]) -> list[str]:
    """Calls in unit and property tests that wait for wall time."""
    found = []
    for name, path in known.items():
        if not name.startswith(("tests.unit.", "tests.properties.")) or is_later(path):
            continue
        if in_virtual_time(name, known, used_by):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or ast.unparse(node.func) not in WALL_TIME:
                continue
            if node.args and ast.unparse(node.args[0]) == "0":
                continue
            found.append(f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)[:60]}")
    return found


def main() -> int:
    """Print each violation of a limit; return 1 if there are any."""
    known = modules()
    used_by = importers(known)
    few = slivers(known, used_by)
    found = [*unreached(known, used_by), *waits(known, used_by)]
    if len(few) > MAX_SLIVERS:
        found += few
    for each in found:
        print(each)
    print(
        f"rooms: {len(found)} violations, {len(few)} short modules with one importer "
        f"(at most {MAX_SLIVERS})"
    )
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
