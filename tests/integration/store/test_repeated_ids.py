"""Messages under one id run once, over RabbitMQ and over the in-process broker."""

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec
import pytest
import pytest_asyncio

from ops.ports import free_port
from services.mesh.spec import EMBEDDED, AgentSpec, MeshSpec
from services.planner.grouper.stored.claims import Claims
from shared.broker import topology
from shared.broker.protocol import Broker, Delivery, HeaderValue, OutMessage, Settlement
from shared.contracts.base import Decoder, RequestId, TenantId, encode
from shared.contracts.errors import StoreFullError
from shared.contracts.ingress import IDEMPOTENT_HEADER, InferenceRequest
from shared.contracts.qos import Slo
from shared.contracts.requests import Final, Reply, RequestCompleted, RequestFailed, RunStarted
from shared.models.tiny import make_tiny_models
from shared.store.requests.records import Claim
from shared.store.settings import StoreSettings
from shared.store.store import Store
from tests.brokers import MEMORY, RabbitServer, eventually
from tests.conftest import RABBIT_PARAMS
from tests.integration.ends.broker_mesh import BrokerMesh
from tests.queued import MODEL
from tests.stores import migrated_settings, open_store, place

pytestmark = pytest.mark.asyncio(loop_scope="module")

WITHIN_S = 30.0
TENANT = TenantId("guest")
decode: Decoder[Reply] = Decoder(Reply)


@dataclass
class Client:
    """A plain AMQP client with one reply queue."""

    broker: Broker
    queue: str = field(default_factory=lambda: f"reply.plain.{uuid4().hex}")
    replies: list[Reply] = field(default_factory=list)

    async def listen(self) -> None:
        spec, binding = topology.reply_queue(self.queue)
        await self.broker.declare_queue(spec)
        await self.broker.bind(binding)

        async def on_reply(delivery: Delivery) -> None:
            self.replies.append(decode(delivery.body))
            await delivery.settle(Settlement.ACK)

        await self.broker.consume(self.queue, on_reply, prefetch=100)

    async def publish(
        self,
        request_id: str,
        *,
        headers: dict[str, HeaderValue] | None = None,
        reply: bool = True,
        **fields: Any,
    ) -> None:
        given: dict[str, HeaderValue] = {IDEMPOTENT_HEADER: "true"}
        message = OutMessage(
            body=encode(request(**fields)),
            kind="inference.request.v1",
            message_id=request_id,
            reply_to=self.queue if reply else None,
            headers=given if headers is None else headers,
            user_id="guest",
        )
        await self.broker.publish(topology.REQUESTS, topology.REST_KEY, message)

    def finals(self, request_id: str) -> list[Final]:
        return [
            reply
            for reply in self.replies
            if isinstance(reply, RequestCompleted | RequestFailed)
            and reply.request_id == request_id
        ]

    def starts(self, request_id: str) -> int:
        return sum(
            isinstance(reply, RunStarted) and reply.request_id == request_id
            for reply in self.replies
        )

    async def finals_of(self, request_id: str, number: int) -> list[Final]:
        await eventually(lambda: len(self.finals(request_id)) >= number, within_s=WITHIN_S)
        return self.finals(request_id)


def request(**fields: Any) -> InferenceRequest:
    values: dict[str, Any] = {
        "model": MODEL,
        "prompt": (10, 11, 12),
        "max_tokens": 8,
        "temperature": 1.0,
        "ignore_eos": True,
        "slo": Slo(ttlt_s=600.0),
    }
    return InferenceRequest(**(values | fields))


@dataclass
class Rig:
    """A mesh with a store, a client and a view of the store."""

    client: Client
    store: Store
    settings: StoreSettings


@asynccontextmanager
async def opened(directory: Path, url: str | None) -> AsyncIterator[Rig]:
    settings = await migrated_settings(None, directory / "data")
    impatient = msgspec.structs.replace(settings, timeout_s=1.0)
    planner = {
        "store": msgspec.to_builtins(impatient),
        "leader": {"settle_s": 0.5},
        "grouper": {"unknown_model_wait_s": 0.2},
    }
    spec = MeshSpec(
        broker=EMBEDDED,
        registry=make_tiny_models(directory / "models", weights=False),
        log_dir=directory / "log",
        gateway_port=free_port(),
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
        planner=planner,
    )
    async with (
        BrokerMesh(spec, url) as mesh,
        mesh.open_broker("client") as broker,
        open_store(settings) as store,
    ):
        await store.check()
        client = Client(broker)
        await client.listen()
        yield Rig(client, store, settings)


@pytest_asyncio.fixture(
    scope="module",
    loop_scope="module",
    params=[pytest.param(MEMORY, marks=pytest.mark.slow), *RABBIT_PARAMS],
)
async def rig(
    request: Any,
    rabbit_servers: Callable[[str], RabbitServer],
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[Rig]:
    """The rig of all tests; each has ids of its own."""
    directory = tmp_path_factory.mktemp("mesh")
    if request.param == MEMORY:
        async with opened(directory, None) as made:
            yield made
        return
    with rabbit_servers(request.param).fresh_url() as url:
        async with opened(directory, url) as made:
            yield made


async def test_repeats_join_the_run_and_later_ones_get_its_final(rig: Rig):
    client = rig.client
    await asyncio.gather(*(client.publish("r-1") for _ in range(3)))
    joined = await client.finals_of("r-1", 3)
    await client.publish("r-1")
    repeated = await client.finals_of("r-1", 4)

    # Random sampling: equal answers come from one run.
    answers = {final.token_ids for final in repeated if isinstance(final, RequestCompleted)}
    assert len(joined) == 3
    assert len(answers) == 1
    assert {final.run_id for final in repeated} == {joined[0].run_id}
    assert client.starts("r-1") == 1


async def test_without_the_header_a_repeat_has_no_store(rig: Rig):
    await rig.client.publish("r-2", headers={})
    await rig.client.finals_of("r-2", 1)

    assert await rig.store.requests.get(TENANT, RequestId("r-2")) is None


async def test_the_store_has_the_final_of_a_request_without_a_reply_queue(rig: Rig):
    await rig.client.publish("r-3", reply=False)

    async def has_ended() -> bool:
        row = await rig.store.requests.get(TENANT, RequestId("r-3"))
        return row is not None and row.outcome == "completed"

    await eventually(has_ended, within_s=WITHIN_S)
    row = await rig.store.requests.get(TENANT, RequestId("r-3"))
    assert row is not None
    assert row.lane is not None
    assert row.lane.startswith("lane.")
    await rig.client.publish("r-3")
    [final] = await rig.client.finals_of("r-3", 1)
    assert encode(final) == row.final


async def test_another_body_under_the_id_is_refused(rig: Rig):
    await rig.client.publish("r-4")
    await rig.client.finals_of("r-4", 1)
    await rig.client.publish("r-4", max_tokens=9)
    finals = await rig.client.finals_of("r-4", 2)

    assert isinstance(finals[0], RequestCompleted)
    assert isinstance(finals[1], RequestFailed)
    assert (finals[1].error.code, finals[1].error.status) == ("id_conflict", 409)


async def test_a_refused_request_can_be_corrected_under_its_id(rig: Rig):
    await rig.client.publish("r-5", model="unknown")
    await rig.client.finals_of("r-5", 1)
    await rig.client.publish("r-5")
    finals = await rig.client.finals_of("r-5", 2)

    assert [type(final) for final in finals] == [RequestFailed, RequestCompleted]


async def test_an_invalid_header_is_refused_by_its_name(rig: Rig):
    await rig.client.publish("r-6", headers={IDEMPOTENT_HEADER: "yes"})
    [final] = await rig.client.finals_of("r-6", 1)

    assert isinstance(final, RequestFailed)
    assert final.error.param == IDEMPOTENT_HEADER


async def test_a_held_request_runs_once_at_its_time(rig: Rig):
    loop = asyncio.get_running_loop()
    not_before = await rig.store.database.time() + 1.5
    begun = loop.time()
    await asyncio.gather(*(rig.client.publish("r-7", not_before=not_before) for _ in range(2)))
    await rig.client.finals_of("r-7", 2)

    assert loop.time() - begun > 1.0
    assert rig.client.starts("r-7") == 1


async def test_a_request_under_an_id_is_refused_at_once_if_the_disk_is_full(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
):
    async def claim(*_given: object) -> Claim:
        raise StoreFullError("the disk of the database is full")

    with monkeypatch.context() as patched:
        patched.setattr(Claims, "claim", claim)
        await rig.client.publish("r-10")
        [refused] = await rig.client.finals_of("r-10", 1)
    await rig.client.publish("r-10")
    _, completed = await rig.client.finals_of("r-10", 2)

    assert isinstance(refused, RequestFailed)
    assert (refused.error.code, refused.error.status) == ("over_capacity", 503)
    assert "the disk of the database is full" in refused.error.message
    assert isinstance(completed, RequestCompleted)


async def test_requests_under_ids_wait_while_the_database_is_away_and_others_do_not(rig: Rig):
    file = place(rig.settings).sqlite_file
    assert file is not None
    writer = await asyncio.to_thread(_locked, file)
    try:
        await rig.client.publish("r-8")
        await rig.client.publish("r-9", headers={})
        await rig.client.finals_of("r-9", 1)
        waiting = rig.client.finals("r-8")
    finally:
        writer.close()
    await rig.client.finals_of("r-8", 1)

    assert waiting == []


def _locked(file: Path) -> sqlite3.Connection:
    """Lock the database, as a process that hangs in the middle of a write does."""
    connection = sqlite3.connect(file, isolation_level=None, check_same_thread=False)
    connection.execute("BEGIN IMMEDIATE")
    return connection
