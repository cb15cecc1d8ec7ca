"""The examples for Celery and FastStream run against a mesh."""

import asyncio
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from ops.clients.installed import python_with
from ops.clients.packing import ROOT
from services.mesh.processes import ProcessMesh

pytestmark = [
    pytest.mark.slow,
    pytest.mark.rabbitmq,
    pytest.mark.asyncio(loop_scope="module"),
]
EXAMPLES = ROOT / "ops/examples"
FRAMEWORKS = ("celery==5.7.0", "faststream[rabbit,cli]==0.7.8")
ASK = """
from celery_task import app, ask

answers = [ask.delay(prompt) for prompt in ("hello", "good morning")]
print([len(answer.get(timeout=60)) > 0 for answer in answers])
app.control.shutdown()
"""


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Interpreter with the wheel and both frameworks."""
    return python_with(wheel, tmp_path_factory.mktemp("python") / "venv", *FRAMEWORKS)


async def started(
    command: Sequence[str | Path], mesh: ProcessMesh, **variables: str
) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *map(str, command),
        cwd=EXAMPLES,
        env=os.environ | {"HEADWAY_AMQP_URL": mesh.spec.broker} | variables,
        stdout=asyncio.subprocess.PIPE,
        stderr=sys.stderr,
    )


async def test_a_celery_task_asks_and_waits(mesh: ProcessMesh, python: Path) -> None:
    celery = (python, "-m", "celery", "--app", "celery_task")
    worker = await started((*celery, "worker", "--concurrency", "2", "--pool", "prefork"), mesh)
    asking = await started((python, "-c", ASK), mesh)
    async with asyncio.timeout(90.0):
        output, _ = await asking.communicate()
        await worker.communicate()

    assert output.decode().splitlines()[-1] == "[True, True]"
    assert (asking.returncode, worker.returncode) == (0, 0)


async def test_a_faststream_app_publishes_and_gets_the_finals(
    mesh: ProcessMesh, python: Path
) -> None:
    prompts = "hello,good morning,good night"
    app = await started(
        (python.parent / "faststream", "run", "faststream_app:app"),
        mesh,
        PROMPTS=prompts,
        PYTHONUNBUFFERED="1",
    )
    assert app.stdout is not None
    finals: dict[str, str] = {}
    try:
        async with asyncio.timeout(60.0):
            while len(finals) < 3:
                line = await app.stdout.readline()
                assert line, "the app has ended"
                request_id, _, text = line.decode().strip().partition(" ")
                if len(request_id) == 32:
                    finals[request_id] = text
    finally:
        app.terminate()
        await app.communicate()

    assert all(finals.values()), finals
