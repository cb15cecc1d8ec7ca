"""Requests that are asked again under their ids, and requests for the store alone."""

import asyncio

import msgspec
import pytest

from ops.generate.replies import ANSWER, REQUEST, completed, failed, started, tokens
from shared.broker import topology
from shared.broker.protocol import BindingSpec
from shared.contracts.base import RequestId, TenantId
from shared.contracts.control import StoredCancel
from shared.contracts.errors import BrokerUnavailableError, ContractError
from shared.contracts.ingress import DIGEST_HEADER, IDEMPOTENT_HEADER, InferenceRequest
from shared.contracts.requests import ReplyMode, RequestFailed
from shared.producer.generation import Generation
from tests.tracing.spans import TRACE
from tests.unit.producer.producer_rig import BODY, Rig, rig

pytestmark = pytest.mark.virtual_time

OWNED = msgspec.structs.replace(BODY, tenant="acme")


async def ask(it: Rig, digest: str = "d1") -> Generation:
    return await it.producer.submit(OWNED, reply=ReplyMode.STREAM, digest=digest)


async def tokens_of(generation: Generation) -> list[tuple[int, ...]]:
    return [part.token_ids async for part in generation]


async def test_message_for_the_store_has_its_digest_and_no_reply_queue():
    async with rig(user_id="guest") as it:
        await it.producer.publish_stored(OWNED, digest="d1", trace=TRACE)

        delivery = await it.requested()

    sent = msgspec.json.decode(delivery.body, type=InferenceRequest)
    assert (sent.id, sent.tenant, sent.reply) == (REQUEST, "acme", ReplyMode.FINAL)
    assert (delivery.message_id, delivery.reply_to, delivery.user_id) == (REQUEST, None, "guest")
    assert delivery.headers == {
        IDEMPOTENT_HEADER: True,
        DIGEST_HEADER: "d1",
        **TRACE.headers,
    }


@pytest.mark.parametrize("field", ["id", "tenant"])
async def test_message_for_the_store_needs_an_id_and_a_tenant(field: str):
    async with rig() as it:
        body = msgspec.structs.replace(OWNED, **{field: None})

        with pytest.raises(ValueError, match="must be set"):
            await it.producer.publish_stored(body, digest="d1")


async def test_stored_request_is_cancelled_by_tenant_and_id():
    async with rig(user_id="guest") as it:
        await it.far.declare_queue(topology.private_queue("commands"))
        await it.far.bind(
            BindingSpec(
                exchange=topology.CONTROL, queue="commands", routing_key=topology.COMMAND_CANCEL
            )
        )
        await it.producer.cancel_stored(TenantId("acme"), RequestId(REQUEST))

        delivery = await it.far.get("commands")

    assert delivery is not None
    command = msgspec.json.decode(delivery.body, type=StoredCancel)
    assert command == StoredCancel(tenant=TenantId("acme"), request_id=RequestId(REQUEST))
    assert delivery.user_id == "guest"


async def test_cancellation_that_reaches_no_queue_is_an_error():
    async with rig() as it:
        await it.far.delete_queue("control")
        await it.far.delete_queue(topology.CANCELS)

        with pytest.raises(BrokerUnavailableError, match="reaches no queue"):
            await it.producer.cancel_stored(TenantId("acme"), RequestId(REQUEST))


async def test_first_caller_gets_the_stream_and_a_later_one_the_whole_answer():
    async with rig() as it:
        first, second = await ask(it), await ask(it)
        delivery = await it.requested()
        await it.reply(started("a"), tokens("a", 0, 5), completed("a"))

        assert await tokens_of(first) == [ANSWER[:5], ANSWER[5:]]
        assert await tokens_of(second) == [ANSWER]
        assert await second.final() == await first.final() == completed("a")
        assert (delivery.reply_to, delivery.headers[DIGEST_HEADER]) == (
            it.producer.reply_queue,
            "d1",
        )
        assert await it.far.get(topology.GLOBAL_REST) is None, "one message suffices"
        assert it.producer.num_outstanding == 0


async def test_another_request_with_the_id_in_progress_is_a_conflict():
    async with rig() as it:
        await ask(it)

        codes = []
        for digest in ("d2", None):
            with pytest.raises(ContractError) as caught:
                await it.producer.submit(OWNED, reply=ReplyMode.FINAL, digest=digest)
            codes.append((caught.value.status, caught.value.code))

    assert codes == [(409, "id_conflict"), (409, "duplicate_request")]


async def test_other_tenants_id_in_progress_is_a_conflict():
    async with rig() as it:
        await ask(it)
        foreign = msgspec.structs.replace(OWNED, tenant="other")

        with pytest.raises(ContractError) as caught:
            await it.producer.submit(foreign, reply=ReplyMode.FINAL, digest="d1")

    assert caught.value.code == "id_conflict"


async def test_caller_that_leaves_does_not_disturb_others():
    async with rig() as it:
        first, second = await ask(it), await ask(it)
        await it.reply(started("a"), tokens("a", 0, 5))

        await first.cancel()
        left = await first.final()
        await it.reply(completed("a"))

        assert isinstance(left, RequestFailed)
        assert left.error.code == "cancelled"
        assert await tokens_of(second) == [ANSWER]
        assert await it.far.get("control") is None


async def test_request_that_all_callers_left_continues_and_can_be_asked_again():
    async with rig() as it:
        await (await ask(it)).cancel()
        await it.requested()
        await it.reply(started("b"))
        again = await ask(it)
        await it.requested()
        await it.reply(tokens("b", 0, 5), completed("b"))

        assert await tokens_of(again) == [ANSWER]
        assert await it.far.get("control") is None, "no run is stopped"


async def test_final_of_a_request_that_all_callers_left_does_not_answer_another_request():
    async with rig() as it:
        await (await ask(it)).cancel()

        with pytest.raises(ContractError) as caught:
            await ask(it, "d2")
        await it.reply(completed("a"))
        await asyncio.sleep(1.0)
        other = await ask(it, "d2")
        await it.reply(failed())

        assert caught.value.code == "id_conflict"
        assert await other.final() == failed()


async def test_refusal_of_a_repeat_does_not_stop_the_run_of_the_first_request():
    """The groupers answer the repeat; the first request has left this producer long ago."""
    async with rig() as it:
        other = await ask(it, "d2")
        await it.reply(failed())
        await other.final()
        await it.reply(started("b"))
        await asyncio.sleep(1.0)

        assert await it.far.get("control") is None


async def test_answer_without_a_run_may_take_any_time():
    """A request that another producer has asked before sends only its final here."""
    async with rig(silence_s=10.0) as it:
        generation = await ask(it)
        await asyncio.sleep(3600.0)
        await it.reply(completed("elsewhere"))

        assert await tokens_of(generation) == [ANSWER]
        assert await generation.final() == completed("elsewhere")


async def test_failed_publish_is_raised_to_all_callers():
    async with rig() as it:
        await it.far.delete_queue(topology.GLOBAL_REST)

        errors = await asyncio.gather(ask(it), ask(it), return_exceptions=True)

        assert [isinstance(error, BrokerUnavailableError) for error in errors] == [True, True]
        assert it.producer.num_outstanding == 0


async def test_caller_that_leaves_during_the_publish_does_not_stop_it():
    async with rig() as it:
        leaving = asyncio.create_task(ask(it), name="leaving")
        staying = asyncio.create_task(ask(it), name="staying")
        await asyncio.sleep(0)
        leaving.cancel()
        generation = await staying
        await it.reply(completed("a"))

        assert await generation.final() == completed("a")


async def test_exit_ends_the_request_for_its_callers_alone():
    async with rig() as it:
        generation = await ask(it)
        waiting = asyncio.ensure_future(generation.final())
        await it.producer.__aexit__(None, None, None)

        assert isinstance(await waiting, RequestFailed)
        assert await it.far.get("control") is None
