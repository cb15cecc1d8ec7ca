"""
Programs of another Debian release, unpacked into a folder and run with that release's libraries.

Nothing of the system is changed: apt works with lists and a cache of its own, packages are unpacked
and not installed, and a script in place of each program starts it with the unpacked C library. No
rights of an administrator are needed.
"""

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from shared.contracts.errors import SettingsError

ELF = b"\x7fELF"
_KEYS = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
"""Keys of all Debian releases, as the package debian-archive-keyring installs them."""
_TIMEOUT_S = 300.0


def unpack(suite: str, packages: tuple[str, ...], folder: Path) -> None:
    """
    Unpack the newest *packages* of a Debian suite into *folder*, without their documentation.

    Args:
        suite: Name of the release, e.g. `trixie`.
        packages: Names of packages; nothing else is unpacked, so they must have all libraries.
        folder: New folder with the packages' files, as `folder/usr/bin/...`.

    Raises:
        SettingsError: A program is missing, apt knows no Debian mirror, or it cannot be reached.
    """
    for program in ("apt-get", "dpkg-deb"):
        if shutil.which(program) is None:
            raise SettingsError(
                f"{program} is not installed: packages of Debian {suite} can be unpacked only on "
                "Debian and its derivatives"
            )
    apt = folder.with_name(f"{folder.name}.apt")
    try:
        options = _own_apt(suite, apt)
        _run("apt-get", *options, "update")
        archives = apt / "packages"
        archives.mkdir()
        _run("apt-get", *options, "download", *packages, cwd=archives)
        for archive in sorted(archives.glob("*.deb")):
            _run("dpkg-deb", "-x", str(archive), str(folder))
    finally:
        shutil.rmtree(apt, ignore_errors=True)
    for unneeded in ("usr/share/doc", "usr/share/man", "usr/share/locale", "etc", "var"):
        shutil.rmtree(folder / unneeded, ignore_errors=True)


def use_own_libraries(folder: Path, programs: Path, *, later: Path) -> None:
    """
    Replace each compiled program in *programs* by a script that starts it with the libraries of
    *folder*.

    Args:
        folder: Folder of `unpack`.
        programs: Folder in *folder* with programs.
        later: Path that *folder* will have when the programs are started.

    Raises:
        SettingsError: *folder* has no C library.
    """
    loader = next(iter(sorted(folder.glob("usr/lib/*/ld-linux-*.so.*"))), None)
    if loader is None:
        raise SettingsError(f"{folder} has no C library: add the package libc6")
    for program in sorted(programs.iterdir()):
        if program.is_symlink() or not program.is_file() or not _is_compiled(program):
            continue
        compiled = program.with_name(f"{program.name}.elf")
        program.rename(compiled)
        start, real = (later / path.relative_to(folder) for path in (loader, compiled))
        program.write_text(
            "#!/bin/sh\n"
            f'exec "{start}" --library-path "{start.parent}" --argv0 "$0" "{real}" "$@"\n'
        )
        program.chmod(0o755)


def _own_apt(suite: str, apt: Path) -> tuple[str, ...]:
    """Options for an apt that knows only *suite*, and writes only into the folder *apt*."""
    shutil.rmtree(apt, ignore_errors=True)
    for needed in ("state/lists/partial", "cache/archives/partial"):
        (apt / needed).mkdir(parents=True)
    (apt / "status").touch()
    own = {
        "Dir::State": apt / "state",
        "Dir::State::status": apt / "status",
        "Dir::Cache": apt / "cache",
        "Acquire::Languages": "none",
        # Without it, root's apt downloads as a user that may not write into the folder.
        "APT::Sandbox::User": "root",
    }
    signed = f" [signed-by={_KEYS}]" if _KEYS.exists() else ""
    (apt / "sources.list").write_text(f"deb{signed} {_mirror(_options(own))} {suite} main\n")
    sources = {"Dir::Etc::sourcelist": apt / "sources.list", "Dir::Etc::sourceparts": "/dev/null"}
    return _options(own | sources)


def _options(settings: Mapping[str, object]) -> tuple[str, ...]:
    return (
        "-qq",
        *(word for each in settings.items() for word in ("-o", "=".join(map(str, each)))),
    )


def _mirror(own: tuple[str, ...]) -> str:
    """
    URI of the Debian mirror that this machine uses.

    Args:
        own: Options for an apt that writes into a folder of its own.

    Raises:
        SettingsError: apt knows no Debian mirror.
    """
    known = _mirrors()
    if not known:  # the machine has no lists of packages, for example in a new container
        _run("apt-get", *own, "update")
        known = _mirrors(*own)
    if not known:
        raise SettingsError(
            "apt knows no Debian mirror: add one to /etc/apt/sources.list.d; other distributions "
            "have no packages of Debian"
        )
    return known[0]


def _mirrors(*options: str) -> list[str]:
    return _run(
        *("apt-get", *options, "indextargets", "--format", "$(REPO_URI)"),
        *("Created-By: Packages", "Origin: Debian", "Label: Debian", "Component: main"),
    ).split()


def _is_compiled(program: Path) -> bool:
    with program.open("rb") as file:
        return file.read(len(ELF)) == ELF


def _run(*command: str, cwd: Path | None = None) -> str:
    """
    Run a command; return its standard output.

    Raises:
        SettingsError: The command failed, or took over five minutes.
    """
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C"}
    try:
        done = subprocess.run(
            command,
            cwd=cwd,
            env=environment,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SettingsError(f"{command[0]}: {error}") from error
    if done.returncode != 0:
        raise SettingsError(f"{' '.join(command[-3:])}: {done.stderr.strip() or done.stdout}")
    return done.stdout
