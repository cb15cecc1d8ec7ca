"""Packages with entry points that are installed for one test."""

from collections.abc import Callable
from pathlib import Path

import pytest

Install = Callable[..., None]


def installer(folder: Path, patch: pytest.MonkeyPatch) -> Install:
    """
    A function that installs a package: `install(group, "name", "module:object", code)`.

    Each package has its own folder, on the path of this process while *patch* lasts.
    """
    installed: list[str] = []

    def install(group: str, name: str, value: str, code: str = "") -> None:
        package = f"package-{len(installed)}"
        installed.append(package)
        place = folder / package
        info = place / f"{package.replace('-', '_')}-1.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1\n")
        (info / "entry_points.txt").write_text(f"[{group}]\n{name} = {value}\n")
        module = value.partition(":")[0]
        if code:
            (place / f"{module}.py").write_text(code)
        patch.syspath_prepend(place)

    return install
