"""
Stock clients and frameworks against a mesh with two real vLLM engines, and against one in front of
two `vllm serve`.
"""

import asyncio
import json
import os
import shutil
import subprocess
import sys
import time
import venv
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anthropic
import msgspec
import openai
import pytest
import pytest_asyncio

from ops.bench.vllm_serve import stock_server
from services.engine_core.serve_arguments import serve_arguments
from services.mesh.processes import ProcessMesh
from services.mesh.spec import AgentSpec, MeshSpec
from shared.contracts.base import ModelName
from shared.contracts.models import ModelEntry
from shared.models.registry import ModelRegistry, write_registry
from shared.models.tiny import TINY_MODELS, make_tiny_models
from tests.brokers import RabbitServer, rabbit_targets
from tests.clients.streaming import CLIENTS, PROMPT
from tests.differential.models import with_parsers
from tests.e2e.front.nginx import nginx
from tests.e2e.meshes import LLAMA, mesh_spec
from tests.requirements import program
from tests.stores import migrated_settings

pytestmark = [
    pytest.mark.slow,
    pytest.mark.rabbitmq,
    pytest.mark.vllm,
    pytest.mark.asyncio(loop_scope="module"),
]
HERE = Path(__file__).parent
MESSAGES: list[Any] = [{"role": "user", "content": "Pick some items."}]
READ_TIMEOUT_S, KEEP_ALIVE_S, HELD_S = 5, 2.0, 20.0
"""Longest silence that the proxy allows; interval of comments; time for which streams wait."""
SCHEMA = {
    "type": "object",
    "properties": {
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
        "kind": {"type": "string", "enum": ["new", "old"]},
    },
    "required": ["count", "kind"],
    "additionalProperties": False,
}


@asynccontextmanager
async def own_engines(broker: str, registry: Path, directory: Path) -> AsyncIterator[MeshSpec]:
    """A mesh that starts its engines."""
    yield mesh_spec(broker, directory, engine="vllm", registry=registry)


@asynccontextmanager
async def attached(broker: str, registry: Path, directory: Path) -> AsyncIterator[MeshSpec]:
    """A mesh in front of two servers of others, which get the bodies as they come."""
    entry = ModelRegistry.load(registry).entry(ModelName(LLAMA))
    taken = ModelEntry(name=entry.name, takes="bodies", max_model_len=entry.max_model_len)
    bodies = directory / "attached.json"
    write_registry(bodies, [taken])
    arguments = serve_arguments(entry, [LLAMA])
    async with (
        stock_server(arguments, directory / "serve-0.log") as first,
        stock_server(arguments, directory / "serve-1.log") as second,
    ):
        agents = tuple(
            AgentSpec(
                instance_id=f"attached-{number}",
                engine="remote",
                settings={"models": [LLAMA], "engine": {"remote": {"url": server.url}}},
            )
            for number, server in enumerate((first, second))
        )
        spec = mesh_spec(broker, directory, registry=bodies, agents=0)
        yield msgspec.structs.replace(spec, agents=agents)


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=[own_engines, attached])
async def url(
    request: pytest.FixtureRequest,
    rabbit_servers: Callable[[str], RabbitServer],
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[str]:
    """Base URL of the gateway."""
    directory = tmp_path_factory.mktemp("mesh")
    models = {LLAMA: TINY_MODELS[LLAMA]}
    registry = with_parsers(make_tiny_models(directory / "models", models=models))
    store = await migrated_settings(None, directory / "data")
    with rabbit_servers(rabbit_targets()[0]).fresh_url() as broker:
        async with request.param(broker, registry, directory) as plain:
            stored = {"store": msgspec.to_builtins(store)}
            spec = msgspec.structs.replace(
                plain,
                gateway=plain.gateway | stored | {"stream_keep_alive_s": KEEP_ALIVE_S},
                planner=plain.planner | stored,
            )
            async with ProcessMesh(spec):
                yield spec.gateway_url


def is_pick(arguments: object) -> bool:
    return (
        isinstance(arguments, dict)
        and arguments.keys() == {"count", "kind"}
        and 0 <= arguments["count"] <= 99
        and arguments["kind"] in ("new", "old")
    )


@pytest_asyncio.fixture(loop_scope="module")
async def client(url: str) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as client:
        yield client


async def test_openais_python_client_parses_tools_and_schemas(client: openai.AsyncOpenAI) -> None:
    tool = {"name": "pick", "parameters": SCHEMA, "strict": True}
    tools: Any = [{"type": "function", "function": tool}]
    asked: dict[str, Any] = {"model": LLAMA, "messages": MESSAGES, "temperature": 0.7, "seed": 3}
    called = await client.chat.completions.create(
        **asked, max_tokens=500, tools=tools, tool_choice="required", n=2
    )
    schema: Any = {
        "type": "json_schema",
        "json_schema": {"name": "pick", "schema": SCHEMA, "strict": True},
    }
    answered = await client.chat.completions.create(
        **asked, max_tokens=120, response_format=schema, logprobs=True
    )

    assert len(called.choices) == 2
    for choice in called.choices:
        assert choice.message.tool_calls is not None
        assert is_pick(json.loads(choice.message.tool_calls[0].function.arguments))
    text = answered.choices[0].message.content or answered.choices[0].message.reasoning
    assert is_pick(json.loads(text))


async def test_anthropics_client_streams_the_whole_message(url: str) -> None:
    asked: dict[str, Any] = {"model": LLAMA, "messages": MESSAGES, "max_tokens": 12}
    async with anthropic.AsyncAnthropic(base_url=url, api_key="x", max_retries=0) as client:
        whole = await client.messages.create(**asked, extra_body={"temperature": 0})
        async with client.messages.stream(**asked, extra_body={"temperature": 0}) as stream:
            streamed = await stream.get_final_message()

    assert [part.text for part in streamed.content] == [part.text for part in whole.content]
    assert streamed.usage.output_tokens == whole.usage.output_tokens


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Interpreter with the Python frameworks, which need other versions of some packages."""
    folder = tmp_path_factory.mktemp("python") / "venv"
    venv.create(folder, with_pip=True)
    interpreter = folder / "bin" / "python"
    requirements = HERE / "python" / "requirements.txt"
    command = (interpreter, "-m", "pip", "install", "--quiet", "--requirement", requirements)
    subprocess.run(command, check=True)
    return interpreter


async def run_script(
    command: Sequence[str | Path], folder: Path, url: str, **variables: str
) -> Any:
    """The JSON object that a client prints."""
    process = await asyncio.create_subprocess_exec(
        *map(str, command),
        cwd=folder,
        env=os.environ
        | {"BASE_URL": f"{url}/v1", "MODEL": LLAMA, "SCHEMA": json.dumps(SCHEMA)}
        | variables,
        stdout=asyncio.subprocess.PIPE,
        stderr=sys.stderr,
    )
    output, _ = await process.communicate()
    assert process.returncode == 0
    return json.loads(output.decode().splitlines()[-1])


async def test_langchain_binds_tools_and_returns_structured_output(python: Path, url: str) -> None:
    found = await run_script((python, "langchain_client.py"), HERE / "python", url)

    assert found["call"]["name"] == "Pick"
    assert 0 <= found["call"]["args"]["count"] <= 99
    assert 0 <= found["found"]["count"] <= 99


async def test_agents_sdk_loops_over_two_tool_calls(python: Path, url: str) -> None:
    found = await run_script((python, "agents_client.py"), HERE / "python", url)
    transcript = json.dumps(found["transcript"])

    assert len(found["results"]) >= 2
    assert found["final"] == found["results"][-1]
    assert all(result in transcript for result in found["results"][:2])


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the Node clients and their packages."""
    npm = program("npm", "npm")
    folder = tmp_path_factory.mktemp("node") / "clients"
    shutil.copytree(HERE / "node", folder)
    options = ("--no-audit", "--no-fund", "--no-package-lock", "--loglevel=error")
    subprocess.run((npm, "install", *options), cwd=folder, check=True)
    return folder


async def test_openais_node_client_streams_and_calls_tools(node: Path, url: str) -> None:
    found = await run_script(("node", "openai_client.js"), node, url)

    assert found["streamed"] == (found["whole"] or "")
    assert found["call"]["name"] == "pick"
    assert is_pick(json.loads(found["call"]["arguments"]))
    assert found["request"].startswith("req-")


async def test_held_streams_of_stock_clients_pass_a_proxy(
    node: Path, url: str, tmp_path: Path
) -> None:
    """Four streams of each Python client, and six of Node's, as without proxy and wait."""
    undisturbed = {name: await client(url, {}) for name, client in CLIENTS.items()}
    held: dict[str, Any] = {"not_before": time.time() + HELD_S}
    variables = {"NOT_BEFORE": str(held["not_before"]), "PROMPT": PROMPT}
    async with nginx(url, tmp_path / "nginx", read_timeout_s=READ_TIMEOUT_S) as proxy:
        of_python = {
            name: asyncio.gather(*(client(proxy, held) for _ in range(4)))
            for name, client in CLIENTS.items()
        }
        of_node = await asyncio.gather(
            *(run_script(("node", "openai_held.js"), node, proxy, **variables) for _ in range(2))
        )
        answers = {name: await texts for name, texts in of_python.items()}

    assert all(undisturbed.values())
    assert answers == {name: [text] * 4 for name, text in undisturbed.items()}
    for texts in of_node:
        assert texts == {name: undisturbed[name] for name in texts}


async def test_openais_node_client_stores_and_reads_a_file(node: Path, url: str) -> None:
    found = await run_script(("node", "openai_files.js"), node, url)

    assert found["id"] in found["listed"]
    assert (found["bytes"], found["same"], found["deleted"]) == (19, True, True)


async def test_openais_python_client_stores_and_reads_a_file(client: openai.AsyncOpenAI) -> None:
    made = await client.files.create(file=("lines.jsonl", b"{}\n"), purpose="batch")
    listed = [file.id async for file in client.files.list(limit=1, purpose="batch")]
    content = await client.files.content(made.id)
    deleted = await client.files.delete(made.id)

    assert made.id in listed
    assert (made.bytes, content.content, deleted.deleted) == (3, b"{}\n", True)


async def test_openais_node_client_runs_a_batch(node: Path, url: str) -> None:
    found = await run_script(("node", "openai_batches.js"), node, url)

    assert found["status"] == "completed"
    assert found["counts"] == {"total": 3, "completed": 3, "failed": 0}
    assert found["metadata"] == {"job": "test"}
    assert found["id"] in found["listed"]
    assert found["customIds"] == ["c0", "c1", "c2"]


@pytest.mark.parametrize("endpoint", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
async def test_openais_python_client_runs_a_batch(
    client: openai.AsyncOpenAI, endpoint: Any
) -> None:
    text: dict[str, Any] = {
        "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 4},
        "/v1/completions": {"prompt": "Pick", "max_tokens": 4},
        "/v1/responses": {"input": "Pick", "max_output_tokens": 16},
    }[endpoint]
    lines = [
        {
            "custom_id": f"c{number}",
            "method": "POST",
            "url": endpoint,
            "body": {"model": LLAMA} | text,
        }
        for number in range(3)
    ]
    content = "\n".join(map(json.dumps, lines)).encode()
    file = await client.files.create(file=("lines.jsonl", content), purpose="batch")
    batch = await client.batches.create(
        input_file_id=file.id, endpoint=endpoint, completion_window="24h"
    )
    async with asyncio.timeout(120.0):
        while batch.status not in ("completed", "failed"):
            await asyncio.sleep(0.2)
            batch = await client.batches.retrieve(batch.id)
    assert batch.output_file_id is not None, batch
    output = await client.files.content(batch.output_file_id)
    found = [json.loads(line) for line in output.text.splitlines()]

    assert batch.error_file_id is None
    assert [line["custom_id"] for line in found] == ["c0", "c1", "c2"]
    assert all(line["response"]["body"]["usage"] for line in found)


async def test_openais_node_client_runs_responses_in_the_background(node: Path, url: str) -> None:
    found = await run_script(("node", "openai_background.js"), node, url)

    assert found["first"] in ("queued", "in_progress", "completed", "incomplete")
    assert found["status"] in ("completed", "incomplete")
    assert found["streamed"] == found["whole"]
    assert found["numbers"] == list(range(len(found["numbers"])))
    assert found["items"][:2] == ["user", "assistant"]
    assert (found["cancelled"], found["gone"]) == ("cancelled", "response_not_found")


async def test_openais_python_client_runs_responses_in_the_background(
    client: openai.AsyncOpenAI,
) -> None:
    asked: dict[str, Any] = {"model": LLAMA, "input": "Say something.", "max_output_tokens": 40}
    polled = await client.responses.create(**asked, temperature=0, background=True)
    while polled.status in ("queued", "in_progress"):
        await asyncio.sleep(0.2)
        polled = await client.responses.retrieve(polled.id)
    events = []
    async with await client.responses.create(
        **asked, temperature=0, background=True, stream=True
    ) as stream:
        async for event in stream:
            events.append(event)
            if event.sequence_number == 5:
                break
    response_id = events[0].response.id  # type: ignore[union-attr]  # the first event has it
    async with await client.responses.retrieve(
        response_id, stream=True, starting_after=5
    ) as stream:
        events += [event async for event in stream]
    long = await client.responses.create(
        **asked | {"max_output_tokens": 400}, background=True, extra_body={"ignore_eos": True}
    )
    cancelled = await client.responses.cancel(long.id)
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]

    assert polled.status in ("completed", "incomplete")
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(deltas) == polled.output_text
    assert cancelled.status == "cancelled"


async def test_vercels_ai_sdk_runs_two_steps_with_tools(node: Path, url: str) -> None:
    found = await run_script(("node", "ai_sdk.js"), node, url)

    assert found["streamed"] == found["whole"]
    assert len(found["picked"]) >= 2
    assert all(is_pick(each) for each in found["picked"])
    assert len(found["results"]) == len(found["picked"])
