"""A mesh is upgraded under load: each process of the version before is replaced in turn."""

import asyncio
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from services.mesh.processes import ProcessMesh
from shared.contracts.requests import RequestCompleted
from shared.producer.producer import Producer
from tests.brokers import RabbitServer, eventually, rabbit_targets
from tests.e2e.meshes import LLAMA, mesh_spec, only_left, producer_of, request, steady_load
from tests.requirements import absent

pytestmark = [pytest.mark.rabbitmq, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[3]
BEFORE = "166299bde10566316658704a723d3ad9922b8b2d"
"""The first commit without the front `light`; earlier ones need packages that are not installed."""
NUM_REQUESTS = 60
"""Number of different requests, which the clients send again and again."""
CLIENTS = 12
LEAST = 600
"""Least number of requests that are answered in all."""
MAX_TOKENS = 40
PATIENCE_S = 240.0
BETWEEN_S = 2.0
KINDS = ("gateway", "estimator", "grouper", "leader", "agent")
"""Kinds of processes in the order of their replacement."""


@pytest.fixture(scope="module")
def code_before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The packages of the version before."""
    folder = tmp_path_factory.mktemp("before")
    archive = folder / "before.tar"
    done = subprocess.run(
        ["git", "archive", "--output", archive, BEFORE, "services", "shared", "solver"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        absent(f"this clone has no history: {done.stderr.strip()}", "history")
    with tarfile.open(archive) as content:
        content.extractall(folder, filter="data")
    return folder


async def replaced(mesh: ProcessMesh, producer: Producer) -> None:
    """
    Stop each process of the version before while requests are unanswered, and start one of this
    version in its place.
    """
    for kind in KINDS:
        for name, process in mesh.processes.items():
            if name.partition("-")[0] == kind:
                await asyncio.sleep(BETWEEN_S)
                await eventually(lambda: producer.num_outstanding > 0)
                await process.stop()
                process.code = None
                await process.start()


async def chat(client: httpx.AsyncClient, number: int) -> int:
    """
    Tokens of the answer to a chat; lost connections are tried again, as clients of OpenAI do.

    The gateway of the version before resets connections that it has not accepted when it ends.
    """
    body = {
        "model": LLAMA,
        "messages": [{"role": "user", "content": f"question {number}"}],
        "max_tokens": MAX_TOKENS,
        "ignore_eos": True,
    }
    while True:
        try:
            response = await client.post("/v1/chat/completions", json=body)
        except (httpx.NetworkError, httpx.RemoteProtocolError):
            await asyncio.sleep(0.2)
            continue
        if response.status_code == httpx.codes.SERVICE_UNAVAILABLE:
            await asyncio.sleep(0.2)
            continue
        response.raise_for_status()
        tokens: int = response.json()["usage"]["completion_tokens"]
        return tokens


async def chats(client: httpx.AsyncClient, upgrade: asyncio.Task[None]) -> list[int]:
    """Tokens of the answers to chats, one after the other until *upgrade* has ended."""
    tokens: list[int] = []
    while not upgrade.done():
        tokens.append(await chat(client, len(tokens)))
    return tokens


async def test_no_request_is_lost_while_every_process_is_replaced(
    rabbit_servers: Callable[[str], RabbitServer], code_before: Path, tmp_path: Path
) -> None:
    with rabbit_servers(rabbit_targets()[0]).fresh_url() as url:
        mesh = ProcessMesh(mesh_spec(url, tmp_path, groupers=2, leaders=2))
        for process in mesh.processes.values():
            process.code = code_before
        async with (
            mesh,
            producer_of(mesh) as producer,
            httpx.AsyncClient(base_url=mesh.spec.gateway_url, timeout=120.0) as client,
        ):
            bodies = [request(number, max_tokens=MAX_TOKENS) for number in range(NUM_REQUESTS)]
            async with (
                asyncio.timeout(PATIENCE_S),
                steady_load(producer, bodies, clients=CLIENTS) as answers,
            ):
                async with asyncio.TaskGroup() as tasks:
                    upgrade = tasks.create_task(replaced(mesh, producer), name="upgrade")
                    chatting = tasks.create_task(chats(client, upgrade), name="chats")
                # The last ones were sent to a mesh without a process of the version before.
                enough = max(LEAST, len(answers) + CLIENTS + 1)
                await eventually(lambda: len(answers) >= enough, within_s=PATIENCE_S)

            assert all(process.code is None for process in mesh.processes.values())
            assert set(chatting.result()) == {MAX_TOKENS}
            for number, answer in answers.items():
                assert isinstance(answer.final, RequestCompleted), answer.final
                assert len(answer.token_ids) == MAX_TOKENS
                if number % 2:
                    assert answer.streamed == answer.token_ids
            async with mesh.open_broker("headway-test") as broker:
                await only_left(broker, mesh, {})
