"""Profiles of the compose archive with engines that are not simulated."""

import asyncio
import statistics
import time
from pathlib import Path

import pytest

from ops.clients.packing import version
from ops.release.images import build_images, image_name
from shared.models.tiny import make_tiny_models
from tests.e2e.containers.stack import MODEL, Stack, image_bytes, require_engine
from tests.requirements import absent

pytestmark = pytest.mark.slow

SIMULATED = ("gateway", "planner", "estimator", "agent")
CPU_AGENT = "agent-vllm-cpu"
FIRST_TOKEN_S = 90.0


@pytest.fixture(scope="module", autouse=True)
def images() -> None:
    require_engine()
    build_images(SIMULATED, print)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Directory of a model that the user of the containers may read."""
    make_tiny_models(tmp_path / "models")
    directory = tmp_path / "models" / MODEL
    for each in (*directory.iterdir(), directory, directory.parent, tmp_path):
        each.chmod(0o755)
    return directory


async def test_a_model_of_a_directory_answers_on_the_cpu(tmp_path: Path, model: Path):
    image = f"{image_name(CPU_AGENT)}:{version()}"
    if image_bytes(image) is None:
        absent(f"the image {image} is missing: `make release` builds it", "docker-vllm")
    build_images((CPU_AGENT,), print)
    variables = {"COMPOSE_PROFILES": "vllm", "HEADWAY_MODEL": str(model)}
    stack = Stack(tmp_path, variables)
    times = []
    try:
        for _ in range(3):
            began = time.monotonic()
            await stack.run("up", "--detach")
            over_http, over_amqp = await stack.first_tokens()
            times.append((over_http - began, over_amqp - began))
            agents = [name for name in stack.inspected() if name.startswith("agent")]
            stack.close()
            print(f"first token: HTTP after {times[-1][0]:.1f} s, AMQP after {times[-1][1]:.1f} s")
            assert agents == ["agent-vllm-1"]
    finally:
        stack.close()

    assert statistics.median(over_http for over_http, _ in times) <= FIRST_TOKEN_S


async def test_a_model_that_cannot_be_read_is_named_in_the_log(tmp_path: Path):
    variables = {"COMPOSE_PROFILES": "attach", "HEADWAY_ATTACH": "http://127.0.0.1:9"}
    stack = Stack(tmp_path, variables)
    try:
        with pytest.raises(AssertionError, match='"models-attach" didn\'t complete successfully'):
            await stack.run("up", "--detach")
        log = await stack.run("logs", "models-attach")
    finally:
        stack.close()

    assert "lists none as models" in log


async def test_a_server_that_runs_already_is_attached(tmp_path: Path):
    (tmp_path / "served").mkdir()
    served = Stack(tmp_path / "served")
    variables = {"COMPOSE_PROFILES": "attach", "HEADWAY_ATTACH": f"{MODEL}=http://served:8000"}
    stack = Stack(tmp_path, variables)
    try:
        await asyncio.gather(
            served.run("up", "--detach", "--wait"), stack.run("up", "--detach", "rabbitmq")
        )
        stack.join(served, "gateway", "served")
        await stack.run("up", "--detach")
        await stack.first_tokens()
        agents = [name for name in stack.inspected() if name.startswith("agent")]
    finally:
        stack.leave(served, "gateway")
        served.close()
        stack.close()

    assert agents == ["agent-attached-1"]
