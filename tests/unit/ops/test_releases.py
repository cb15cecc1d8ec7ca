"""RabbitMQ of another Debian release runs with that release's libraries, from a folder."""

from pathlib import Path

import pytest

from ops import debian
from ops.releases import Release
from shared.contracts.errors import SettingsError

LOADER = "usr/lib/any-linux-gnu/ld-linux-any.so.2"


def folder_with(directory: Path, *files: str) -> Path:
    folder = directory / "new"
    for name in files:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(debian.ELF if name.startswith("bin/compiled") else b"#!/bin/sh\n")
    return folder


def test_compiled_programs_start_with_the_libraries_of_their_later_folder(tmp_path: Path):
    folder = folder_with(tmp_path, LOADER, "bin/compiled", "bin/script")
    later = tmp_path / "later"
    debian.use_own_libraries(folder, folder / "bin", later=later)

    started = (folder / "bin/compiled").read_text()
    assert f'exec "{later / LOADER}"' in started
    assert f'"{later}/bin/compiled.elf" "$@"' in started
    assert (folder / "bin/compiled.elf").read_bytes() == debian.ELF
    assert (folder / "bin/script").read_bytes() == b"#!/bin/sh\n"


def test_folder_without_a_c_library_is_refused(tmp_path: Path):
    folder = folder_with(tmp_path, "bin/compiled")
    with pytest.raises(SettingsError, match="libc6"):
        debian.use_own_libraries(folder, folder / "bin", later=tmp_path)


def test_error_on_a_machine_without_apt_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SettingsError, match="apt-get is not installed"):
        debian.unpack("trixie", ("rabbitmq-server",), tmp_path / "folder")


def test_programs_of_a_release_precede_those_of_the_path(tmp_path: Path):
    (tmp_path / "sh").touch()
    assert Release(tmp_path).program("sh") == str(tmp_path / "sh")
    assert Release(tmp_path).program("ls") not in (None, str(tmp_path / "ls"))
    assert Release(None, tmp_path).path == (str(tmp_path),)
