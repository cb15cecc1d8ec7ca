"""Background responses over two gateways, whose streams are cut and of which one is killed."""

import asyncio
import json
import random
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import msgspec
import pytest
import pytest_asyncio
from sqlalchemy import func, select

from services.mesh.processes import MeshProcess, ProcessMesh
from shared.models.tiny import TINY_MODELS, make_tiny_models
from shared.store.schema import responses
from shared.store.settings import StoreSettings
from tests.brokers import RabbitServer, eventually, rabbit_targets
from tests.e2e.meshes import LLAMA, is_ready, mesh_spec, second_gateway
from tests.stores import migrated_settings, open_store

pytestmark = [
    pytest.mark.slow,
    pytest.mark.rabbitmq,
    pytest.mark.vllm,
    pytest.mark.asyncio(loop_scope="module"),
]
NUM_STREAMS, NUM_CUTS, NUM_TOKENS = 40, 5, 120
PATIENCE_S = 300.0
Event = dict[str, Any]


@dataclass(frozen=True)
class Rig:
    """Two gateways of one mesh."""

    clients: tuple[httpx.AsyncClient, httpx.AsyncClient]
    second: MeshProcess
    store: StoreSettings


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig(
    rabbit_servers: Callable[[str], RabbitServer], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Rig]:
    directory = tmp_path_factory.mktemp("responses")
    settings = await migrated_settings(None, directory / "data")
    store = msgspec.to_builtins(settings)
    models = make_tiny_models(
        directory / "models", weights=False, models={LLAMA: TINY_MODELS[LLAMA]}
    )
    with rabbit_servers(rabbit_targets()[0]).fresh_url() as url:
        spec = mesh_spec(
            url,
            directory,
            registry=models,
            agents=1,
            gateway={"store": store},
            planner={"store": store},
        )
        limits = httpx.Limits(max_connections=None)
        async with (
            # Before the mesh, since both gateways take long to import vLLM.
            second_gateway(spec, directory) as (second, second_url),
            ProcessMesh(spec, ready_timeout_s=PATIENCE_S),
            httpx.AsyncClient(base_url=spec.gateway_url, timeout=60.0, limits=limits) as one,
            httpx.AsyncClient(base_url=second_url, timeout=60.0, limits=limits) as two,
        ):
            await eventually(lambda: is_ready(second, second_url), within_s=PATIENCE_S)
            yield Rig((one, two), second, settings)


def asked(number: int = 0, **fields: Any) -> Event:
    values = {"model": LLAMA, "input": f"Count to {number}.", "max_output_tokens": NUM_TOKENS}
    return values | {"background": True, "ignore_eos": True, "temperature": 1.0} | fields


async def events_of(
    client: httpx.AsyncClient, response_id: str, *, after: int = -1, most: int | None = None
) -> list[Event]:
    """Events after a number, at most *most*; fewer if the connection breaks off."""
    found: list[Event] = []
    params = {"stream": "true", "starting_after": str(after)}
    try:
        async with client.stream("GET", f"/v1/responses/{response_id}", params=params) as answer:
            answer.raise_for_status()
            async for line in answer.aiter_lines():
                if line.startswith("data: "):
                    found.append(json.loads(line[6:]))
                if len(found) == most:
                    break
    except httpx.TransportError:
        pass
    return found


def text_in(events: Sequence[Event]) -> str:
    kind = "response.output_text.delta"
    return "".join(event["delta"] for event in events if event["type"] == kind)


def text_of(response: Event) -> str:
    return "".join(
        part["text"]
        for item in response["output"]
        if item["type"] == "message"
        for part in item["content"]
    )


async def read_in_pieces(
    clients: Sequence[httpx.AsyncClient], response_id: str, seed: int
) -> list[Event]:
    """Read a stream that is cut several times, and continues at another gateway each time."""
    chance, got = random.Random(seed), list[Event]()
    cuts = 0
    while not got or got[-1]["type"] not in ("response.completed", "response.incomplete"):
        # Ten events belong to any answer, however its text is cut.
        most = chance.randint(1, 2) if cuts < NUM_CUTS else None
        position = got[-1]["sequence_number"] if got else -1
        client = clients[(seed + cuts) % len(clients)]
        found = await events_of(client, response_id, after=position, most=most)
        got += found
        cuts += 1
        if not found:
            await asyncio.sleep(0.2)
    assert cuts >= NUM_CUTS
    return got


async def test_cut_streams_have_every_event_once_though_a_gateway_is_killed(rig: Rig):
    bodies = [asked(number) for number in range(NUM_STREAMS)]
    made = await asyncio.gather(
        *(
            rig.clients[number % 2].post("/v1/responses", json=each)
            for number, each in enumerate(bodies)
        )
    )
    assert [each.status_code for each in made] == [200] * NUM_STREAMS
    ids = [each.json()["id"] for each in made]
    reading = [
        asyncio.create_task(read_in_pieces(rig.clients, response_id, seed))
        for seed, response_id in enumerate(ids)
    ]

    async def are_under_way() -> bool:
        # Together: answers are short, and one after the other could miss all of them.
        asking = (rig.clients[0].get(f"/v1/responses/{each}") for each in ids[1::2])
        found = await asyncio.gather(*asking)
        return "in_progress" in {each.json()["status"] for each in found}

    await eventually(are_under_way)
    rig.second.signal(signal.SIGKILL)
    await rig.second.wait()
    async with asyncio.timeout(PATIENCE_S):
        received = await asyncio.gather(*reading)

    for response_id, events in zip(ids, received, strict=True):
        stored = await events_of(rig.clients[0], response_id)
        final = (await rig.clients[0].get(f"/v1/responses/{response_id}")).json()
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert events == stored
        assert final == events[-1]["response"]
        assert text_in(events) == text_of(final)
        assert final["usage"]["output_tokens"] == NUM_TOKENS
    await rig.second.start()


async def test_a_conversation_is_cancelled_and_deleted(rig: Rig):
    client = rig.clients[0]
    first = (await client.post("/v1/responses", json=asked(background=False, store=True))).json()
    second = (
        await client.post("/v1/responses", json=asked(1, previous_response_id=first["id"]))
    ).json()
    items = (await client.get(f"/v1/responses/{second['id']}/input_items")).json()["data"]
    long = (await client.post("/v1/responses", json=asked(max_output_tokens=1500))).json()
    cancelled = (await client.post(f"/v1/responses/{long['id']}/cancel")).json()
    events = await events_of(client, long["id"])
    deleted = (await client.delete(f"/v1/responses/{long['id']}")).json()
    gone = await client.get(f"/v1/responses/{long['id']}")

    assert [item["role"] for item in items] == ["user", "assistant", "user"]
    assert items[1]["content"][0]["text"] == text_of(first)
    assert cancelled["status"] == "cancelled"
    assert events[-1]["type"] == "response.cancelled"
    assert text_in(events) == text_of(cancelled)
    assert deleted == {"id": long["id"], "object": "response", "deleted": True}
    assert gone.status_code == 404


async def num_stored(rig: Rig) -> int:
    """Number of responses in the store, also of those that clients cannot see."""
    async with open_store(rig.store) as store, store.database.read() as connection:
        found = await connection.execute(select(func.count()).select_from(responses))
        return int(found.scalar_one())


async def test_a_request_that_the_model_refuses_is_not_stored(rig: Rig):
    client = rig.clients[0]
    await client.post("/v1/responses", json=asked(background=False, store=True))
    before = await num_stored(rig)
    answers = [
        await client.post("/v1/responses", json=asked(temperature="hot")),
        await client.post("/v1/responses", json=asked(input="long " * 100_000)),
    ]

    assert [answer.status_code for answer in answers] == [400, 400]
    assert await num_stored(rig) == before > 0


async def test_a_response_that_comes_too_late_fails_with_the_reason(rig: Rig):
    client = rig.clients[0]
    made = (
        await client.post("/v1/responses", json=asked(ttl_s=0.5, max_output_tokens=1500))
    ).json()
    events = await events_of(client, made["id"])

    assert events[-1]["type"] == "response.failed"
    assert events[-1]["response"]["error"]["code"] == "deadline_expired"
