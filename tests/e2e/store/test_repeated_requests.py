"""Keys, answers that are collected later, and status, over two gateways and three groupers."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import httpx
import msgspec
import pytest
import pytest_asyncio

from ops.bench.postgres import PrivatePostgres
from services.gateway.requests.ids import call_id_of
from services.mesh.processes import MeshProcess, ProcessMesh
from shared.broker import topology
from shared.broker.protocol import OutMessage, Settlement
from shared.contracts.base import Decoder, RequestId, TenantId, encode, tag_of
from shared.contracts.stored import RequestAsked, RequestState, RequestStatus
from tests.brokers import RabbitServer, eventually, rabbit_targets
from tests.e2e.meshes import LLAMA, ends_of, is_ready, mesh_spec, second_gateway
from tests.postgres import new_postgres
from tests.stores import migrated_settings

pytestmark = [pytest.mark.rabbitmq, pytest.mark.asyncio(loop_scope="module")]

KEYS = {"sk-acme": "acme", "sk-other": "other"}
COMPLETIONS = "/v1/completions"
ASYNC = {"prefer": "respond-async"}
STORE_TIMEOUT_S = 1.0
LONG_TOKENS = 1500
LEFT_TOKENS = 600
"""Length of an answer whose client leaves before its end."""
decode: Decoder[RequestStatus] = Decoder(RequestStatus)


@dataclass(frozen=True)
class Rig:
    """A mesh with two gateways and a store on a PostgreSQL of its own."""

    mesh: ProcessMesh
    gateways: tuple[httpx.AsyncClient, httpx.AsyncClient]
    second: MeshProcess
    """The gateway that is not one of the mesh's processes."""
    postgres: PrivatePostgres


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig(
    rabbit_servers: Callable[[str], RabbitServer], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Rig]:
    directory = tmp_path_factory.mktemp("requests")
    postgres = await asyncio.to_thread(new_postgres)
    try:
        await asyncio.to_thread(postgres.start)
        settings = await migrated_settings(
            postgres.url(await postgres.create()), directory / "data"
        )
        store = msgspec.to_builtins(settings) | {"timeout_s": STORE_TIMEOUT_S}
        with rabbit_servers(rabbit_targets()[0]).fresh_url() as url:
            spec = mesh_spec(
                url,
                directory,
                agents=1,
                groupers=3,
                gateway={"api_keys": KEYS, "store": store},
                planner={"store": store},
            )
            headers = {"authorization": "Bearer sk-acme"}
            async with (
                ProcessMesh(spec) as mesh,
                second_gateway(spec, directory) as (second, second_url),
                httpx.AsyncClient(base_url=spec.gateway_url, headers=headers, timeout=60.0) as one,
                httpx.AsyncClient(base_url=second_url, headers=headers, timeout=60.0) as two,
            ):
                await eventually(lambda: is_ready(second, second_url))
                yield Rig(mesh, (one, two), second, postgres)
    finally:
        await asyncio.to_thread(postgres.close)


def body(**fields: Any) -> dict[str, Any]:
    """A random answer: equal ones come from one run."""
    values = {"model": LLAMA, "prompt": "queues", "max_tokens": 40, "temperature": 1.0}
    return values | fields


def keyed(key: str | None = None) -> dict[str, str]:
    return {"idempotency-key": key or uuid4().hex}


def error_of(found: httpx.Response) -> tuple[int, str, str | None]:
    error = found.json()["error"]
    return found.status_code, error["code"], error["param"]


async def until(client: httpx.AsyncClient, path: str, *expected: str) -> dict[str, Any]:
    """The object of a request, once its status is one of the expected ones."""
    found: dict[str, Any] = {}

    async def has_come() -> bool:
        nonlocal found
        found = (await client.get(path)).raise_for_status().json()
        return found["status"] in expected

    await eventually(has_come)
    return found


async def test_key_gives_one_answer_at_both_gateways(rig: Rig):
    headers, asked = keyed(), body()
    together = await asyncio.gather(
        *(client.post(COMPLETIONS, json=asked, headers=headers) for client in rig.gateways * 4)
    )
    later = [await client.post(COMPLETIONS, json=asked, headers=headers) for client in rig.gateways]
    other = await rig.gateways[0].post(COMPLETIONS, json=asked, headers=keyed())

    assert {each.status_code for each in (*together, *later)} == {200}
    assert len({each.content for each in (*together, *later)}) == 1
    assert other.json()["choices"] != later[0].json()["choices"]


async def test_key_gives_one_answer_to_streams_also(rig: Rig):
    headers, asked = keyed(), body(stream=True, stream_options={"include_usage": True})
    together = await asyncio.gather(
        *(client.post(COMPLETIONS, json=asked, headers=headers) for client in rig.gateways * 2)
    )
    later = await rig.gateways[1].post(COMPLETIONS, json=asked, headers=headers)

    events = [
        [json.loads(line[6:]) for line in each.text.split("\n\n") if line[6:7] == "{"]
        for each in (*together, later)
    ]
    assert len({"".join(c["text"] for e in each for c in e["choices"]) for each in events}) == 1
    assert len({each[0]["id"] for each in events}) == 1
    assert len({json.dumps(each[-1]["usage"]) for each in events}) == 1
    results = [[e["headway"]["request_id"] for e in each if "headway" in e] for each in events]
    assert results == [results[0]] * len(events)
    assert len(results[0]) == 1
    assert all(each.text.endswith("data: [DONE]\n\n") for each in (*together, later))


async def test_other_body_under_the_key_is_a_conflict_at_both_gateways(rig: Rig):
    headers = keyed()
    (await rig.gateways[0].post(COMPLETIONS, json=body(), headers=headers)).raise_for_status()
    others = [
        await client.post(COMPLETIONS, json=body(max_tokens=41), headers=headers)
        for client in rig.gateways
    ]
    foreign = await rig.gateways[1].post(
        COMPLETIONS,
        json=body(max_tokens=41),
        headers=headers | {"authorization": "Bearer sk-other"},
    )

    assert [error_of(each) for each in others] == [(409, "id_conflict", "idempotency-key")] * 2
    assert foreign.status_code == 200


def outcomes_at(gateway: MeshProcess, request_id: str) -> list[str]:
    """Outcomes of a request's answers, by the log of a gateway."""
    lines = gateway.log_file.read_text().splitlines()
    answers = [line for line in lines if '"event":"request.answered"' in line]
    own = [line for line in answers if f'"request_id":"{request_id}"' in line]
    return [json.loads(line)["outcome"] for line in own]


async def test_client_that_leaves_gets_its_answer_from_the_other_gateway(rig: Rig):
    """The run continues when the gateway has noticed that its client has left."""
    headers, asked = keyed(), body(max_tokens=LEFT_TOKENS, ignore_eos=True)
    request_id = call_id_of(TenantId("acme"), headers["idempotency-key"])
    path = f"/v1/requests/{request_id}"

    async def is_running() -> bool:
        found: dict[str, Any] = (await rig.gateways[1].get(path)).json()
        return found.get("status") == "running"

    leaving = asyncio.create_task(rig.gateways[0].post(COMPLETIONS, json=asked, headers=headers))
    await eventually(is_running)
    leaving.cancel()
    await asyncio.wait({leaving})
    first = rig.mesh.processes["gateway"]
    await eventually(lambda: outcomes_at(first, request_id) == ["cancelled"])
    answer = await rig.gateways[1].post(COMPLETIONS, json=asked, headers=headers)
    await eventually(lambda: outcomes_at(rig.second, request_id) == ["completed"])
    await eventually(lambda: bool(ends_of(rig.mesh, request_id)))
    found = (await rig.gateways[1].get(path)).json()

    assert leaving.cancelled()
    assert answer.status_code == 200
    assert answer.json()["headway"]["request_id"] == request_id
    assert answer.json()["usage"]["completion_tokens"] == LEFT_TOKENS
    assert outcomes_at(first, request_id) == ["cancelled"]
    assert found["attempts"] == 1
    assert ends_of(rig.mesh, request_id) == ["request.completed"]


async def test_deferred_answer_is_collected_at_the_other_gateway(rig: Rig):
    headers, asked = ASYNC | keyed(), body()
    accepted = await rig.gateways[0].post(COMPLETIONS, json=asked, headers=headers)
    path = accepted.headers["location"]
    found = await until(rig.gateways[1], path, "completed")
    repeated = await rig.gateways[1].post(COMPLETIONS, json=asked, headers=headers)
    waited = await rig.gateways[0].post(
        COMPLETIONS, json=asked, headers={"idempotency-key": headers["idempotency-key"]}
    )

    assert accepted.status_code == 202
    assert (found["endpoint"], found["model"], found["instance"]) == (COMPLETIONS, LLAMA, "a0")
    assert found["attempts"] >= 1
    assert found["created_at"] <= found["grouped_at"] <= found["started_at"] <= found["ended_at"]
    assert found["lane"].startswith("lane.")
    assert (repeated.status_code, repeated.json()) == (200, found)
    assert waited.json() == found["result"]


async def test_running_request_is_cancelled_through_the_other_gateway(rig: Rig):
    asked = body(max_tokens=LONG_TOKENS, ignore_eos=True)
    accepted = await rig.gateways[0].post(COMPLETIONS, json=asked, headers=ASYNC)
    path = accepted.headers["location"]
    await until(rig.gateways[1], path, "running")
    cancelling = await rig.gateways[1].delete(path)
    found = await until(rig.gateways[0], path, "cancelled", "completed")
    deleted = await rig.gateways[0].delete(path)
    gone = await rig.gateways[1].get(path)

    assert cancelling.status_code == 202
    assert (found["status"], found["error"]["code"]) == ("cancelled", "cancelled")
    assert deleted.json()["deleted"] is True
    assert error_of(gone)[:2] == (404, "request_not_found")


async def test_producer_asks_about_a_request_over_amqp(rig: Rig):
    accepted = await rig.gateways[0].post(COMPLETIONS, json=body(), headers=ASYNC)
    request_id = accepted.json()["id"]
    await until(rig.gateways[0], accepted.headers["location"], "completed")
    async with rig.mesh.open_broker("asker") as broker:
        queue, binding = topology.reply_queue(f"reply.asker.{uuid4().hex}")
        await broker.declare_queue(queue)
        await broker.bind(binding)
        asked = RequestAsked(
            request_id=RequestId(request_id), reply_to=queue.name, tenant=TenantId("acme")
        )
        message = OutMessage(body=encode(asked), kind=tag_of(RequestAsked), user_id="guest")
        await broker.publish(topology.CONTROL, topology.CONTROL_REQUEST, message)
        answers: list[RequestStatus] = []

        async def arrived() -> bool:
            if delivery := await broker.get(queue.name):
                answers.append(decode(delivery.body))
                await delivery.settle(Settlement.ACK)
            return bool(answers)

        await eventually(arrived)
        await broker.delete_queue(queue.name)

    (answer,) = answers
    assert answer.problem is None
    assert (answer.state, answer.request_id) == (RequestState.COMPLETED, request_id)


async def test_while_the_database_is_away_requests_without_keys_are_served(rig: Rig):
    """The last test of the module: it stops the database for a while."""
    headers, asked = keyed(), body()
    first = await rig.gateways[0].post(COMPLETIONS, json=asked, headers=headers)
    await asyncio.to_thread(rig.postgres.stop)
    try:
        await eventually(lambda: _is_refused(rig.gateways[0], asked, headers))
        refused = [
            await rig.gateways[0].post(COMPLETIONS, json=asked, headers=headers),
            await rig.gateways[0].post(COMPLETIONS, json=asked, headers=ASYNC),
            await rig.gateways[0].get("/v1/requests/r1"),
        ]
        plain = await rig.gateways[0].post(COMPLETIONS, json=asked)
    finally:
        await asyncio.to_thread(rig.postgres.start)
    repeated = await _until_served(rig.gateways[0], asked, headers)

    assert [error_of(each)[:2] for each in refused] == [(503, "store_unavailable")] * 3
    assert [each.headers["retry-after"] for each in refused] == ["5"] * 3
    assert plain.status_code == 200
    assert repeated.content == first.content


async def _is_refused(client: httpx.AsyncClient, asked: Any, headers: dict[str, str]) -> bool:
    """Whether the gateway knows that the database is away; before, the request waits for it."""
    try:
        found = await client.post(COMPLETIONS, json=asked, headers=headers, timeout=2.0)
    except httpx.TimeoutException:
        return False
    return found.status_code == 503


async def _until_served(
    client: httpx.AsyncClient, asked: Any, headers: dict[str, str]
) -> httpx.Response:
    found: list[httpx.Response] = []

    async def served() -> bool:
        found.append(await client.post(COMPLETIONS, json=asked, headers=headers))
        return found[-1].status_code == 200

    await eventually(served)
    return found[-1]
