"""The programs of the page about clients run with nothing but the built package."""

import asyncio
import os
import re
import sys
from pathlib import Path

import pytest

from ops.clients.packing import ROOT
from services.mesh.processes import ProcessMesh
from shared.runtime.settings import DEFAULT_AMQP_URL

pytestmark = [
    pytest.mark.slow,
    pytest.mark.rabbitmq,
    pytest.mark.asyncio(loop_scope="module"),
]
PAGE = ROOT / "ops/docs/clients.md"
NUM_LINES = 12


def programs() -> list[str]:
    """Blocks of code of the page's section `Programs`."""
    section = PAGE.read_text().split("\n## ")[1]
    assert section.startswith("Programs")
    return re.findall(r"```python\n(.*?)```", section, re.DOTALL)


async def run(python: Path, program: str, mesh: ProcessMesh, folder: Path) -> str:
    """Output of a program of the page, on the mesh's broker."""
    assert "amqp://guest:guest@127.0.0.1:5672/" in program
    name = folder / "program.py"
    name.write_text(program.replace("amqp://guest:guest@127.0.0.1:5672/", mesh.spec.broker))
    process = await asyncio.create_subprocess_exec(
        *(str(python), "-I", str(name)),
        cwd=folder,
        env={"PATH": os.environ["PATH"], "HOME": str(folder)},
        stdout=asyncio.subprocess.PIPE,
        stderr=sys.stderr,
    )
    async with asyncio.timeout(60.0):
        output, _ = await process.communicate()
    assert process.returncode == 0
    return output.decode()


async def test_the_programs_are_short_and_name_the_default_broker() -> None:
    found = programs()

    assert len(found) == 2
    assert max(len(re.findall(r"^.+$", program, re.MULTILINE)) for program in found) <= NUM_LINES
    assert all(DEFAULT_AMQP_URL in program for program in found)


async def test_the_asyncio_program_streams(mesh: ProcessMesh, python: Path, tmp_path: Path) -> None:
    output = await run(python, programs()[0], mesh, tmp_path)

    assert "Usage(prompt_tokens=" in output
    # Sampled answers may end before their limit.
    assert re.search(r"completion_tokens=[1-8]\b", output)


async def test_the_program_without_asyncio_waits(
    mesh: ProcessMesh, python: Path, tmp_path: Path
) -> None:
    output = await run(python, programs()[1], mesh, tmp_path)

    assert output.count("\n") >= 2
