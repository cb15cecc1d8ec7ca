"""The npm package against a mesh over RabbitMQ, and its types."""

import asyncio
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ops.clients.installed import node_with
from ops.clients.npm import build_npm
from services.mesh.processes import ProcessMesh
from tests.e2e.meshes import LLAMA
from tests.requirements import program

pytestmark = [
    pytest.mark.slow,
    pytest.mark.rabbitmq,
    pytest.mark.asyncio(loop_scope="module"),
]
HERE = Path(__file__).parent
COMPILERS = ("typescript@7.0.2",)


async def test_answers_errors_and_cancellations_are_those_of_the_mesh(
    mesh: ProcessMesh, node: Path
) -> None:
    script = shutil.copy(HERE / "javascript_calls.mjs", node)
    process = await asyncio.create_subprocess_exec(
        *("node", str(script), mesh.spec.broker, LLAMA),
        stdout=asyncio.subprocess.PIPE,
        stderr=sys.stderr,
    )
    async with asyncio.timeout(60.0):
        output, _ = await process.communicate()
    found = json.loads(output)

    assert found["streamed"] == found["tokens"]
    assert found["text"] == found["finalText"] != ""
    assert len(found["tokens"]) == 24
    assert None not in found["runs"]
    assert len(set(found["runs"])) == 1
    assert {name: found[name] for name in found if isinstance(found[name], str)} == {
        "text": found["finalText"],
        "finalText": found["finalText"],
        "cancelled": "RequestError cancelled",
        "unknown": "RequestError model_not_found",
        "duplicate": "HeadwayError duplicate_request",
        "status": "RequestError request_not_found",
        "state": "completed",
        "closed": "RequestError cancelled",
        "refused": "BrokerError broker_unavailable",
        "invalid": "BrokerError invalid_url",
    }


async def test_the_types_accept_a_program_and_refuse_its_errors(tmp_path: Path) -> None:
    program("npm", "npm")
    folder = node_with(build_npm(tmp_path / "dist"), tmp_path / "node", COMPILERS)
    shutil.copy(HERE / "typed_program.ts", folder)
    options = ("--noEmit", "--strict", "--module", "nodenext", "--target", "es2022")
    done = subprocess.run(
        (folder / "node_modules/.bin/tsc", *options, "typed_program.ts"),
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )

    assert (done.returncode, done.stdout) == (0, "")
