"""RabbitMQ releases whose private nodes this machine can run."""

import shutil
from dataclasses import dataclass
from pathlib import Path

from ops import debian
from shared.contracts.errors import SettingsError

_DEBIAN_BIN = Path("/usr/lib/rabbitmq/bin")
"""
RabbitMQ's programs; Debian's wrappers in /usr/sbin change the user and drop the environment.
"""
FOUR = Path(__file__).resolve().parents[1] / ".headway" / "rabbitmq-4"
"""Folder of RabbitMQ 4; `make clean` deletes it."""
_SUITE = "trixie"
_ERLANG = ("asn1", "base", "crypto", "eldap", "inets", "mnesia", "os-mon", "parsetools")
_ERLANG_TOO = ("public-key", "runtime-tools", "ssl", "syntax-tools", "tools", "xmerl")
_LIBRARIES = (
    *("libc6", "libcap2", "libgcc-s1", "libncursesw6", "libssl3t64", "libstdc++6"),
    *("libsystemd0", "libtinfo6", "libzstd1", "zlib1g"),
)
_PACKAGES = (
    "rabbitmq-server",
    *(f"erlang-{part}" for part in (*_ERLANG, *_ERLANG_TOO)),
    *_LIBRARIES,
)


@dataclass(frozen=True, slots=True)
class Release:
    """An installed RabbitMQ."""

    programs: Path | None = None
    """Folder of RabbitMQ's programs; None: they are on the path."""
    erlang: Path | None = None
    """Folder of Erlang's programs; None: they are on the path."""

    def program(self, name: str) -> str | None:
        """Path of one of its programs; None if it is not installed."""
        for folder in (self.programs, self.erlang):
            if folder is not None and (folder / name).exists():
                return str(folder / name)
        return shutil.which(name)

    @property
    def path(self) -> tuple[str, ...]:
        """Folders that precede those of the variable PATH."""
        return () if self.erlang is None else (str(self.erlang),)


SYSTEM = Release(programs=_DEBIAN_BIN if _DEBIAN_BIN.exists() else None)
"""The RabbitMQ that the system has."""


def four() -> Release | None:
    """RabbitMQ 4 of `install_four`; None if it is not installed."""
    return _in(FOUR) if FOUR.is_dir() else None


def install_four() -> Release:
    """
    Unpack RabbitMQ 4 and its Erlang into `FOUR`, unless they are there: 45 MB are downloaded.

    Raises:
        SettingsError: They cannot be downloaded, or do not run here; the message says why.
    """
    if (known := four()) is not None:
        return known
    if " " in str(FOUR):
        raise SettingsError(f"RabbitMQ cannot start from a path with spaces: {FOUR}")
    folder = FOUR.with_name(f"{FOUR.name}.new")
    shutil.rmtree(folder, ignore_errors=True)
    try:
        debian.unpack(_SUITE, _PACKAGES, folder)
        _give_paths(folder, later=FOUR)
        folder.rename(FOUR)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return _in(FOUR)


def _in(folder: Path) -> Release:
    return Release(folder / "usr/lib/rabbitmq/bin", folder / "usr/lib/erlang/bin")


def _give_paths(folder: Path, *, later: Path) -> None:
    """Give the programs in *folder* the paths that they have when *folder* is *later*."""
    erlang = folder / "usr/lib/erlang"
    root = later / erlang.relative_to(folder)
    for programs in erlang.glob("**/bin"):
        debian.use_own_libraries(folder, programs, later=later)
    for script in (erlang / "bin/erl", *erlang.glob("erts-*/bin/erl")):
        text = script.read_text()
        script.write_text(text.replace("ROOTDIR=/usr/lib/erlang", f'ROOTDIR="{root}"'))
