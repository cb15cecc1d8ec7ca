"""The commands of every guide work in order, from an empty folder to the result."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Callable
from pathlib import Path

import pytest

from ops.ports import free_ports
from tests.brokers import RabbitServer, eventually, rabbit_targets
from tests.e2e.guides.guide_blocks import NAMES, commands_of, page_of, write_files
from tests.requirements import absent

pytestmark = [pytest.mark.rabbitmq, pytest.mark.slow]

PORTS = ("8000", "8101", "8102", "8103")
"""Ports of the guides; the test takes free ones instead."""
LIMIT_S = 1500.0
WITH_VLLM = {"in-front-of-vllm"}
INSTALLED = {"from-litellm": "litellm[proxy]==1.108.7", "from-celery": "celery==5.7.0"}
"""Guide -> what it installs from a package index."""


def guide(name: str) -> object:
    marks = [pytest.mark.vllm] if name in WITH_VLLM else []
    return pytest.param(name, id=name, marks=marks)


def prepared(page: str, folder: Path) -> str:
    """
    The commands of a guide as one script; its files are written into *folder*, and its ports
    replaced by free ones.
    """
    for port, free in zip(PORTS, free_ports(len(PORTS)), strict=True):
        page = page.replace(port, str(free))
    write_files(page, folder)
    return commands_of(page)


def require_index(package: str) -> None:
    """Skip the test, or fail it on request, if no package index has *package*."""
    resolving = (
        str(Path(sys.executable).parent / "uv"),
        "pip",
        "compile",
        "--quiet",
        "--no-deps",
        "-",
    )
    try:
        subprocess.run(resolving, input=package.encode(), capture_output=True, check=True)
    except FileNotFoundError:
        absent("uv is not installed", "package-index")
    except subprocess.CalledProcessError as error:
        reason = error.stderr.decode(errors="replace").strip()
        absent(f"no package index has {package}: {reason}", "package-index")


def pip_of(folder: Path) -> tuple[Path, Path]:
    """
    A folder with a program `pip`, and the folder into which it installs packages.

    The environment of the tests stays as it is: this `pip` changes an environment that only adds
    packages to it. It builds packages without the network.
    """
    added, programs = folder / "added", folder / "programs"
    venv.create(added, with_pip=False)
    installed = Path(sysconfig.get_path("purelib", vars={"base": str(added)}))
    (installed / "tests.pth").write_text(sysconfig.get_path("purelib"))
    programs.mkdir()
    (programs / "pip").write_text(
        '#!/bin/sh\n[ "$1" = install ] && set -- "$@" --no-build-isolation\n'
        f'exec {sys.executable} -m pip --python {added}/bin/python "$@"\n'
    )
    (programs / "pip").chmod(0o755)
    return programs, installed


async def run(script: str, folder: Path, broker: str) -> tuple[int, str]:
    """Exit code and output of a script; what it leaves in the background is ended."""
    programs, installed = pip_of(folder)
    paths = (programs, Path(sys.executable).parent, os.environ["PATH"])
    own = {"PATH": os.pathsep.join(map(str, paths)), "HEADWAY_AMQP_URL": broker}
    own["PYTHONPATH"] = os.pathsep.join((str(installed), os.environ.get("PYTHONPATH", "")))
    own["VLLM_NO_USAGE_STATS"] = "1"  # tests send no statistics
    log = folder / "guide.log"
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *("bash", "-xeuo", "pipefail", "-c", script),
            cwd=folder,
            env=os.environ | own,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        code = await asyncio.wait_for(process.wait(), LIMIT_S)
    finally:
        with contextlib.suppress(ProcessLookupError):  # nothing is in the background
            os.killpg(process.pid, signal.SIGTERM)
    await eventually(lambda: not _has_processes(process.pid))
    return code, log.read_text(errors="replace")


def _has_processes(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("name", [guide(name) for name in NAMES])
async def test_a_guide_leads_to_its_result(
    name: str, rabbit_servers: Callable[[str], RabbitServer], tmp_path: Path
) -> None:
    if name in INSTALLED:
        require_index(INSTALLED[name])
    script = prepared(page_of(name), tmp_path)
    assert script
    with rabbit_servers(rabbit_targets()[0]).fresh_url() as url:
        code, output = await run(script, tmp_path, url)
    assert code == 0, output[-4000:]
