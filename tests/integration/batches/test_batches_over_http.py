"""Batches of a mesh with simulated engines, with OpenAI's client and with `headway batch`."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest
import pytest_asyncio

from ops.ports import free_port
from services.mesh.cli import main
from services.mesh.embedded import EmbeddedMesh
from services.mesh.spec import EMBEDDED, AgentSpec, MeshSpec
from shared.models.tiny import make_tiny_models
from shared.runtime.lifecycle import EXIT_FAILED, EXIT_OK, EXIT_USAGE
from tests.queued import MODEL
from tests.stores import migrated_settings

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT = "/v1/chat/completions"


@contextlib.asynccontextmanager
async def opened_mesh(directory: Path, **batches: Any) -> AsyncIterator[str]:
    """URL of the gateway of a mesh in this process; *batches* are settings of batches."""
    settings = await migrated_settings(None, directory / "data")
    store = msgspec.to_builtins(settings)
    spec = MeshSpec(
        broker=EMBEDDED,
        registry=make_tiny_models(directory / "models", weights=False),
        log_dir=directory / "log",
        gateway_port=free_port(),
        gateway={"store": store, "batches": {"poll_s": 0.05} | batches},
        planner={
            "store": store,
            "leader": {"settle_s": 0.5},
            "grouper": {"unknown_model_wait_s": 0.2},
        },
        agents=(
            AgentSpec(
                instance_id="a",
                settings={
                    "initial_model": MODEL,
                    "drain_timeout_s": 0.1,
                    "engine": {"simulated": {"cold_activation_s": 0.1}},
                },
            ),
        ),
    )
    async with EmbeddedMesh(spec):
        yield spec.gateway_url


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def url(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[str]:
    """The mesh of most tests."""
    async with opened_mesh(tmp_path_factory.mktemp("mesh")) as opened:
        yield opened


@pytest_asyncio.fixture(loop_scope="module")
async def client(url: str) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as opened:
        yield opened


def a_line(number: int, **fields: Any) -> bytes:
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": f"line {number}"}],
        "max_tokens": 4,
        "temperature": 0,
    }
    line = {"custom_id": f"c{number}", "method": "POST", "url": CHAT, "body": body | fields}
    return json.dumps(line).encode() + b"\n"


async def created(client: openai.AsyncOpenAI, content: bytes, **fields: Any) -> openai.types.Batch:
    file = await client.files.create(file=("lines.jsonl", content), purpose="batch")
    values: dict[str, Any] = {
        "input_file_id": file.id,
        "endpoint": CHAT,
        "completion_window": "24h",
    }
    return await client.batches.create(**(values | fields))


async def ended(client: openai.AsyncOpenAI, batch_id: str) -> openai.types.Batch:
    async with asyncio.timeout(60.0):
        while True:
            batch = await client.batches.retrieve(batch_id)
            if batch.status in ("completed", "failed", "expired", "cancelled"):
                return batch
            await asyncio.sleep(0.05)


async def lines_of(client: openai.AsyncOpenAI, file_id: str | None) -> list[Any]:
    if file_id is None:
        return []
    content = await client.files.content(file_id)
    return [json.loads(line) for line in content.text.splitlines()]


async def test_openais_client_runs_its_documented_flow(client: openai.AsyncOpenAI):
    content = b"".join(map(a_line, range(40))) + a_line(40, top_p=7) + a_line(41, model="other")
    batch = await created(client, content, metadata={"job": "nightly"})
    found = await ended(client, batch.id)
    output = await lines_of(client, found.output_file_id)
    errors = await lines_of(client, found.error_file_id)
    alone = await client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "line 7"}],
        max_tokens=4,
        temperature=0,
    )
    listed = [each.id async for each in client.batches.list(limit=1)]

    assert (batch.status, batch.metadata, batch.object) == (
        "validating",
        {"job": "nightly"},
        "batch",
    )
    assert batch.expires_at == batch.created_at + 24 * 3600
    assert found.status == "completed"
    assert found.request_counts is not None
    assert found.request_counts.model_dump() == {"total": 42, "completed": 40, "failed": 2}
    assert [line["custom_id"] for line in output] == [f"c{number}" for number in range(40)]
    seventh = output[7]["response"]
    assert seventh["status_code"] == 200
    message = seventh["body"]["choices"][0]["message"]
    assert message["content"] == alone.choices[0].message.content
    assert seventh["body"]["object"] == "chat.completion"
    assert [line["custom_id"] for line in errors] == ["c40", "c41"]
    assert errors[0]["response"]["status_code"] == 400
    assert errors[1]["error"]["code"] == "model_not_found"
    assert listed == [batch.id]
    assert (await client.files.retrieve(found.output_file_id or "")).purpose == "batch_output"


async def test_an_input_that_is_read_is_not_deleted(tmp_path: Path):
    async with (
        opened_mesh(tmp_path, max_running=0) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as client,
    ):
        batch = await created(client, a_line(0))
        with pytest.raises(openai.ConflictError) as refused:
            await client.files.delete(batch.input_file_id)

        assert refused.value.code == "file_in_use"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"completion_window": "1w"}, "completion_window"),
        ({"endpoint": "/v1/audio/speech"}, "endpoint"),
        ({"input_file_id": "file-x"}, "input_file_id"),
    ],
)
async def test_an_invalid_batch_is_refused_with_the_field(
    client: openai.AsyncOpenAI, fields: dict[str, Any], param: str
):
    with pytest.raises(openai.BadRequestError) as refused:
        await created(client, a_line(0), **fields)

    assert refused.value.param == param


async def test_only_files_for_batches_are_inputs(client: openai.AsyncOpenAI):
    file = await client.files.create(file=("x", a_line(0)), purpose="user_data")
    with pytest.raises(openai.BadRequestError, match="purpose"):
        await client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
    with pytest.raises(openai.NotFoundError) as missing:
        await client.batches.create(
            input_file_id=file.id[:-1] + ("0" if file.id[-1] != "0" else "1"),
            endpoint=CHAT,
            completion_window="24h",
        )

    assert missing.value.code == "file_not_found"


async def test_an_ended_batch_cannot_be_cancelled(client: openai.AsyncOpenAI):
    batch = await created(client, a_line(0))
    await ended(client, batch.id)
    with pytest.raises(openai.ConflictError) as refused:
        await client.batches.cancel(batch.id)
    with pytest.raises(openai.NotFoundError):
        await client.batches.retrieve("batch_x")

    assert refused.value.code == "batch_not_cancellable"


async def run(url: str, *arguments: str) -> int:
    """Run `headway batch` in a thread, since it has an event loop of its own."""
    return await asyncio.to_thread(main, ["batch", arguments[0], "--url", url, *arguments[1:]])


async def test_the_command_submits_waits_and_writes_the_results(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    file, out, errors = (tmp_path / name for name in ("in.jsonl", "out.jsonl", "errors.jsonl"))
    file.write_bytes(b"".join(map(a_line, range(5))))
    code = await run(url, "submit", str(file), "--wait", "-o", str(out), "--json")
    # The mesh of this process logs to the same stream.
    batch = json.loads(capsys.readouterr().out.splitlines()[-1])
    again = await run(url, "results", batch["id"], "-o", str(errors))
    shown = await run(url, "status", batch["id"])
    status = capsys.readouterr().out
    listed = await run(url, "list")

    assert (code, again, shown, listed) == (EXIT_OK,) * 4
    assert batch["status"] == "completed"
    assert len(out.read_bytes().splitlines()) == 5
    assert errors.read_bytes() == out.read_bytes()
    assert "5 completed, 0 failed of 5" in status


async def test_the_command_fails_if_a_line_does(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    file, out, errors = (tmp_path / name for name in ("in.jsonl", "out.jsonl", "errors.jsonl"))
    file.write_bytes(a_line(0) + a_line(1, model="unknown"))
    code = await run(url, "submit", str(file), "--wait", "-o", str(out), "--errors", str(errors))
    shown = capsys.readouterr()

    assert code == EXIT_FAILED
    assert "1 failed of 2" in shown.out
    assert [json.loads(line)["custom_id"] for line in out.read_text().splitlines()] == ["c0"]
    assert [json.loads(line)["custom_id"] for line in errors.read_text().splitlines()] == ["c1"]


async def test_the_command_names_what_is_wrong(
    url: str, client: openai.AsyncOpenAI, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    file = tmp_path / "in.jsonl"
    before = [each.id async for each in client.files.list()]
    missing = await run(url, "submit", str(file))
    file.write_bytes(b"{}\n")
    without_url = await run(url, "submit", str(file))
    without_output = await run(url, "submit", str(file), "--wait", "--errors", str(tmp_path / "e"))
    unknown = await run(url, "status", "batch_x")
    away = await run("http://127.0.0.1:9", "status", "batch_x")
    errors = capsys.readouterr().err.splitlines()

    assert (missing, without_url, without_output, unknown, away) == (
        EXIT_USAGE,
        EXIT_USAGE,
        EXIT_USAGE,
        EXIT_FAILED,
        EXIT_FAILED,
    )
    assert "cannot read" in errors[0]
    assert "--endpoint" in errors[1]
    assert "--errors needs --output" in errors[2]
    assert "batch_not_found" in errors[3]
    assert "no answer from http://127.0.0.1:9" in errors[4]
    assert [each.id async for each in client.files.list()] == before
