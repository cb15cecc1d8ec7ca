"""The wheel of the client has one import name, and needs aio-pika and msgspec only."""

import ast
import os
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from ops.clients import wheel
from ops.clients.packing import version
from tests.unit.ops.deployment import pyproject

ALLOWED = {"aio_pika", "aiormq", "pamqp", "msgspec", wheel.PACKAGE, *sys.stdlib_module_names}
"""aiormq and pamqp are what aio-pika consists of."""


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tree")
    wheel.write_tree(folder)
    return folder


def test_imports_are_of_the_standard_library_and_the_two_dependencies(tree: Path):
    used: set[str] = set()
    for path in (tree / wheel.PACKAGE).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                used |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0
                used.add(str(node.module).partition(".")[0])

    assert used - ALLOWED == set()
    assert {"aio_pika", "msgspec"} <= used


def test_only_the_package_is_written_beside_the_build_file(tree: Path):
    assert sorted(path.name for path in tree.iterdir()) == [
        "LICENSE",
        "README.md",
        wheel.PACKAGE,
        "pyproject.toml",
    ]
    assert (tree / wheel.PACKAGE / "py.typed").exists()


def test_names_of_this_repository_are_renamed():
    source = (
        "from shared.client.client import connect\nfrom shared.broker import topology\n"
        '"""See `shared.client`; it is shared. x_shared.y"""\n'
    )

    assert wheel.renamed(source) == (
        "from headway_client.client import connect\n"
        "from headway_client._shared.broker import topology\n"
        '"""See `headway_client`; it is shared. x_shared.y"""\n'
    )


def test_dependencies_are_those_of_the_project():
    project = tomllib.loads((wheel.HERE / "pyproject.toml").read_text())["project"]

    assert set(project["dependencies"]) <= set(pyproject()["project"]["dependencies"])
    assert len(project["dependencies"]) == 2


def test_import_loads_nothing_else(tree: Path):
    code = """
import sys
before = set(sys.modules)
import headway_client
tops = {name.partition(".")[0] for name in sys.modules} & {
    "shared", "services", "structlog", "numpy", "pydantic", "cachetools", "prometheus_client"
}
assert not tops, tops
print(headway_client.__file__)
"""
    environment = os.environ | {"PYTHONPATH": str(tree)}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        cwd=tree,
        capture_output=True,
        text=True,
        check=False,
    )

    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(str(tree))


def test_the_wheel_has_the_version_of_the_project(tmp_path: Path):
    built = wheel.build_wheel(tmp_path)

    assert built.name == f"headway_client-{version()}-py3-none-any.whl"
    with zipfile.ZipFile(built) as archive:
        tops = {name.partition("/")[0] for name in archive.namelist()}
        public = archive.read("headway_client/__init__.py").decode()
    assert tops == {"headway_client", f"headway_client-{version()}.dist-info"}
    assert '"connect"' in public
