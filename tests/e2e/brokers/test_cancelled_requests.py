"""A cancelled request never begins, whichever process has heard its cancellation and is gone."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import msgspec
import pytest
import pytest_asyncio

from services.mesh.processes import MeshProcess, ProcessMesh
from services.mesh.spec import AgentSpec
from shared.broker import topology
from shared.broker.protocol import Broker, Delivery, OutMessage, PublishOutcome, Settlement
from shared.contracts.base import Decoder, encode, tag_of
from shared.contracts.control import RequestCancel, StoredCancel
from shared.contracts.requests import Reply, RequestCompleted, RequestFailed
from tests.brokers import RabbitServer, eventually, rabbit_targets
from tests.e2e.meshes import LLAMA, QUICK_START, depths, kill, mesh_spec, request
from tests.stores import migrated_settings

pytestmark = [pytest.mark.rabbitmq, pytest.mark.asyncio(loop_scope="module")]

HOLD_S = 4.0
"""Time for which requests are held; the processes are killed meanwhile."""
MAX_TOKENS = 5
_decode: Decoder[Reply] = Decoder(Reply)


@dataclass(frozen=True)
class Rig:
    """A mesh with one agent and a store, and a client of its broker."""

    mesh: ProcessMesh
    broker: Broker
    cancels: list[str]
    """Ids of all requests whose cancellations the broker keeps."""
    http: httpx.AsyncClient

    async def kept(self, count: int) -> None:
        """Wait until the broker keeps *count* cancellations."""
        await eventually(lambda: len(self.cancels) == count)

    async def kill_all_that_heard(self) -> None:
        """Kill and restart every process that may remember a cancellation."""
        names = [name for name in self.mesh.processes if not name.startswith("leader")]
        for name in names:
            await kill(self.mesh, name)
        for name in names:
            await self.mesh.processes[name].start()

    def log_of_agents(self) -> list[dict[str, Any]]:
        logs = [file.read_text() for file in self.mesh.spec.log_dir.glob("agent-*.log")]
        return [json.loads(line) for line in "\n".join(logs).splitlines() if line.startswith("{")]

    def ends(self) -> list[str]:
        """Code or event of the end of each request, as the agents have logged them."""
        lines = [line for line in self.log_of_agents() if "request_id" in line]
        ended = ("request.completed", "request.failed", "run.stopped")
        return [line.get("code") or line["event"] for line in lines if line["event"] in ended]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig(
    rabbit_servers: Callable[[str], RabbitServer], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Rig]:
    directory = tmp_path_factory.mktemp("cancelled")
    store = msgspec.to_builtins(await migrated_settings(None, directory / "data"))
    with rabbit_servers(rabbit_targets()[0]).fresh_url() as url:
        spec = mesh_spec(
            url, directory, agents=1, gateway={"store": store}, planner={"store": store}
        )
        async with (
            ProcessMesh(spec) as mesh,
            mesh.open_broker("headway-test") as broker,
            reading_cancels(broker) as cancels,
            httpx.AsyncClient(base_url=spec.gateway_url, timeout=30.0) as http,
        ):
            yield Rig(mesh, broker, cancels, http)


@asynccontextmanager
async def reading_cancels(broker: Broker) -> AsyncIterator[list[str]]:
    cancels: list[str] = []
    tags = {tag_of(RequestCancel), tag_of(StoredCancel)}

    async def on_delivery(delivery: Delivery) -> None:
        if delivery.kind in tags:
            cancels.append(json.loads(delivery.body)["request_id"])
        await delivery.settle(Settlement.ACK)

    subscription = await broker.read(topology.CANCELS, on_delivery, prefetch=64)
    try:
        yield cancels
    finally:
        await subscription.cancel()


class RawProducer:
    """A producer that neither repeats its cancellation nor stops a run that begins later."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._queue = f"reply.test-{uuid4().hex}"

    async def submit(self, **fields: Any) -> str:
        spec, binding = topology.reply_queue(self._queue)
        await self._broker.declare_queue(spec)
        await self._broker.bind(binding)
        request_id = uuid4().hex
        message = OutMessage(
            body=encode(request(0, max_tokens=MAX_TOKENS, **fields)),
            message_id=request_id,
            reply_to=self._queue,
            user_id="guest",
        )
        outcome = await self._broker.publish(topology.REQUESTS, topology.REST_KEY, message)
        assert outcome is PublishOutcome.CONFIRMED
        return request_id

    async def cancel(self, request_id: str) -> None:
        cancel = RequestCancel(request_id=request_id, reply_to=self._queue)
        await self._broker.publish(
            topology.CONTROL, topology.CONTROL_CANCEL, OutMessage.transient(cancel)
        )

    async def replies(self) -> list[Reply]:
        """All replies, with a final one at the end."""
        found: list[Reply] = []

        async def has_final() -> bool:
            while (delivery := await self._broker.get(self._queue)) is not None:
                found.append(_decode(delivery.body))
                await delivery.settle(Settlement.ACK)
            return bool(found) and isinstance(found[-1], RequestFailed | RequestCompleted)

        await eventually(has_final, within_s=60.0)
        return found


def assert_cancelled(replies: list[Reply]) -> None:
    """The only reply is the final; a request that began has others before."""
    (failed,) = replies
    assert isinstance(failed, RequestFailed)
    assert failed.error.code == "cancelled"


async def test_held_requests_stay_cancelled_when_all_that_heard_of_it_are_killed(rig: Rig):
    """A producer cancels, an HTTP client leaves, and another deletes its stored request."""
    producer, other = RawProducer(rig.broker), RawProducer(rig.broker)
    num_kept, ends = len(rig.cancels), rig.ends()
    await eventually(lambda: is_up(rig))
    until = time.time() + HOLD_S
    request_id = await producer.submit(not_before=until)
    await other.submit(not_before=until)
    deleted = await delete(rig, until)
    await asyncio.gather(producer.cancel(request_id), leave(rig, until))
    await rig.kept(num_kept + 3)
    await rig.kill_all_that_heard()

    assert_cancelled(await producer.replies())
    assert isinstance((await other.replies())[-1], RequestCompleted)
    await eventually(lambda: is_cancelled(rig, deleted))
    await eventually(lambda: len(rig.ends()) == len(ends) + 4)
    assert sorted(rig.ends()[len(ends) :]) == ["cancelled"] * 3 + ["request.completed"]


async def test_a_new_agent_does_not_begin_what_was_cancelled_in_a_lane_before_it_came(
    rig: Rig, tmp_path: Path
):
    producer, other = RawProducer(rig.broker), RawProducer(rig.broker)
    await rig.mesh.processes["agent-a0"].stop()
    request_id = await producer.submit()
    await other.submit()

    async def both_wait() -> bool:
        return sum((await depths(rig.broker, rig.mesh)).values()) == 2

    await eventually(both_wait)
    num_kept = len(rig.cancels)
    await producer.cancel(request_id)
    await rig.kept(num_kept + 1)
    settings = {"initial_model": LLAMA, "drain_timeout_s": 5.0} | QUICK_START
    new = msgspec.structs.replace(
        rig.mesh.spec, agents=(AgentSpec(instance_id="new", settings=settings),)
    )
    _, values = new.service_settings()["agent-new"]
    agent = MeshProcess("agent-new", service="agent", settings=values, directory=tmp_path)
    await agent.start()
    try:
        assert_cancelled(await producer.replies())
        assert isinstance((await other.replies())[-1], RequestCompleted)
    finally:
        await agent.stop()
        await rig.mesh.processes["agent-a0"].start()


async def leave(rig: Rig, until: float) -> None:
    """A client disconnects while its request is held."""
    with pytest.raises(httpx.ReadTimeout):
        await rig.http.post("/v1/completions", json=body(until), timeout=1.0)


async def delete(rig: Rig, until: float) -> str:
    """A client deletes a stored request; return the request's path."""
    headers = {"prefer": "respond-async"}
    accepted = await rig.http.post("/v1/completions", json=body(until), headers=headers)
    path = f"/v1/requests/{accepted.json()['id']}"
    assert (await rig.http.delete(path)).status_code == 202
    return path


async def is_cancelled(rig: Rig, path: str) -> bool:
    try:
        return str((await rig.http.get(path)).json()["status"]) == "cancelled"
    except (httpx.HTTPError, KeyError):  # the gateway has been restarted just now
        return False


def body(until: float) -> dict[str, Any]:
    return {"model": LLAMA, "prompt": "held", "max_tokens": MAX_TOKENS, "not_before": until}


async def is_up(rig: Rig) -> bool:
    try:
        return (await rig.http.get("/ready")).status_code == 200
    except httpx.TransportError:
        await asyncio.sleep(0.1)
        return False
