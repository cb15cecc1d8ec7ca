"""Stored responses of a gateway, with OpenAI's client and with plain HTTP."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec
import openai
import pytest

from shared.contracts.base import ModelName
from shared.contracts.control import StoredCancel
from shared.contracts.models import ModelEntry
from shared.contracts.requests import StepDetails
from shared.models.registry import write_registry
from shared.store.settings import StoreSettings
from tests.brokers import MEMORY, BrokerRig, eventually
from tests.integration.gateway_rig import (
    KEYS,
    FakeMesh,
    GatewayRig,
    Request,
    completed,
    error_of,
    http_client,
    running_gateway,
)
from tests.renderings.responses import Rendering, message

TEXT = "The answer is 42."
ASKED: dict[str, Any] = {"model": "m", "input": "6*7?"}
Start = Callable[..., contextlib.AbstractAsyncContextManager[GatewayRig]]


@pytest.fixture
def url() -> None:
    """SQLite: the databases have other tests."""


@pytest.fixture
def broker_target() -> str:
    """The tests are about the gateway and the store."""
    return MEMORY


@pytest.fixture
def registry(tmp_path: Path) -> Path:
    """A model whose servers read bodies."""
    file = tmp_path / "models.json"
    write_registry(file, [ModelEntry(name=ModelName("m"), takes="bodies", max_model_len=512)])
    return file


@pytest.fixture
def start(broker_rig: BrokerRig, registry: Path, settings: StoreSettings) -> Start:
    """Function that runs a gateway with the store; its arguments are its mesh and settings."""

    def running(
        mesh: FakeMesh | None = None, **fields: object
    ) -> contextlib.AbstractAsyncContextManager[GatewayRig]:
        store = msgspec.to_builtins(settings)
        values = {"api_keys": KEYS, "store": store} | fields
        return running_gateway(broker_rig, registry, mesh=mesh, **values)

    return running


async def answer(request: Request) -> None:
    """Answer as a mesh with a server: the events of the server's stream, and its response."""
    rendering = Rendering([message(TEXT)], name="s")
    parts = tuple(
        StepDetails(
            1,
            events=b"event: " + event["type"].encode() + b"\ndata: " + msgspec.json.encode(event),
        )
        for event in rendering.events
    )
    final = msgspec.structs.replace(
        completed(request.body),
        details=parts,
        response=msgspec.Raw(msgspec.json.encode(rendering.response)),
    )
    await request.reply(final)


async def silent(_request: Request) -> None:
    """The mesh has the request, and does not answer."""


@contextlib.asynccontextmanager
async def client_of(rig: GatewayRig, key: str = "sk-acme") -> AsyncIterator[openai.AsyncOpenAI]:
    rig.mesh.script = answer
    async with openai.AsyncOpenAI(
        base_url=f"{rig.url}/v1", api_key=key, max_retries=0, timeout=60.0
    ) as client:
        yield client


@contextlib.asynccontextmanager
async def http_of(rig: GatewayRig, key: str = "sk-acme") -> AsyncIterator[httpx.AsyncClient]:
    rig.mesh.script = answer
    async with http_client() as http:
        http.base_url = httpx.URL(f"{rig.url}/v1")
        http.headers["authorization"] = f"Bearer {key}"
        yield http


async def test_openais_client_polls_a_background_response(start: Start):
    async with start() as rig, client_of(rig) as client:
        made = await client.responses.create(**ASKED, background=True)
        found = made

        async def has_ended() -> bool:
            nonlocal found
            found = await client.responses.retrieve(made.id)
            return found.status not in ("queued", "in_progress")

        await eventually(has_ended)
        listed = [item async for item in client.responses.input_items.list(made.id)]
        await client.responses.delete(made.id)
        with pytest.raises(openai.NotFoundError) as gone:
            await client.responses.retrieve(made.id)

    assert made.status in ("queued", "in_progress", "completed")
    assert (found.status, found.output_text, found.background) == ("completed", TEXT, True)
    assert found.id == made.id
    assert listed[0].to_dict()["content"] == [{"type": "input_text", "text": "6*7?"}]
    assert gone.value.code == "response_not_found"


async def test_openais_client_resumes_a_stream_on_another_gateway(start: Start):
    async with (
        start() as first,
        start(first.mesh) as second,
        client_of(first) as client,
        client_of(second) as other,
    ):
        events = []
        async with await client.responses.create(**ASKED, background=True, stream=True) as stream:
            async for event in stream:
                events.append(event)
                if event.sequence_number == 3:
                    break
        response_id = events[0].response.id  # type: ignore[union-attr]  # the first event has it
        async with await other.responses.retrieve(
            response_id, stream=True, starting_after=3
        ) as stream:
            events += [event async for event in stream]
        async with client.responses.stream(response_id=response_id) as helper:
            final = await helper.get_final_response()

    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:3]] == [
        "response.created",
        "response.queued",
        "response.in_progress",
    ]
    assert events[-1].type == "response.completed"
    assert events[-1].response.output_text == TEXT
    assert final.output_text == TEXT


async def test_openais_client_cancels_a_background_response(start: Start):
    async with start() as rig, client_of(rig) as client:
        rig.mesh.script = silent
        made = await client.responses.create(**ASKED, background=True)
        await eventually(lambda: bool(rig.mesh.requests))
        cancelled = await client.responses.cancel(made.id)
        again = await client.responses.cancel(made.id)

    assert (cancelled.id, cancelled.status) == (made.id, "cancelled")
    assert again == cancelled


async def test_a_stored_response_is_answered_found_and_continued(start: Start):
    async with start() as rig, client_of(rig) as client:
        first = await client.responses.create(**ASKED, store=True)
        found = await client.responses.retrieve(first.id)
        second = await client.responses.create(
            model="m", input="why?", previous_response_id=first.id
        )
        third = await client.responses.create(
            model="m", input="really?", previous_response_id=second.id, store=False
        )
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(third.id)

    assert (first.status, first.output_text, first.background) == ("completed", TEXT, False)
    assert found == first
    assert second.previous_response_id == first.id
    assert third.output_text == TEXT


async def test_a_client_that_leaves_before_the_answer_begins_cancels_its_response(start: Start):
    """It has no id to ask for, so the request must not continue."""
    async with start() as rig, http_of(rig) as http:
        rig.mesh.script = silent
        asking = asyncio.create_task(http.post("/responses", json=ASKED | {"store": True}))
        await eventually(lambda: bool(rig.mesh.requests))
        asking.cancel()
        await eventually(lambda: any(isinstance(it, StoredCancel) for it in rig.mesh.controls))
        (command,) = (it for it in rig.mesh.controls if isinstance(it, StoredCancel))

    assert command.request_id == rig.mesh.requests[0].body.id


async def test_a_response_with_a_key_continues_without_its_client(start: Start):
    """A client that asks again under its key, e.g. after a timeout, gets the answer."""
    asked, key = ASKED | {"store": True}, {"idempotency-key": "k"}
    async with start() as rig, http_of(rig) as http:
        rig.mesh.script = silent
        asking = asyncio.create_task(http.post("/responses", json=asked, headers=key))
        await eventually(lambda: bool(rig.mesh.requests))
        asking.cancel()
        await eventually(
            lambda: (
                rig.sample(
                    "headway_gateway_requests_total",
                    endpoint="stored_responses",
                    outcome="cancelled",
                )
                == 1
            )
        )
        repeating = asyncio.create_task(http.post("/responses", json=asked, headers=key))
        await answer(rig.mesh.requests[0])
        repeated = await repeating

    assert repeated.json()["status"] == "completed"
    assert len(rig.mesh.requests) == 1


async def test_a_stored_response_may_be_streamed_at_once(start: Start):
    async with start() as rig, client_of(rig) as client:
        async with await client.responses.create(**ASKED, store=True, stream=True) as stream:
            events = [event async for event in stream]
        found = await client.responses.retrieve(events[0].response.id)  # type: ignore[union-attr]  # as above

    assert events[-1].type == "response.completed"
    assert found.output_text == TEXT


async def test_requests_that_name_no_field_of_the_store_are_answered_as_before(
    start: Start, settings: StoreSettings
):
    async with start() as rig, http_of(rig) as http:
        answered = await http.post("/responses", json=ASKED)
        refused = await http.post("/responses", json={"model": "x", "input": "a"})
        broken = await http.post("/responses", content=b"{")
        found = await http.get(f"/responses/{answered.json()['id']}")

    assert answered.json()["id"] == "resp_s"
    assert error_of(refused)[:2] == (404, "model_not_found")
    assert error_of(broken)[0] == 400
    assert error_of(found) == (404, "response_not_found", "response_id")


async def test_no_tenant_sees_anothers_response(start: Start):
    async with start() as rig, http_of(rig) as http, http_of(rig, "sk-other") as other:
        made = (await http.post("/responses", json=ASKED | {"store": True})).json()
        path = f"/responses/{made['id']}"
        answers = [
            await other.get(path),
            await other.get(path, params={"stream": "true"}),
            await other.get(f"{path}/input_items"),
            await other.post(f"{path}/cancel"),
            await other.delete(path),
        ]
        own = await http.get(path)

    assert {error_of(each) for each in answers} == {(404, "response_not_found", "response_id")}
    assert own.json() == made


async def test_wrong_keys_bodies_and_paths_are_refused(start: Start):
    stored = ASKED | {"background": True}
    async with start() as rig, http_of(rig) as http, http_of(rig, "sk-wrong") as stranger:
        answers = [
            await stranger.get("/responses/resp_x"),
            await http.post("/responses", json=stored | {"store": False}),
            await http.post("/responses", json=stored | {"model": "x"}),
            await http.post("/responses", json=stored | {"previous_response_id": "resp_x"}),
            await http.post("/responses", json=stored | {"kv_transfer_params": {"a": 1}}),
            await http.get("/responses/%00"),
            await http.put("/responses/resp_x"),
            await http.get("/responses/resp_x/y"),
        ]

    assert [error_of(each) for each in answers] == [
        (401, "invalid_api_key", None),
        (400, "invalid_request", "store"),
        (404, "model_not_found", "model"),
        (400, "previous_response_not_found", "previous_response_id"),
        (400, "unsupported_parameter", "kv_transfer_params"),
        (404, "response_not_found", "response_id"),
        (405, "method_not_allowed", None),
        (404, "not_found", None),
    ]


async def test_without_a_store_the_settings_are_named(broker_rig: BrokerRig, registry: Path):
    async with (
        running_gateway(broker_rig, registry) as rig,
        http_of(rig) as http,
    ):
        stored = await http.post("/responses", json=ASKED | {"background": True})
        found = await http.get("/responses/resp_x")
        plain = await http.post("/responses", json=ASKED)

    assert error_of(stored) == (501, "store_not_configured", None)
    assert "store.data_dir" in stored.text
    assert error_of(found)[1] == "store_not_configured"
    assert plain.status_code == 200


async def test_a_tenant_with_one_request_at_a_time_gets_its_response(start: Start, tmp_path: Path):
    """The request of the client and that to the front are one."""
    policies = tmp_path / "tenants.json"
    policies.write_bytes(msgspec.json.encode({"tenants": {"acme": {"concurrent_requests": 1}}}))
    async with start(tenants=str(policies)) as rig, client_of(rig) as client:
        made = await client.responses.create(**ASKED, store=True)
        continued = await client.responses.create(
            **ASKED, previous_response_id=made.id, store=False
        )

    assert made.output_text == continued.output_text == TEXT


async def test_a_stopping_gateway_leaves_its_responses_to_another(start: Start):
    async with start() as second, client_of(second) as other:
        async with start(second.mesh, drain_timeout_s=0.1) as first, client_of(first) as client:
            second.mesh.script = silent
            made = await client.responses.create(**ASKED, background=True)
            await eventually(lambda: bool(second.mesh.requests))
            # The other gateway may begin while this one still stops.
            second.mesh.script = answer
        async with await other.responses.retrieve(made.id, stream=True) as stream:
            events = [event async for event in stream]

    assert len(second.mesh.requests) == 2
    assert events[-1].type == "response.completed"
    assert [event.sequence_number for event in events] == list(range(len(events)))
