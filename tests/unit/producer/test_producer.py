"""A producer's publishes to a broker, and its handling of replies."""

import msgspec
import pytest

from ops.generate.replies import ANSWER, REQUEST, chunk, completed, failed, started, text_of, tokens
from shared.broker import topology
from shared.broker.memory.broker import MemoryBroker
from shared.broker.memory.hub import MemoryHub
from shared.broker.protocol import Broker, OutMessage
from shared.contracts.errors import ContractError
from shared.contracts.ingress import InferenceRequest
from shared.contracts.qos import Slo
from shared.contracts.requests import ReplyMode
from shared.producer.generation import RunDivergedError
from shared.producer.producer import Producer
from shared.runtime.clock import SystemClock
from tests.brokers import eventually
from tests.clocks import NOW, FakeClock
from tests.tracing.spans import TRACE
from tests.unit.producer.producer_rig import BODY, rig

pytestmark = pytest.mark.virtual_time


async def test_request_message_is_complete():
    async with rig(user_id="guest", clock=FakeClock()) as it:
        await it.producer.submit(BODY, reply=ReplyMode.FINAL, trace=TRACE)

        delivery = await it.requested()

    sent = msgspec.json.decode(delivery.body, type=InferenceRequest)
    assert sent == msgspec.structs.replace(BODY, reply=ReplyMode.FINAL, arrived_at=NOW)
    assert (delivery.message_id, delivery.correlation_id) == (REQUEST, REQUEST)
    assert delivery.reply_to == it.producer.reply_queue
    assert delivery.user_id == "guest"
    assert delivery.headers == TRACE.headers


async def test_given_arrival_time_is_kept():
    async with rig(clock=FakeClock()) as it:
        body = msgspec.structs.replace(BODY, arrived_at=NOW - 2.5)
        await it.producer.submit(body, reply=ReplyMode.FINAL)

        delivery = await it.requested()

    sent = msgspec.json.decode(delivery.body, type=InferenceRequest)
    assert sent.arrived_at == NOW - 2.5


async def test_interactive_requests_use_the_fast_queue():
    async with rig() as it:
        body = msgspec.structs.replace(BODY, slo=Slo(ttft_s=1.0))
        await it.producer.submit(body, reply=ReplyMode.STREAM)

        assert (await it.requested(topology.GLOBAL_INTERACTIVE)).message_id == REQUEST


async def test_generation_yields_parts_and_the_final():
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


async def test_divergence_is_raised_while_iterating_but_the_final_still_comes():
    async with rig() as it:
        generation = await it.producer.submit(BODY, reply=ReplyMode.STREAM)
        other = completed("b", answer=(1, 2, 3))
        await it.reply(started("a"), tokens("a", 0, 5), other)

        with pytest.raises(RunDivergedError):
            _ = [part async for part in generation]
        assert await generation.final() == other


async def test_replies_about_unknown_requests_and_garbage_are_ignored():
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


async def test_failure_without_a_run_ends_a_request_with_a_silent_run():
    async with rig(silence_s=0.01) as it:
        generation = await it.producer.submit(BODY, reply=ReplyMode.STREAM)
        await it.reply(started("a"), failed())

        assert await generation.final() == failed()


async def test_duplicate_id_is_refused_while_the_first_is_in_progress():
    async with rig() as it:
        await it.producer.submit(BODY, reply=ReplyMode.STREAM)

        with pytest.raises(ContractError) as caught:
            await it.producer.submit(BODY, reply=ReplyMode.STREAM)

        assert (caught.value.status, caught.value.code) == (409, "duplicate_request")


async def test_given_reply_queue_is_kept():
    hub = MemoryHub()
    async with MemoryBroker(hub) as broker:
        await topology.declare(broker)
        async with Producer(broker, name="t", clock=SystemClock(), reply_queue="reply.mine"):
            pass

        assert await broker.depth("reply.mine") is not None
