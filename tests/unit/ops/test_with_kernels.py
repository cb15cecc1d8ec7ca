"""The entrypoint of images with compiled kernels."""

import subprocess
from pathlib import Path

import pytest

from tests.unit.ops.deployment import ROOT

SCRIPT = ROOT / "ops" / "docker" / "with-kernels"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Home with a kernel of the image."""
    kernels = tmp_path / "home" / ".cache" / "numba" / "search"
    kernels.mkdir(parents=True)
    (kernels / "kernel.nbi").write_text("of the image")
    return tmp_path / "home"


def run(home: Path, cache: Path, *command: str) -> str:
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(home), "NUMBA_CACHE_DIR": str(cache)}
    done = subprocess.run(
        [SCRIPT, *command], env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout


def test_the_command_finds_the_kernels_of_the_image_where_it_may_write(home: Path, tmp_path: Path):
    cache = tmp_path / "tmp" / "numba"

    assert run(home, cache, "cat", str(cache / "search" / "kernel.nbi")) == "of the image"


def test_kernels_that_are_there_are_kept(home: Path, tmp_path: Path):
    cache = tmp_path / "numba"
    cache.mkdir()

    assert run(home, cache, "ls", str(cache)) == ""


def test_a_command_runs_without_kernels_of_the_image(tmp_path: Path):
    assert run(tmp_path, tmp_path / "numba", "echo", "a", "b c") == "a b c\n"
