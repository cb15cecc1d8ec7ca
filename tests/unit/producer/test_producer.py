"""A producer against a broker: what it publishes, and what it makes of replies."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import msgspec
import pytest

from shared.broker import topology
from shared.broker.memory import MemoryBroker
from shared.broker.memory_hub import MemoryHub
from shared.broker.protocol import BindingSpec, Broker, Delivery, OutMessage, Settlement
from shared.contracts.base import RequestId, RunId, encode
from shared.contracts.control import Control, RequestCancel, RunStop, StopReason
from shared.contracts.errors import BrokerUnavailableError, CapacityError, ContractError
from shared.contracts.ingress import InferenceRequest
from shared.contracts.qos import Slo
from shared.contracts.requests import ReplyMode, RequestFailed
from shared.producer.generation import RunDivergedError
from shared.producer.producer import Producer
from shared.runtime.clock import SystemClock
from tests.brokers import eventually
from tests.unit.producer.builders import (
    ANSWER,
    REQUEST,
    chunk,
    completed,
    failed,
    started,
    text_of,
    tokens,
)

BODY = InferenceRequest(model="m", prompt="hello", id=REQUEST)


@dataclass
class Rig:
    """A producer, and the far side of the broker."""

    hub: MemoryHub
    far: Broker
    producer: Producer

    async def reply(self, *messages: msgspec.Struct) -> None:
        for message in messages:
            await self.far.publish(
                topology.REPLIES, self.producer.reply_queue, OutMessage(body=encode(message))
            )

    async def requested(self, queue: str = topology.GLOBAL_REST) -> Delivery:
        delivery = await self.far.get(queue)
        assert delivery is not None
        await delivery.settle(Settlement.ACK)
        return delivery

    async def controlled(self) -> Control:
        """The next control message to all, or to the instance of run `b`."""
        found: list[Delivery] = []

        async def arrived() -> bool:
            if delivery := await self.far.get("control"):
                found.append(delivery)
            return bool(found)

        await eventually(arrived)
        return msgspec.json.decode(found[0].body, type=Control)


@asynccontextmanager
async def rig(*, user_id: str | None = None, silence_s: float = 10.0) -> AsyncIterator[Rig]:
    hub = MemoryHub()
    async with MemoryBroker(hub) as far, MemoryBroker(hub) as near:
        await topology.declare(far)
        await far.declare_queue(topology.private_queue("control"))
        for key in topology.control_keys("instance-of-b"):
            await far.bind(BindingSpec(exchange=topology.CONTROL, queue="control", routing_key=key))
        async with Producer(
            near,
            name="test",
            clock=SystemClock(),
            user_id=user_id,
            give_up_after_s=0.1,
            silence_s=silence_s,
        ) as producer:
            yield Rig(hub, far, producer)


async def test_request_carries_what_the_mesh_needs():
    async with rig(user_id="guest") as it:
        await it.producer.submit(BODY, reply=ReplyMode.FINAL, traceparent="00-1-2-01")

        delivery = await it.requested()

    sent = msgspec.json.decode(delivery.body, type=InferenceRequest)
    assert sent == msgspec.structs.replace(BODY, reply=ReplyMode.FINAL)
    assert (delivery.message_id, delivery.correlation_id) == (REQUEST, REQUEST)
    assert delivery.reply_to == it.producer.reply_queue
    assert delivery.user_id == "guest"
    assert delivery.headers["traceparent"] == "00-1-2-01"


async def test_interactive_requests_take_the_fast_queue():
    async with rig() as it:
        body = msgspec.structs.replace(BODY, slo=Slo(ttft_s=1.0))
        await it.producer.submit(body, reply=ReplyMode.STREAM)

        assert (await it.requested(topology.GLOBAL_INTERACTIVE)).message_id == REQUEST


async def test_generation_gives_parts_and_the_final():
    async with rig() as it:
        generation = await it.producer.submit(BODY, reply=ReplyMode.STREAM)
        await it.reply(started("a"), tokens("a", 0, 5), tokens("a", 5, 9), completed("a"))

        parts = [part async for part in generation]

        assert tuple(token for part in parts for token in part.token_ids) == ANSWER
        assert "".join(part.text for part in parts) == text_of(ANSWER)
        assert await generation.final() == completed("a")
        assert it.producer.num_outstanding == 0


async def test_batch_of_many_requests_reaches_each():
    async with rig() as it:
        generations = {}
        for n in range(2000):
            body = InferenceRequest(model="m", prompt="x", id=f"q{n}")
            generations[f"q{n}"] = await it.producer.submit(body, reply=ReplyMode.STREAM)
        batch = tokens("a", 0, 0)
        for name in generations:
            await it.reply(started("a", request=name))
        chunks = tuple(chunk("a", 0, 2, request=name) for name in generations)
        await it.reply(msgspec.structs.replace(batch, chunks=chunks))
        await it.reply(*(completed("a", request=name) for name in generations))

        finals = [await generation.final() for generation in generations.values()]

        assert [final.request_id for final in finals] == list(generations)
        assert it.producer.num_outstanding == 0


async def test_failure_ends_iteration_and_is_the_final():
    async with rig() as it:
        generation = await it.producer.submit(BODY, reply=ReplyMode.STREAM)
        await it.reply(failed())

        assert [part async for part in generation] == []
        assert await generation.final() == failed()


async def test_divergence_is_raised_while_iterating_and_the_final_still_comes():
    async with rig() as it:
        generation = await it.producer.submit(BODY, reply=ReplyMode.STREAM)
        other = completed("b", answer=(1, 2, 3))
        await it.reply(started("a"), tokens("a", 0, 5), other)

        with pytest.raises(RunDivergedError):
            _ = [part async for part in generation]
        assert await generation.final() == other


async def test_cancel_is_told_to_all_and_stops_every_later_run():
    async with rig() as it:
        generation = await it.producer.submit(BODY, reply=ReplyMode.STREAM)

        await generation.cancel()

        assert await it.controlled() == RequestCancel(
            request_id=REQUEST, reply_to=it.producer.reply_queue
        )
        final = await generation.final()
        assert isinstance(final, RequestFailed)
        assert final.error.code == "cancelled"
        assert [part async for part in generation] == []
        await it.reply(started("b"))
        assert await it.controlled() == RunStop(
            request_id=REQUEST, run_id=RunId("b"), reason=StopReason.CANCELLED
        )


async def test_cancel_of_a_finished_request_does_nothing():
    async with rig() as it:
        generation = await it.producer.submit(BODY, reply=ReplyMode.STREAM)
        await it.reply(completed("a"))
        final = await generation.final()

        await generation.cancel()

        assert await generation.final() == final
        assert await it.far.get("control") is None


async def test_run_that_starts_after_the_final_is_stopped():
    async with rig() as it:
        await it.producer.submit(BODY, reply=ReplyMode.STREAM)
        await it.reply(completed("a"), started("b"))

        assert await it.controlled() == RunStop(
            request_id=REQUEST, run_id=RunId("b"), reason=StopReason.COMPLETED
        )


async def test_replies_about_strangers_requests_and_garbage_are_ignored():
    async with rig() as it:
        generation = await it.producer.submit(BODY, reply=ReplyMode.STREAM)
        await it.far.publish(
            topology.REPLIES, it.producer.reply_queue, OutMessage(body=b'{"kind":"new.v9"}')
        )
        await it.reply(started("b", request="stranger"), completed("a"))

        await generation.final()
        await eventually(lambda: _empty(it.far, it.producer.reply_queue))

        assert await it.far.get("control") is None


async def _empty(broker: Broker, queue: str) -> bool:
    depth = await broker.depth(queue)
    return depth is not None and depth.ready == 0


async def test_failure_without_a_run_wins_over_a_run_that_fell_silent():
    async with rig(silence_s=0.01) as it:
        generation = await it.producer.submit(BODY, reply=ReplyMode.STREAM)
        await it.reply(started("a"), failed())

        assert await generation.final() == failed()


async def test_same_id_twice_is_refused_while_the_first_is_on_its_way():
    async with rig() as it:
        await it.producer.submit(BODY, reply=ReplyMode.STREAM)

        with pytest.raises(ContractError) as caught:
            await it.producer.submit(BODY, reply=ReplyMode.STREAM)

        assert (caught.value.status, caught.value.code) == (409, "duplicate_request")


async def test_broker_that_stays_away_is_reported_and_nothing_is_kept():
    async with rig() as it:
        it.hub.stop()

        with pytest.raises(BrokerUnavailableError):
            await it.producer.submit(BODY, reply=ReplyMode.STREAM)

        assert it.producer.num_outstanding == 0
        it.hub.start()
        # It might have arrived all the same: then nobody wants it any more.
        await it.reply(started("b"))
        stop = RunStop(request_id=REQUEST, run_id=RunId("b"), reason=StopReason.CANCELLED)
        assert stop in [await it.controlled(), await it.controlled()]


async def test_full_global_queue_is_a_lack_of_capacity():
    hub = MemoryHub()
    async with MemoryBroker(hub) as broker:
        for exchange in topology.EXCHANGES:
            await broker.declare_exchange(exchange)
        full = replace(topology.work_queue(topology.GLOBAL_REST), max_length_bytes=1)
        await broker.declare_queue(full)
        await broker.bind(
            BindingSpec(exchange=topology.REQUESTS_REST, queue=full.name, routing_key="")
        )
        async with Producer(broker, name="test", clock=SystemClock()) as producer:
            with pytest.raises(CapacityError):
                await producer.submit(BODY, reply=ReplyMode.FINAL)

            assert producer.num_outstanding == 0


async def test_without_the_meshs_queues_the_mesh_is_unavailable():
    hub = MemoryHub()
    async with MemoryBroker(hub) as broker:
        for exchange in topology.EXCHANGES:
            await broker.declare_exchange(exchange)
        async with Producer(broker, name="test", clock=SystemClock()) as producer:
            with pytest.raises(BrokerUnavailableError):
                await producer.submit(BODY, reply=ReplyMode.FINAL)


async def test_end_cancels_what_is_outstanding_and_deletes_the_reply_queue():
    async with rig() as it:
        generation = await it.producer.submit(BODY, reply=ReplyMode.STREAM)
        waiting = asyncio.ensure_future(generation.final())
        await it.producer.__aexit__(None, None, None)

        assert isinstance(await waiting, RequestFailed)
        assert await it.controlled() == RequestCancel(
            request_id=RequestId(REQUEST), reply_to=it.producer.reply_queue
        )
        assert await it.far.depth(it.producer.reply_queue) is None


async def test_own_reply_queue_is_kept():
    hub = MemoryHub()
    async with MemoryBroker(hub) as broker:
        await topology.declare(broker)
        async with Producer(broker, name="t", clock=SystemClock(), reply_queue="reply.mine"):
            pass

        assert await broker.depth("reply.mine") is not None
