"""Requests with keys of their clients, and requests that are not waited for, at one gateway."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ops.ports import free_port
from shared.broker import topology
from shared.broker.protocol import BindingSpec
from shared.contracts.base import RequestId, TenantId, encode
from shared.contracts.control import StoredCancel
from shared.contracts.ingress import DIGEST_HEADER, IDEMPOTENT_HEADER
from shared.contracts.requests import (
    ErrorInfo,
    Final,
    ReplyMode,
    RequestCompleted,
    RequestFailed,
)
from shared.store.requests.records import ClaimAsked, Ended
from shared.store.settings import StoreSettings
from shared.store.store import Store
from tests.brokers import MEMORY, BrokerRig, eventually
from tests.integration.gateway_rig import (
    KEYS,
    PIECES,
    GatewayRig,
    Request,
    answer,
    completed,
    error_of,
    http_client,
    http_of,
    running_gateway,
    stream,
)
from tests.stores import ACME, open_store, settings_of

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
BODY: dict[str, Any] = {"model": "tiny-llama", "prompt": "hello", "temperature": 0}
ASYNC = {"prefer": "respond-async"}
Start = Callable[..., contextlib.AbstractAsyncContextManager[GatewayRig]]


@pytest.fixture
def broker_target() -> str:
    """The tests are about the gateway and the store."""
    return MEMORY


@pytest.fixture
def url() -> None:
    """SQLite: the databases have other tests."""


@pytest.fixture
async def store(settings: StoreSettings) -> AsyncIterator[Store]:
    """The store, as groupers use it."""
    async with open_store(settings) as opened:
        yield opened


@pytest.fixture
def start(broker_rig: BrokerRig, registry: Path, settings: StoreSettings) -> Start:
    """Function that runs a gateway with the store."""

    def running() -> contextlib.AbstractAsyncContextManager[GatewayRig]:
        store = msgspec.to_builtins(settings)
        return running_gateway(broker_rig, registry, api_keys=KEYS, store=store)

    return running


def keyed(key: str = "k1") -> dict[str, str]:
    return {"idempotency-key": key}


async def silent(_request: Request) -> None:
    """The mesh has the request, and has not answered yet."""


class Finals:
    """A mesh that keeps its finals, and repeats them to all that ask."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.may_answer = asyncio.Event()
        self._finals: dict[str, RequestCompleted] = {}

    async def __call__(self, request: Request) -> None:
        self.asked.set()
        await self.may_answer.wait()
        request_id = request.body.id or ""
        if request_id not in self._finals:
            self._finals[request_id] = completed(request.body, *PIECES)
            if request.body.reply is ReplyMode.STREAM:
                await stream(request, *PIECES)
        await request.reply(self._finals[request_id])


async def end(store: Store, request_id: str, final: Final, *, outcome: str = "completed") -> None:
    """Store the final of a request, as a grouper does."""
    ended = Ended(
        tenant=ACME,
        request_id=RequestId(request_id),
        outcome=outcome,
        final=encode(final),
        at=1_700_000_000.0,
    )
    await store.requests.end([ended])


async def test_message_of_a_keyed_request_has_the_same_id_and_digest_each_time(start: Start):
    async with start() as rig, http_of(rig) as http, http_of(rig, "sk-other") as other:
        for _ in range(2):
            (await http.post(COMPLETIONS, json=BODY, headers=keyed())).raise_for_status()
        await http.post(COMPLETIONS, json=BODY, headers=keyed("k2"))
        await http.post(CHAT, json=BODY | {"messages": []}, headers=keyed())
        await other.post(COMPLETIONS, json=BODY, headers=keyed())
        asked = [(each.body.id, each.delivery.headers) for each in rig.mesh.requests]

    ids, headers = zip(*asked, strict=True)
    assert ids[0] == ids[1]
    assert len(set(ids)) == 3, "by key and by tenant"
    assert headers[0] == headers[1]
    assert headers[0][IDEMPOTENT_HEADER] is True
    assert headers[0][DIGEST_HEADER]


async def test_repeats_get_the_same_body_byte_by_byte(start: Start):
    async with start() as rig, http_of(rig) as http:
        rig.mesh.script = finals = Finals()
        asking = [
            asyncio.create_task(http.post(COMPLETIONS, json=BODY, headers=keyed()))
            for _ in range(2)
        ]
        await finals.asked.wait()
        await asyncio.sleep(1.1)  # `created` is in whole seconds
        finals.may_answer.set()
        answers = await asyncio.gather(*asking)
        answers.append(await http.post(COMPLETIONS, json=BODY, headers=keyed()))

    assert len({each.content for each in answers}) == 1
    assert answers[0].json()["choices"][0]["text"] == "Hello world"
    assert answers[0].json()["headway"]["request_id"] == answers[0].headers["x-headway-request-id"]


async def test_repeat_of_a_stream_gets_the_whole_answer_as_events(start: Start):
    body = BODY | {"stream": True, "stream_options": {"include_usage": True}}
    async with start() as rig, http_of(rig) as http:
        rig.mesh.script = finals = Finals()
        finals.may_answer.set()
        answers = [await http.post(COMPLETIONS, json=body, headers=keyed()) for _ in range(2)]

    events = [
        [msgspec.json.decode(line[6:]) for line in each.text.split("\n\n") if line[6:7] == "{"]
        for each in answers
    ]
    texts = ["".join(c["text"] for e in each for c in e["choices"]) for each in events]
    assert texts == ["Hello world"] * 2
    assert {each[0]["id"] for each in events} == {f"cmpl-{rig.mesh.requests[0].body.id}"}
    assert events[0][-1]["usage"] == events[1][-1]["usage"]
    assert all(each.text.endswith("data: [DONE]\n\n") for each in answers)


async def test_another_body_or_path_under_the_key_is_a_conflict_that_names_the_header(
    start: Start,
):
    async with start() as rig, http_of(rig) as http:
        rig.mesh.script = silent
        first = asyncio.create_task(http.post(COMPLETIONS, json=BODY, headers=keyed()))
        await eventually(lambda: len(rig.mesh.requests) == 1)
        other = await http.post(COMPLETIONS, json=BODY | {"seed": 1}, headers=keyed())

        async def conflict(request: Request) -> None:
            await request.fail(status=409, code="id_conflict")

        rig.mesh.script = conflict
        elsewhere = await http.post(COMPLETIONS, json=BODY, headers=keyed("k2"))
        await rig.mesh.requests[0].complete("done")
        await first

    expected = (409, "id_conflict", "idempotency-key")
    assert [error_of(other), error_of(elsewhere)] == [expected] * 2


async def test_client_that_leaves_does_not_cancel_its_keyed_request(start: Start):
    async with start() as rig, http_of(rig) as http:
        rig.mesh.script = silent
        leaving = asyncio.create_task(http.post(COMPLETIONS, json=BODY, headers=keyed()))
        await eventually(lambda: len(rig.mesh.requests) == 1)
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        await eventually(
            lambda: (
                rig.sample(
                    "headway_gateway_requests_total", endpoint="completions", outcome="cancelled"
                )
                == 1.0
            )
        )
        rig.mesh.script = answer
        again = await http.post(COMPLETIONS, json=BODY, headers=keyed())

    assert again.json()["choices"][0]["text"] == "Hello world"
    assert rig.mesh.cancelled == []


async def test_failed_final_is_an_answer_as_any_other(start: Start):
    async def late(request: Request) -> None:
        await request.fail(status=504, code="deadline_expired")

    async with start() as rig, http_of(rig) as http:
        rig.mesh.script = late
        answers = [await http.post(COMPLETIONS, json=BODY, headers=keyed()) for _ in range(2)]

    assert [error_of(each)[:2] for each in answers] == [(504, "deadline_expired")] * 2


@pytest.mark.parametrize("key", ["", "k" * 256])
async def test_key_beyond_its_limits_is_refused(start: Start, key: str):
    async with start() as rig, http_of(rig) as http:
        refused = await http.post(COMPLETIONS, json=BODY, headers=keyed(key))

    assert error_of(refused) == (400, "invalid_header", "idempotency-key")


async def test_without_a_store_keys_and_deferred_answers_are_refused(
    broker_rig: BrokerRig, registry: Path
):
    async with running_gateway(broker_rig, registry) as rig, http_client() as http:
        url = f"{rig.url}{COMPLETIONS}"
        answers = [
            await http.post(url, json=BODY, headers=keyed()),
            await http.post(url, json=BODY, headers=ASYNC),
            await http.get(f"{rig.url}/v1/requests/r1"),
        ]
        plain = await http.post(url, json=BODY)

    assert {error_of(each)[:2] for each in answers} == {(501, "store_not_configured")}
    assert plain.status_code == 200


async def test_while_the_database_is_away_keys_are_refused_and_the_rest_continues(
    broker_rig: BrokerRig, registry: Path, tmp_path: Path
):
    away = settings_of(f"postgresql://headway@127.0.0.1:{free_port()}/none", tmp_path / "data")
    store = msgspec.to_builtins(away) | {"timeout_s": 1.0}
    async with (
        running_gateway(broker_rig, registry, store=store) as rig,
        http_client() as http,
    ):
        url = f"{rig.url}{COMPLETIONS}"
        answers = [
            await http.post(url, json=BODY, headers=keyed()),
            await http.post(url, json=BODY, headers=ASYNC),
            await http.get(f"{rig.url}/v1/requests/r1"),
        ]
        plain = await http.post(url, json=BODY)

    assert [error_of(each)[:2] for each in answers] == [(503, "store_unavailable")] * 3
    assert [each.headers["retry-after"] for each in answers] == ["5"] * 3
    assert plain.status_code == 200


async def test_deferred_request_is_stored_and_published_and_answered_at_once(
    start: Start, store: Store
):
    async with start() as rig, http_of(rig) as http:
        rig.mesh.script = silent
        accepted = await http.post(CHAT, json=chat_body(), headers=ASYNC)
        await eventually(lambda: len(rig.mesh.requests) == 1)
        found = await http.get(accepted.headers["location"])
        (request,) = rig.mesh.requests
        row = await store.requests.get(ACME, RequestId(accepted.json()["id"]))

    made = accepted.json()
    assert accepted.status_code == 202
    assert accepted.headers["location"] == f"/v1/requests/{made['id']}"
    assert accepted.headers["preference-applied"] == "respond-async"
    assert made == found.json()
    assert (made["object"], made["status"], made["endpoint"]) == ("request", "queued", CHAT)
    assert (made["model"], made["attempts"], made["result"]) == ("tiny-llama", 0, None)
    assert (request.body.id, request.body.tenant) == (made["id"], "acme")
    assert (request.delivery.reply_to, request.body.reply) == (None, ReplyMode.FINAL)
    assert row is not None
    assert request.delivery.headers[DIGEST_HEADER] == row.digest
    assert row.is_asked


def chat_body() -> dict[str, Any]:
    return {
        "model": "tiny-llama",
        "messages": [{"role": "user", "content": "hello"}],
        "temperature": 0,
    }


async def test_ended_request_has_the_answer_that_a_waiting_client_gets(start: Start, store: Store):
    async with start() as rig, http_of(rig) as http:
        rig.mesh.script = finals = Finals()
        finals.may_answer.set()
        waited = await http.post(CHAT, json=chat_body(), headers=keyed())
        rig.mesh.script = silent
        accepted = await http.post(CHAT, json=chat_body(), headers=ASYNC | keyed("other"))
        request_id = accepted.json()["id"]
        await eventually(lambda: len(rig.mesh.requests) == 2)
        await end(store, request_id, completed(rig.mesh.requests[1].body, *PIECES))
        found = (await http.get(f"/v1/requests/{request_id}")).json()
        again = await http.post(CHAT, json=chat_body(), headers=ASYNC | keyed("other"))

    result, expected = found["result"], waited.json()
    assert (found["status"], found["ended_at"]) == ("completed", 1_700_000_000.0)
    assert result["choices"] == expected["choices"]
    assert result["usage"] == expected["usage"]
    assert result.keys() == expected.keys()
    assert result["id"] == f"chatcmpl-{request_id}"
    assert found["headway"] == result["headway"]
    assert (again.status_code, again.json()) == (200, found)


async def test_repeat_of_a_deferred_request_is_the_same_request(start: Start, store: Store):
    headers = ASYNC | keyed()
    async with start() as rig, http_of(rig) as http:
        rig.mesh.script = silent
        answers = [await http.post(COMPLETIONS, json=BODY, headers=headers) for _ in range(2)]
        await eventually(lambda: len(rig.mesh.requests) == 2)
        other = await http.post(COMPLETIONS, json=BODY | {"seed": 1}, headers=headers)
        requests = list(rig.mesh.requests)

    assert [each.status_code for each in answers] == [202, 202]
    assert answers[0].json() == answers[1].json()
    assert requests[0].body.id == requests[1].body.id, "published again, since no queue has it"
    assert requests[0].delivery.headers == requests[1].delivery.headers
    assert error_of(other) == (409, "id_conflict", "idempotency-key")


async def test_deferred_answer_cannot_be_streamed(start: Start):
    async with start() as rig, http_of(rig) as http:
        refused = await http.post(COMPLETIONS, json=BODY | {"stream": True}, headers=ASYNC)
        requests = list(rig.mesh.requests)

    assert error_of(refused) == (400, "invalid_request", "stream")
    assert requests == []


async def test_deferred_request_is_validated_as_any_other(start: Start, store: Store):
    headers = ASYNC | keyed()
    async with start() as rig, http_of(rig) as http:
        refused = await http.post(COMPLETIONS, json=BODY | {"model": "none"}, headers=headers)
        accepted = await http.post(COMPLETIONS, json=BODY, headers=headers)

    assert error_of(refused)[:2] == (404, "model_not_found")
    assert accepted.status_code == 202, "a refusal does not use up the key"


async def test_request_that_is_not_published_leaves_no_row(start: Start, store: Store):
    async with start() as rig, http_of(rig) as http:
        await rig.mesh.broker.delete_queue(topology.GLOBAL_INTERACTIVE)
        await rig.mesh.broker.delete_queue(topology.GLOBAL_REST)
        refused = await http.post(COMPLETIONS, json=BODY, headers=ASYNC | keyed())
        request_id = refused.headers["x-headway-request-id"]
        row = await store.requests.get(ACME, RequestId(request_id))

    assert error_of(refused)[:2] == (503, "mesh_unavailable")
    assert row is None


async def test_running_request_is_cancelled_and_an_ended_one_deleted(start: Start, store: Store):
    async with start() as rig, http_of(rig) as http:
        rig.mesh.script = silent
        await rig.mesh.broker.declare_queue(topology.private_queue("commands"))
        key = topology.COMMAND_CANCEL
        await rig.mesh.broker.bind(
            BindingSpec(exchange=topology.CONTROL, queue="commands", routing_key=key)
        )
        request_id = (await http.post(COMPLETIONS, json=BODY, headers=ASYNC)).json()["id"]
        path = f"/v1/requests/{request_id}"
        cancelling = await http.delete(path)
        command = await rig.mesh.broker.get("commands")
        error = ErrorInfo(message="cancelled", code="cancelled", status=499, type="cancelled")
        failed = RequestFailed(request_id=RequestId(request_id), error=error, at=1.0)
        await end(store, request_id, failed, outcome="cancelled")
        cancelled = (await http.get(path)).json()
        deleted = await http.delete(path)
        gone = [await http.get(path), await http.delete(path)]

    assert (cancelling.status_code, cancelling.json()["status"]) == (202, "queued")
    assert command is not None
    assert msgspec.json.decode(command.body, type=StoredCancel) == StoredCancel(
        tenant=ACME, request_id=RequestId(request_id)
    )
    assert (cancelled["status"], cancelled["error"]["code"]) == ("cancelled", "cancelled")
    assert cancelled["result"] is None
    assert deleted.json() == {"id": request_id, "object": "request", "deleted": True}
    assert {error_of(each) for each in gone} == {(404, "request_not_found", "request_id")}


async def test_no_tenant_sees_cancels_or_deletes_anothers_request(start: Start):
    async with start() as rig, http_of(rig) as http, http_of(rig, "sk-other") as foreign:
        rig.mesh.script = silent
        path = (await http.post(COMPLETIONS, json=BODY, headers=ASYNC)).headers["location"]
        answers = [await foreign.get(path), await foreign.delete(path)]
        unknown = [await http.get(f"/v1/requests/{name}") for name in ("none", "%00", "x" * 129)]
        others = [
            await http.post("/v1/requests"),
            await http.put(path),
            await http.get(path + "/x"),
        ]
        still = await http.get(path)

    assert {error_of(each) for each in (*answers, *unknown)} == {
        (404, "request_not_found", "request_id")
    }
    assert [each.status_code for each in others] == [404, 405, 404]
    assert still.status_code == 200


async def test_requests_that_producers_made_are_shown_with_their_final(start: Start, store: Store):
    """The store does not know the endpoint of a request that was waited for, nor of producers."""
    async with start() as rig, http_of(rig) as http:
        rig.mesh.script = finals = Finals()
        finals.may_answer.set()
        waited = await http.post(COMPLETIONS, json=BODY, headers=keyed())
        request_id = waited.headers["x-headway-request-id"]
        await claim(store, request_id)
        await end(store, request_id, completed(rig.mesh.requests[0].body, *PIECES))
        found = (await http.get(f"/v1/requests/{request_id}")).json()

    assert (found["endpoint"], found["status"]) == (None, "completed")
    assert found["result"]["choices"] == waited.json()["choices"]


async def claim(store: Store, request_id: str) -> None:
    """Claim an id, as a grouper does for a message."""
    asked = ClaimAsked(
        tenant=TenantId("acme"),
        request_id=RequestId(request_id),
        digest="d",
        reply_to=None,
        kept_s=60.0,
        model="tiny-llama",
    )
    await store.requests.claim([asked], "grouper")
