"""
Every container of the rendered manifests runs as a process with exactly its command and variables,
becomes ready, serves, and ends within its grace period.
"""

import hashlib
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import aiohttp
import openai
import pytest

from ops.bench.postgres import PrivatePostgres
from ops.broker import PrivateNode
from services.agent.backends.vllm.front.process import vllm_unavailable_reason
from shared.models.tiny import make_tiny_models
from tests.agents.openai_server import OpenAiServer
from tests.brokers import release_of
from tests.e2e.kustomize.kubelet import LocalPod, Machine, running
from tests.requirements import absent
from tests.unit.ops.deployment import ROOT
from tests.unit.ops.kustomize.broker_configuration import SINGLE
from tests.unit.ops.kustomize.manifests import DATABASE, OWN, Manifests, deployable, kubectl, render

pytestmark = [pytest.mark.slow, pytest.mark.rabbitmq]
BROKER = "headway-rabbitmq:5672"
SERVERS = "http://chat.models.svc.cluster.local:8000"
ANSWER_S = 120.0


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The manifests with new credentials, and the API key."""
    kubectl()
    return deployable(tmp_path_factory.mktemp("kustomize"))


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """
    Home directory of all images, with the kernels that this checkout has compiled; the leader's
    init container compiles the others.
    """
    home = tmp_path_factory.mktemp("home")
    for kernel in (ROOT / "solver").rglob("__pycache__/*.nb[ci]"):
        source = str(kernel.parents[1])
        # The name of numba's folder for a folder of sources.
        name = f"{Path(source).name}_{hashlib.sha1(source.encode()).hexdigest()}"
        folder = home / ".cache" / "numba" / name
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy2(kernel, folder)
    return home


@pytest.fixture
def one_node(tree: tuple[Path, str]) -> Manifests:
    return render(tree[0] / "overlays" / "one-node")


@pytest.fixture(scope="module")
def broker(
    tree: tuple[Path, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[PrivateNode]:
    """A broker that has loaded the definitions of the rendered secret with its configuration."""
    definitions = tree[0] / "credentials" / "secrets" / "definitions.json"
    settings = SINGLE | {"load_definitions": str(definitions)}
    directory = tmp_path_factory.mktemp("broker")
    node = PrivateNode(directory, release=release_of("system"), settings=settings)
    node.start()
    yield node
    node.close()


@pytest.fixture
def machine(one_node: Manifests, broker: PrivateNode, home: Path) -> Iterator[Machine]:
    """A machine that runs the overlay `one-node`; tests replace the manifests."""
    # The names of vLLM's sockets below a volume of a pod may have at most 107 characters.
    with TemporaryDirectory(prefix="pods-", dir="/tmp") as directory:
        yield Machine(
            manifests=one_node,
            directory=Path(directory),
            home=home,
            addresses={BROKER: f"127.0.0.1:{broker.port}"},
        )


def client_of(pods: dict[str, LocalPod], key: str) -> openai.AsyncOpenAI:
    """A client of the port to which the Service of the gateways leads."""
    return openai.AsyncOpenAI(
        base_url=f"http://127.0.0.1:{pods['headway-gateway'].port('http')}/v1",
        api_key=key,
        max_retries=0,
        timeout=ANSWER_S,
    )


async def ask(client: openai.AsyncOpenAI, model: str, **fields: Any) -> str:
    answer = await client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "hello"}],
        max_tokens=6,
        temperature=0,
        **fields,
    )
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 6
    return answer.choices[0].message.content or ""


async def metrics_of(pod: LocalPod) -> str:
    url = f"http://127.0.0.1:{pod.port('health')}/metrics"
    async with aiohttp.ClientSession() as session, session.get(url) as response:
        return await response.text()


async def test_one_node_serves_with_a_key_and_ends_in_time(
    machine: Machine, tree: tuple[Path, str]
):
    image = sorted(machine.home.rglob("*"))
    async with running(machine) as pods:
        async with client_of(pods, "wrong") as stranger:
            with pytest.raises(openai.AuthenticationError):
                await stranger.models.list()
        async with client_of(pods, tree[1]) as client:
            names = [model.id async for model in client.models.list()]
            for name in names:
                await ask(client, name, extra_body={"ignore_eos": True})
            stored = await client.files.create(file=("a.jsonl", b"{}\n"), purpose="user_data")

        assert names == ["tiny-llama", "tiny-llama-b", "tiny-qwen"]
        assert stored.bytes == 3
        assert "headway_planner_leader_active 1.0" in await metrics_of(pods["headway-leader"])
    # The file system of an image is read only.
    assert sorted(machine.home.rglob("*")) == image


async def test_servers_of_a_service_are_attached(machine: Machine, tree: tuple[Path, str]):
    manifests = render(tree[0] / "overlays" / "attach")
    async with OpenAiServer(model="chat").serving() as url:
        addresses = {**machine.addresses, SERVERS: url}
        machine = replace(machine, manifests=manifests, addresses=addresses)
        async with running(machine) as pods, client_of(pods, tree[1]) as client:
            content = await ask(client, "chat")

            assert content.startswith(" w")


@pytest.mark.vllm
async def test_the_example_of_the_page_serves_with_vllm_and_postgresql(
    machine: Machine,
    tree: tuple[Path, str],
    postgres: PrivatePostgres,
    tmp_path: Path,
):
    if (reason := vllm_unavailable_reason()) is not None:
        absent(reason, "vllm")
    manifests = render(tree[0] / "overlays" / OWN)
    name = await postgres.create()
    there = DATABASE.removeprefix("postgresql://")
    here = postgres.url(name).removeprefix("postgresql://")
    machine = replace(machine, manifests=manifests, addresses={**machine.addresses, there: here})
    make_tiny_models(machine.claim("headway-models"), weights=True)
    async with running(machine) as pods, client_of(pods, tree[1]) as client:
        await ask(client, "tiny-llama", extra_body={"ignore_eos": True})
        stored = await client.files.create(file=("a.jsonl", b"{}\n"), purpose="user_data")

        assert stored.bytes == 3
        assert list(machine.claim("headway-files").rglob(f"*{stored.id}*")) != []
