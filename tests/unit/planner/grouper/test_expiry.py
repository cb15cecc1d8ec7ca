"""A grouper ends requests at their ends, wherever they wait, and each only once."""

import asyncio
from dataclasses import replace

import msgspec
import pytest

from services.planner.grouper.stored.replies import REFUSAL_HEADER
from services.planner.grouper.watched_ends import GRACE_S
from services.planner.settings import GrouperSettings
from shared.broker import topology
from shared.broker.memory.hub import MemoryHub
from shared.broker.protocol import OutMessage, PublishOutcome, Settlement
from shared.contracts.base import Decoder, RequestId, TenantId
from shared.contracts.errors import BrokerConflictError, MeshError
from shared.contracts.qos import OnLate, QosClass
from shared.contracts.requests import QueuedRequest, StoredWork
from shared.contracts.telemetry import ExpiredRequest, LanesObserved, RequestsExpired
from shared.models.registry import ModelRegistry
from tests.clocks import NOW
from tests.deliveries import LooseDelivery, UnreliableBroker
from tests.queued import a_request
from tests.unit.planner.rig import (
    BODY,
    LANE,
    OBSERVED,
    REPLIES_TO,
    GrouperRig,
    listen,
    open_grouper,
    queued_bytes,
)

EXPIRED = "deadline_expired"
decode_notice: Decoder[RequestsExpired] = Decoder(RequestsExpired)
decode_observed: Decoder[LanesObserved] = Decoder(LanesObserved)


async def lane_of(rig: GrouperRig) -> str:
    (lane,) = rig.grouper.state.lanes
    return lane


async def end_all(rig: GrouperRig) -> int:
    """Let the grouper send what is due; return the number of replies that wait."""
    await rig.grouper.expiry.end_due()
    return await rig.far.ready(REPLIES_TO)


async def test_request_that_is_not_pulled_ends_at_its_end(rig: GrouperRig):
    await rig.submit(BODY | {"ttl_s": 10.0}, message_id="m1")
    rig.clock.advance(10.0 + GRACE_S - 0.01)
    assert await end_all(rig) == 0
    rig.clock.advance(0.02)
    assert await end_all(rig) == 1

    failed = await rig.failure()
    assert (failed.request_id, failed.run_id) == ("m1", None)
    error = failed.error
    assert (error.code, error.status, error.type) == (EXPIRED, 504, "timeout_error")
    assert error.param == "expires_at"
    assert f"last put into {LANE}" in error.message
    assert rig.grouper.state.expired == {"lane": 1}
    assert rig.grouper.state.shares.total == 0
    assert await end_all(rig) == 0


async def test_message_in_the_lane_lasts_to_the_end(rig: GrouperRig):
    await rig.submit(BODY | {"expires_at": NOW + 10.0})
    delivery = await rig.far.take(LANE)

    assert delivery.expiration_s == pytest.approx(10.0)


async def test_message_without_an_end_has_no_lifetime(rig: GrouperRig):
    await rig.submit(BODY)
    rig.clock.advance(1e6)

    assert await end_all(rig) == 0
    assert (await rig.far.take(LANE)).expiration_s is None


async def test_lifetime_of_the_message_is_an_end(rig: GrouperRig):
    await rig.submit(BODY | {"ttl_s": 60.0}, expiration_s=7.5)

    assert (await rig.queued()).expires_at == NOW + 7.5


@pytest.mark.parametrize("field", ["expires_at", "ttl_s"])
async def test_request_past_its_end_is_refused_when_it_is_grouped(rig: GrouperRig, field: str):
    end = {"expires_at": NOW - 1.0} if field == "expires_at" else {"ttl_s": 4.0}
    await rig.submit(BODY | end | {"arrived_at": NOW - 5.0})

    failed = await rig.failure()
    assert (failed.error.code, failed.error.status) == (EXPIRED, 504)
    assert failed.error.type == "timeout_error"
    assert "it was never grouped" in failed.error.message
    state = rig.grouper.state
    assert (state.expired, state.refused, state.admitted) == ({"arrival": 1}, 0, 0)
    assert await rig.far.ready(topology.DEAD_LETTERS) == 0
    assert await rig.unsettled() == 0


async def test_deadline_that_passed_before_the_arrival_is_still_refused_as_invalid(
    rig: GrouperRig,
):
    await rig.submit(BODY | {"deadline": NOW - 1.0})

    failed = await rig.failure()
    assert (failed.error.code, failed.error.status) == (EXPIRED, 400)


async def test_final_of_an_instance_has_precedence(rig: GrouperRig):
    await rig.submit(BODY | {"ttl_s": 10.0}, message_id="m1")
    rig.clock.advance(10.1)
    request = await rig.queued()
    rig.grouper.on_ended(
        msgspec.structs.replace(OBSERVED, request_id=request.request_id, tenant=request.tenant)
    )
    rig.clock.advance(10.0)

    assert await end_all(rig) == 0


async def test_late_interactive_request_is_dropped_unless_it_has_begun(rig: GrouperRig):
    body = BODY | {"slo": {"ttft_s": 2.0}, "on_late": "drop"}
    await rig.submit(body, message_id="waits")
    await rig.submit(body, message_id="begun")
    rig.grouper.expiry.on_begun(RequestId("begun"), TenantId("anonymous"))
    rig.clock.advance(2.0 + GRACE_S)

    assert await end_all(rig) == 1
    failed = await rig.failure()
    assert (failed.request_id, failed.error.param) == ("waits", "slo.ttft_s")


async def test_grouper_listens_to_first_tokens_once_a_request_needs_them(rig: GrouperRig):
    asked = []

    async def hear() -> None:
        asked.append(True)

    rig.grouper.expiry.hear_first_tokens = hear
    await rig.submit(BODY | {"ttl_s": 10.0})
    assert asked == []
    for _ in range(2):
        await rig.submit(BODY | {"slo": {"ttft_s": 2.0}, "on_late": "drop"})
    assert asked == [True]


@pytest.mark.parametrize(
    ("field", "on_late"),
    [(None, OnLate.DROP), ("serve", OnLate.SERVE)],
)
async def test_default_policy_depends_on_the_class(
    registry: ModelRegistry, field: str | None, on_late: OnLate
):
    settings = GrouperSettings(on_late={QosClass.NON_INTERACTIVE: OnLate.DROP})
    async with open_grouper(registry, settings) as rig:
        await rig.submit(BODY | {"slo": {"ttlt_s": 60.0}} | ({"on_late": field} if field else {}))
        lane = await lane_of(rig)
        assert (await rig.queued(lane)).on_late is on_late
        await rig.submit(BODY, message_id="best-effort")
        assert (await rig.queued()).on_late is OnLate.SERVE


async def dies(rig: GrouperRig, request: QueuedRequest, queue: str = LANE) -> None:
    """Let the broker drop a request at its end."""
    await dead(rig, queued_bytes(request), queue)


async def dead(rig: GrouperRig, message: OutMessage, queue: str) -> None:
    death = {"x-first-death-reason": "expired", "x-first-death-queue": queue}
    await rig.far.publish(topology.DEAD, queue, replace(message, headers=death))
    await rig.handle_dead_letter()


def ended(request_id: str = "m1", **fields: object) -> QueuedRequest:
    """A request of `BODY`'s lane that has reached its end."""
    values = {"expires_at": NOW, "lane": LANE, "reply_to": REPLIES_TO, "tenant": "anonymous"}
    return a_request(request_id, **(values | fields))


async def test_request_that_the_broker_drops_ends_with_the_same_error(rig: GrouperRig):
    await dies(rig, ended())

    failed = await rig.failure()
    assert (failed.request_id, failed.error.code, failed.error.status) == ("m1", EXPIRED, 504)
    assert f"last put into {LANE}" in failed.error.message
    assert rig.grouper.state.expired == {"lane": 1}


async def test_message_that_the_broker_drops_from_a_global_queue_was_never_grouped(
    rig: GrouperRig,
):
    message = OutMessage(
        body=msgspec.json.encode(BODY | {"id": "m1"}), message_id="m1", reply_to=REPLIES_TO
    )
    await dead(rig, message, topology.GLOBAL_REST)

    failed = await rig.failure()
    assert (failed.request_id, failed.error.code, failed.error.status) == ("m1", EXPIRED, 504)
    assert "it was never grouped" in failed.error.message
    assert rig.grouper.state.expired == {"global": 1}
    assert rig.grouper.state.dropped == {}


async def test_request_ends_only_once_if_the_broker_drops_it_later(rig: GrouperRig):
    await rig.submit(BODY | {"ttl_s": 10.0}, message_id="m1")
    request = await rig.queued()
    rig.clock.advance(10.0 + GRACE_S)
    assert await end_all(rig) == 1

    await dies(rig, request)
    assert await end_all(rig) == 1
    assert rig.grouper.state.expired == {"lane": 1}


async def test_request_ends_only_once_if_the_broker_drops_it_first(rig: GrouperRig):
    await rig.submit(BODY | {"ttl_s": 10.0}, message_id="m1")
    rig.clock.advance(10.0)
    await dies(rig, await rig.queued())
    rig.clock.advance(10.0)

    assert await end_all(rig) == 1
    assert rig.grouper.state.shares.total == 0


async def test_groupers_notify_each_other_of_what_they_have_ended(rig: GrouperRig):
    notices = await listen(rig.far, topology.TELEMETRY, topology.EXPIRED_KEY)
    await rig.submit(BODY | {"ttl_s": 10.0}, message_id="m1")
    request = await rig.queued()
    rig.clock.advance(10.0 + GRACE_S)
    await end_all(rig)

    notice = decode_notice((await rig.far.take(notices)).body)
    known = ExpiredRequest(request_id=request.request_id, tenant=request.tenant)
    assert (notice.sender, notice.requests) == ("grouper-of-the-test", (known,))


async def test_grouper_stays_silent_about_what_another_has_ended(rig: GrouperRig):
    await rig.submit(BODY | {"ttl_s": 10.0}, message_id="m1")
    request = await rig.queued()
    known = ExpiredRequest(request_id=request.request_id, tenant=request.tenant)
    rig.grouper.expiry.on_expired(RequestsExpired(sender="another", requests=(known,)))
    rig.clock.advance(20.0)
    await dies(rig, request)

    assert await end_all(rig) == 0
    assert rig.grouper.state.shares.total == 0


async def test_dropped_requests_are_reported_as_gone_from_their_queue(rig: GrouperRig):
    """They are never pulled, so the leader would count them as waiting forever."""
    reports = await listen(rig.far, topology.TELEMETRY, "lanes.#")
    for number in range(2):
        await dies(rig, ended(f"r{number}"))
    await dies(rig, ended("r2"), "inbox.a1")
    await rig.grouper.report()

    observed = decode_observed((await rig.far.take(reports)).body)
    assert observed.expired == {LANE: 2}


async def test_reply_is_sent_later_if_the_broker_is_away(rig: GrouperRig):
    await rig.submit(BODY | {"ttl_s": 10.0}, message_id="m1")
    rig.clock.advance(11.0)
    send, rig.grouper.expiry.broker = rig.grouper.expiry.broker, Away(rig.hub)
    async with rig.grouper.expiry.broker:
        with pytest.raises(MeshError):
            await rig.grouper.expiry.end_due()
    rig.grouper.expiry.broker = send

    assert await end_all(rig) == 1


@pytest.mark.parametrize("refuses", [False, True], ids=["sent", "not sent"])
async def test_dead_letter_is_kept_until_the_reply_of_its_request_is_sent(
    rig: GrouperRig, *, refuses: bool
):
    await rig.submit(BODY | {"ttl_s": 10.0}, message_id="m1")
    request = await rig.queued()
    rig.clock.advance(10.0 + GRACE_S)
    usual = rig.grouper.expiry.broker
    async with Slow(rig.hub, refuses=refuses) as slow:
        rig.grouper.expiry.broker = slow
        ending = asyncio.create_task(rig.grouper.expiry.end_due())
        dropped = asyncio.create_task(dies(rig, request))
        for _ in range(50):
            await asyncio.sleep(0)
        assert not dropped.done()
        rig.grouper.expiry.broker = usual
        slow.may_answer.set()
        await asyncio.wait((ending, dropped))

    assert isinstance(ending.exception(), BrokerConflictError) == refuses
    assert dropped.exception() is None
    assert await end_all(rig) == 1
    assert rig.grouper.state.expired == {"lane": 1}


class Slow(UnreliableBroker):
    """A broker that confirms or refuses replies when the test lets it."""

    def __init__(self, hub: MemoryHub, *, refuses: bool) -> None:
        super().__init__(hub)
        self.may_answer = asyncio.Event()
        self.refuses = refuses

    async def publish(self, exchange: str, routing_key: str, message: OutMessage) -> PublishOutcome:
        await self.may_answer.wait()
        if self.refuses:
            raise BrokerConflictError("the test refuses replies")
        return await super().publish(exchange, routing_key, message)


class Away(UnreliableBroker):
    """A broker that refuses every reply for good."""

    async def publish(self, exchange: str, routing_key: str, message: OutMessage) -> PublishOutcome:
        raise BrokerConflictError("the test refuses replies")


async def held_in(rig: GrouperRig, delay_ms: int) -> int:
    return await rig.far.ready(f"headway.delay.{delay_ms}")


async def pass_delay(rig: GrouperRig, delay_ms: int, seconds: float) -> None:
    """Let time pass until a delay queue gives its request back, and let the grouper handle it."""
    rig.clock.advance(seconds)
    assert await rig.far.get(f"headway.delay.{delay_ms}") is None
    await rig.grouper.on_held(await rig.pull(topology.HELD))


async def test_request_is_held_until_its_time(rig: GrouperRig):
    await rig.submit(BODY | {"not_before": NOW + 5.5, "ttl_s": 10.0}, message_id="m1")
    assert (await held_in(rig, 4000), rig.grouper.state.held) == (1, 1)
    assert rig.grouper.state.admitted == 0

    await pass_delay(rig, 4000, 4.0)
    assert await held_in(rig, 1000) == 1
    await pass_delay(rig, 1000, 1.0)
    assert (await held_in(rig, 500), rig.grouper.state.admitted) == (1, 0)
    await pass_delay(rig, 500, 0.5)

    request = await rig.queued()
    assert (request.arrived_at, request.grouped_at) == (NOW + 5.5, NOW + 5.5)
    assert request.expires_at == NOW + 15.5
    assert (rig.grouper.state.held, rig.grouper.state.admitted) == (1, 1)


async def test_targets_count_from_the_time_until_which_a_request_is_held(rig: GrouperRig):
    body = {"slo": {"ttlt_s": 30.0}, "not_before": NOW + 4.0, "on_late": "drop"}
    await rig.submit(BODY | body, message_id="m1")
    await pass_delay(rig, 4000, 4.0)
    request = await rig.queued(await lane_of(rig))

    assert request.deadline_at == NOW + 34.0
    rig.clock.advance(30.0)
    assert await end_all(rig) == 0
    rig.clock.advance(GRACE_S)
    assert await end_all(rig) == 1


async def test_repeated_request_is_held_and_released_once(rig: GrouperRig):
    body = BODY | {"not_before": NOW + 0.5}
    for _ in range(2):
        await rig.submit(body, message_id="m1")
    assert await held_in(rig, 500) == 1

    rig.clock.advance(0.5)
    assert await rig.far.get("headway.delay.500") is None
    delivery = await rig.pull(topology.HELD)
    await rig.grouper.on_held(delivery)
    again = LooseDelivery(body=delivery.body, message_id="m1")
    await rig.grouper.on_held(again)
    assert (await rig.far.ready(LANE), again.settlements) == (1, [Settlement.ACK])


async def test_held_request_of_a_removed_model_is_refused(
    rig: GrouperRig, monkeypatch: pytest.MonkeyPatch
):
    await rig.submit(BODY | {"not_before": NOW + 0.5}, message_id="m1")
    monkeypatch.setattr(type(rig.grouper._intake.registry), "bases", ())
    await pass_delay(rig, 500, 0.5)

    failed = await rig.failure()
    assert (failed.request_id, failed.error.code) == ("m1", "model_not_found")


@pytest.mark.parametrize("claimed", [True, False])
async def test_only_a_held_request_with_a_claim_ends_what_the_store_has(
    rig: GrouperRig, *, claimed: bool
):
    """A repeat waits for the store; its model is removed, and the first request still runs."""
    stored = StoredWork(digest="d", kept_s=60.0, claimed=claimed)
    request = a_request("r", base="gone", arrived_at=NOW - 1.0, stored=stored)
    await rig.far.publish(topology.LANES, topology.HELD, queued_bytes(request))
    await rig.grouper.on_held(await rig.pull(topology.HELD))
    reply = await rig.far.take(topology.STORED)

    assert (reply.headers.get(REFUSAL_HEADER) is None) == claimed


async def test_request_that_would_end_before_it_begins_is_refused(rig: GrouperRig):
    await rig.submit(BODY | {"not_before": NOW + 5.0, "expires_at": NOW + 4.0})

    failed = await rig.failure()
    assert (failed.error.param, failed.error.status) == ("not_before", 400)
