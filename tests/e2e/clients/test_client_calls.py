"""The Python client, with and without asyncio, against a mesh over RabbitMQ."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from yarl import URL

from ops.ports import free_port
from services.mesh.processes import ProcessMesh
from shared.client import (
    BrokerUnavailableError,
    Client,
    RequestCompleted,
    RequestError,
    RequestState,
    SettingsError,
    SyncClient,
    connect,
    connect_sync,
)
from shared.contracts.errors import MeshError
from tests.brokers import eventually
from tests.e2e.meshes import LLAMA, ends_of
from tests.tcp_proxy import TcpProxy

pytestmark = [pytest.mark.rabbitmq, pytest.mark.asyncio(loop_scope="module")]
FIELDS: dict[str, Any] = {
    "model": LLAMA,
    "prompt": "hello",
    "max_tokens": 24,
    "temperature": 0,
    "ignore_eos": True,
}


@asynccontextmanager
async def client_through_proxy(mesh: ProcessMesh) -> AsyncIterator[tuple[Client, TcpProxy]]:
    url = URL(mesh.spec.broker)
    async with TcpProxy(url.host or "127.0.0.1", url.port or 5672) as proxy:
        through = str(url.with_host("127.0.0.1").with_port(proxy.port))
        async with connect(through, name="test") as client:
            yield client, proxy


async def test_a_stream_equals_its_final_although_the_connection_is_lost(mesh: ProcessMesh) -> None:
    async with client_through_proxy(mesh) as (client, proxy):
        answer = await client.submit(**FIELDS | {"max_tokens": 200}, slo={"ttft_s": 5.0})
        parts = []
        async for part in answer.stream():
            if not parts:
                proxy.drop()
            parts.append(part)
        final = await answer.wait()
        again = await (await client.submit(**FIELDS)).wait()

    assert tuple(token for part in parts for token in part.token_ids) == final.token_ids
    assert "".join(part.text for part in parts) == final.text
    assert len(final.token_ids) == 200
    assert len(again.token_ids) == 24


async def test_a_cancelled_request_ends_at_once_and_its_run_also(mesh: ProcessMesh) -> None:
    async with connect(mesh.spec.broker) as client:
        answer = await client.submit(**FIELDS | {"max_tokens": 1500})
        await anext(aiter(answer.stream()))
        await answer.cancel()

        with pytest.raises(RequestError) as raised:
            await answer.wait(timeout_s=5.0)
        # The client also cancels its requests when it closes.
        await eventually(lambda: bool(ends_of(mesh, answer.request_id)))
    assert (raised.value.code, raised.value.status) == ("cancelled", 499)
    assert ends_of(mesh, answer.request_id) != ["request.completed"]


async def test_errors_of_the_mesh_name_the_field(mesh: ProcessMesh) -> None:
    async with connect(mesh.spec.broker) as client:
        answer = await client.submit(**FIELDS | {"model": "no-model"})

        with pytest.raises(RequestError, match=r"model_not_found: .*tiny-llama") as raised:
            await answer.wait()
        with pytest.raises(RequestError, match="request_not_found"):
            await client.status("r1")
    assert raised.value.error.param == "model"


async def test_an_idempotent_request_outlives_its_client_and_runs_once(mesh: ProcessMesh) -> None:
    async with connect(mesh.spec.broker) as client:
        await client.submit(**FIELDS, id="report-7", idempotent=True)
    async with connect(mesh.spec.broker) as client:
        final = await (await client.submit(**FIELDS, id="report-7", idempotent=True)).wait(30.0)
        again = await (await client.submit(**FIELDS, id="report-7", idempotent=True)).wait(30.0)
        other = await client.submit(**FIELDS | {"prompt": "x"}, id="report-7", idempotent=True)
        with pytest.raises(RequestError, match="id_conflict"):
            await other.wait()
        status = await client.status("report-7")
        # A second run would have begun before this longer one, and have ended before it.
        await (await client.submit(**FIELDS | {"max_tokens": 200})).wait(30.0)
    assert isinstance(status.final, msgspec.Raw)
    stored = msgspec.json.decode(status.final, type=RequestCompleted)
    await eventually(lambda: bool(ends_of(mesh, "report-7")))

    assert status.state is RequestState.COMPLETED
    assert (stored.run_id, stored.token_ids) == (final.run_id, final.token_ids)
    assert again.run_id == final.run_id
    assert status.runs == 1
    assert ends_of(mesh, "report-7") == ["request.completed"]


def sync_results(client: SyncClient) -> tuple[str, str, str]:
    """Text of a stream, text of its final, and the code of a cancelled request."""
    answer = client.submit(**FIELDS)
    streamed = "".join(part.text for part in answer.stream())
    cancelled = client.submit(**FIELDS | {"max_tokens": 1500})
    cancelled.cancel()
    try:
        cancelled.wait(timeout_s=5.0)
    except RequestError as error:
        return streamed, answer.wait(timeout_s=5.0).text, error.code
    return streamed, answer.wait(timeout_s=5.0).text, ""


async def test_the_client_without_asyncio_does_the_same(mesh: ProcessMesh) -> None:
    def in_thread() -> tuple[str, str, str]:
        with connect_sync(mesh.spec.broker) as client:
            return sync_results(client)

    streamed, text, code = await asyncio.to_thread(in_thread)

    assert streamed == text != ""
    assert code == "cancelled"


async def test_a_fork_gets_an_error(mesh: ProcessMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    def in_thread() -> str:
        with connect_sync(mesh.spec.broker) as client, monkeypatch.context() as forked:
            forked.setattr("os.getpid", lambda: -1)
            with pytest.raises(MeshError) as raised:
                client.submit(**FIELDS)
            forked.undo()
            return str(raised.value)

    assert "connect after the fork" in await asyncio.to_thread(in_thread)


async def test_errors_of_connecting_are_readable(mesh: ProcessMesh) -> None:
    port = free_port()
    with pytest.raises(BrokerUnavailableError, match=str(port)):
        async with connect(f"amqp://guest:secret@127.0.0.1:{port}/"):
            pass
    wrong = URL(mesh.spec.broker).with_password("wrong")
    with pytest.raises(SettingsError, match="refuses the login"):
        async with connect(str(wrong)):
            pass
    with pytest.raises(SettingsError, match="must begin with amqp://"):
        async with connect("http://127.0.0.1/"):
            pass
