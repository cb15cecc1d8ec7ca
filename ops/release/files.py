"""Files of a release that are made from the checkout and its environment."""

import hashlib
import sys
from collections.abc import Iterable
from pathlib import Path

from ops.clients.packing import ROOT, run_builder, version
from shared.contracts.errors import SettingsError

UNRELEASED = "Unreleased"


def headway_wheel(out: Path) -> Path:
    """
    Build the wheel into the folder *out*; return its path.

    Raises:
        SettingsError: The build fails; the message has its output.
    """
    target = str(out.resolve())
    run_builder([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", target], ROOT)
    return out / f"headway-{version()}-py3-none-any.whl"


def bill_of_materials(out: Path) -> Path:
    """
    Write the bill of materials of this environment into the folder *out*; return its file.

    Raises:
        SettingsError: cyclonedx-py is not installed, or fails; the message has its output.
    """
    file = out.resolve() / f"headway-{version()}.cdx.json"
    run_builder(
        [
            *(sys.executable, "-m", "cyclonedx_py", "environment", sys.executable),
            *("--pyproject", str(ROOT / "pyproject.toml"), "--output-reproducible"),
            *("--output-format", "JSON", "--output-file", str(file)),
        ],
        ROOT,
    )
    return out / file.name


def notes(out: Path) -> Path:
    """
    Write the notes of the project's version into the folder *out*; return their file.

    Raises:
        SettingsError: The changelog has neither a section of the version nor an unreleased one.
    """
    file = out / f"notes-{version()}.md"
    file.write_text(section((ROOT / "CHANGELOG.md").read_text(), version()))
    return file


def section(changelog: str, of_version: str) -> str:
    """
    The section of a version; that of unreleased changes if the version has none yet.

    Raises:
        SettingsError: There is neither.
    """
    sections = {
        text.partition("]")[0].removeprefix("["): text for text in changelog.split("\n## ")[1:]
    }
    for name in (of_version, UNRELEASED):
        if name in sections:
            return f"## {sections[name].strip()}\n"
    raise SettingsError(f"CHANGELOG.md has no section [{of_version}] and no section [{UNRELEASED}]")


def write_sums(files: Iterable[Path], out: Path) -> Path:
    """Write the digests of *files* into the folder *out*; return their file."""
    lines = [f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in files]
    sums = out / "SHA256SUMS"
    sums.write_text("".join(lines))
    return sums
