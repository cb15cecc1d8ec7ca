"""The grouper publishes a request to a lane with confirm or refuses it, then acknowledges it."""

import asyncio

import msgspec
import pytest

from services.planner.grouper.grouper import OUTSTANDING_MEMORY_S
from services.planner.settings import GrouperSettings
from shared.broker import topology
from shared.broker.consumer import REQUEUE_MAX_S
from shared.broker.protocol import OutMessage, PublishOutcome, QueueSpec, QueueType, Settlement
from shared.contracts.base import Decoder, RequestId, TenantId
from shared.contracts.control import LaneNonempty, QueuesRetired, QueuesRetiring
from shared.contracts.lanes import LaneKey
from shared.contracts.plans import LaneForecast, LanesForecast
from shared.contracts.requests import WaitForecast
from shared.contracts.telemetry import LanesObserved
from shared.models.registry import ModelRegistry
from tests.brokers import eventually
from tests.clocks import NOW
from tests.queued import a_request
from tests.unit.planner.rig import (
    BODY,
    LANE,
    REPLIES_TO,
    GrouperRig,
    listen,
    open_grouper,
    queued_bytes,
)

pytestmark = pytest.mark.virtual_time

OVERFLOW = LaneKey.parse(LANE).overflow_name


async def test_request_goes_to_its_lane(rig: GrouperRig):
    await rig.submit(BODY, message_id="m1")
    request = await rig.queued()
    assert (request.request_id, request.lane, request.reply_to) == ("m1", LANE, REPLIES_TO)
    assert await rig.unsettled() == 0


async def test_ack_follows_the_confirm_of_the_lane(rig: GrouperRig):
    rig.broker.down.add(topology.LANES)
    await rig.publish(BODY)
    task = asyncio.create_task(rig.grouper.on_request(await rig.pull()))
    await eventually(lambda: topology.LANES in rig.broker.attempts)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert await rig.unsettled() == 1


async def test_grouper_survives_an_outage_of_the_lanes(rig: GrouperRig):
    rig.broker.down.add(topology.LANES)
    await rig.publish(BODY)
    task = asyncio.create_task(rig.grouper.on_request(await rig.pull()))
    await eventually(lambda: topology.LANES in rig.broker.attempts)
    rig.broker.down.clear()
    await task
    assert (await rig.far.ready(LANE), await rig.unsettled()) == (1, 0)


async def test_lane_that_refuses_for_a_while_does_not_use_up_the_delivery_limit(
    rig: GrouperRig, monkeypatch: pytest.MonkeyPatch
):
    queues = rig.grouper.placement.queues

    async def refuse(_queue: str, _message: OutMessage) -> PublishOutcome:
        return PublishOutcome.REFUSED

    with monkeypatch.context() as patch:
        patch.setattr(queues, "publish", refuse)
        await rig.broker.consume(topology.GLOBAL_REST, rig.grouper.on_request, prefetch=1)
        await rig.publish(BODY, message_id="patient")
        await asyncio.sleep(10.0)
    await asyncio.sleep(REQUEUE_MAX_S)

    assert (await rig.queued()).request_id == "patient"
    assert await rig.far.ready(topology.DEAD_LETTERS) == 0


async def test_deleted_lane_is_declared_again(rig: GrouperRig):
    await rig.submit(BODY)
    await rig.far.delete_queue(LANE)
    await rig.submit(BODY, message_id="second")
    assert (await rig.queued()).request_id == "second"


async def test_agents_are_notified_of_the_lane(rig: GrouperRig):
    notices = await listen(rig.far, topology.CONTROL, topology.CONTROL_LANE)
    await rig.submit(BODY)
    decode: Decoder[LaneNonempty] = Decoder(LaneNonempty)
    assert decode((await rig.far.take(notices)).body).queue == LANE


async def test_notices_are_spaced_and_the_last_notice_is_not_dropped(rig: GrouperRig):
    notices = await listen(rig.far, topology.CONTROL, topology.CONTROL_LANE)
    for _ in range(5):
        await rig.submit(BODY)
    assert await rig.far.ready(notices) == 1
    await rig.grouper.placement.queues.close()
    assert await rig.far.ready(notices) == 2


async def test_refusal_reaches_the_producer_and_the_dead_letters(rig: GrouperRig):
    await rig.submit(BODY | {"id": "mine", "n": 3})
    failure = await rig.failure()
    assert (failure.request_id, failure.error.code, failure.error.param) == (
        "mine",
        "unsupported_parameter",
        "n",
    )
    letter = await rig.far.take(topology.DEAD_LETTERS)
    assert (
        letter.headers[topology.REASON_HEADER] == failure.error.code + ": " + failure.error.message
    )
    assert letter.headers["headway-queue"] == topology.GLOBAL_REST
    assert msgspec.json.decode(letter.body)["n"] == 3
    assert await rig.unsettled() == 0


async def test_undecodable_message_is_refused(rig: GrouperRig):
    await rig.submit(b"\xff nonsense", message_id="m1")
    assert (await rig.failure()).request_id == "m1"
    assert await rig.far.ready(topology.DEAD_LETTERS) == 1


async def test_deeply_nested_message_is_refused(rig: GrouperRig):
    depth = 100_000
    metadata = b'{"model": "tiny-llama", "metadata": {"a": ' + b"[" * depth + b"]" * depth + b"}}"
    await rig.submit(metadata, message_id="m1")
    assert (await rig.failure()).request_id == "m1"
    assert await rig.unsettled() == 0


async def test_message_id_of_a_refusal_fits_into_a_short_string(rig: GrouperRig):
    await rig.submit(BODY | {"id": "\N{PARTY POPPER}" * 128})
    answer = await rig.far.take(REPLIES_TO)
    assert answer.message_id is not None
    assert len(answer.message_id.encode()) <= 255
    assert await rig.unsettled() == 0


async def test_undeclarable_lane_ends_the_request_and_not_the_grouper(
    rig: GrouperRig,
):
    await rig.far.declare_queue(QueueSpec(name=LANE, type=QueueType.CLASSIC))
    await rig.submit(BODY, message_id="m1")
    await rig.handle_dead_letter()
    failure = await rig.failure()
    assert (failure.request_id, failure.error.code) == ("m1", "internal")
    assert await rig.unsettled() == 0


@pytest.mark.parametrize("exchange", [topology.REPLIES, topology.DEAD])
async def test_refusal_is_acknowledged_after_both_confirms(rig: GrouperRig, exchange: str):
    rig.broker.down.add(exchange)
    await rig.publish(BODY | {"n": 3})
    task = asyncio.create_task(rig.grouper.on_request(await rig.pull()))
    await eventually(lambda: exchange in rig.broker.attempts)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert await rig.unsettled() == 1


async def test_refusal_without_a_bound_queue_is_unclaimed(rig: GrouperRig):
    await rig.submit(BODY | {"n": 3}, reply_to="gone")
    assert (await rig.failure(topology.UNCLAIMED_FINALS)).error.param == "n"


@pytest.mark.parametrize(
    ("field", "value"), [("deadline", 1e308), ("min_p", 0.5), ("stop_token_ids", [2])]
)
async def test_field_that_is_not_honoured_is_refused_by_name(
    rig: GrouperRig, field: str, value: object
):
    await rig.submit(BODY | {field: value})
    assert (await rig.failure()).error.param == field


async def test_field_of_a_payload_that_is_not_honoured_is_refused_by_name(rig: GrouperRig):
    await rig.submit({"id": "q1", "payload": BODY | {"min_p": 0.5}})
    assert (await rig.failure()).error.param == "min_p"


async def test_refusal_without_a_reply_queue_is_only_dead_lettered(rig: GrouperRig):
    await rig.submit(BODY | {"n": 3}, reply_to=None)
    assert await rig.far.ready(topology.UNCLAIMED_FINALS) == 0
    assert await rig.far.ready(topology.DEAD_LETTERS) == 1


async def test_request_published_twice_is_queued_once(rig: GrouperRig):
    for _ in range(2):
        await rig.submit(BODY | {"id": "same"})
    assert (await rig.far.ready(LANE), await rig.unsettled()) == (1, 0)


async def test_two_tenants_may_use_the_same_id(rig: GrouperRig):
    for tenant in ("one", "other"):
        await rig.submit(BODY | {"id": "same", "tenant": tenant}, user_id="guest")
    assert {(await rig.queued()).tenant, (await rig.queued()).tenant} == {"one", "other"}


async def test_concurrent_copies_are_queued_once(rig: GrouperRig):
    for _ in range(5):
        await rig.publish(BODY | {"id": "same"})
    copies = [await rig.pull() for _ in range(5)]
    await asyncio.gather(*(rig.grouper.on_request(copy) for copy in copies))
    assert (await rig.far.ready(LANE), await rig.unsettled()) == (1, 0)


async def test_copy_is_not_acknowledged_before_the_first_is_confirmed(rig: GrouperRig):
    rig.broker.down.add(topology.LANES)
    for _ in range(2):
        await rig.publish(BODY | {"id": "same"})
    copies = [await rig.pull() for _ in range(2)]
    tasks = [asyncio.create_task(rig.grouper.on_request(copy)) for copy in copies]
    await eventually(lambda: topology.LANES in rig.broker.attempts)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert await rig.unsettled() == 2


async def test_requests_of_a_tenant_above_its_share_go_to_overflow(registry: ModelRegistry):
    """20 of 40 tokens are half; 40 of 60 are above the maximum share of 60 %."""
    settings = GrouperSettings(free_outstanding_tokens=0, max_tenant_share=0.6)
    async with open_grouper(registry, settings) as rig:
        shares = rig.grouper.state.shares
        shares.admit("other's", "other", 11)  # type: ignore[arg-type]  # a NewType
        await rig.submit(BODY)
        assert (await rig.far.ready(LANE), await rig.far.ready(OVERFLOW)) == (1, 0)
        await rig.submit(BODY | {"id": "greedy"})
        assert (await rig.far.ready(LANE), await rig.far.ready(OVERFLOW)) == (1, 1)
        assert (await rig.queued(OVERFLOW)).lane == LANE
        rig.grouper.state.finish(RequestId("greedy"), TenantId("anonymous"))
        shares.finish("other's")
        await rig.submit(BODY)
        assert await rig.far.ready(LANE) == 2


async def test_request_has_a_wait_forecast_where_known(rig: GrouperRig):
    """The second request's forecast includes the first request's work."""
    now = rig.clock.now()
    lane = LaneForecast(lane=LANE, wait_s=4.0, wait_sd_s=1.0, request_s=0.5)
    await rig.submit(BODY)
    rig.grouper.state.on_forecast(LanesForecast(epoch=1, at=now, lanes=(lane,)), now)
    rig.clock.advance(1.0)
    for _ in range(2):
        await rig.submit(BODY)

    reported = [(await rig.queued()).predicted_wait for _ in range(3)]

    assert reported[0] is None
    assert reported[1:] == [
        WaitForecast(mean_s=3.0, sd_s=1.0),
        WaitForecast(mean_s=3.5, sd_s=pytest.approx(1.05)),
    ]


async def test_forecasts_in_a_burst_count_requests_before_their_confirm(rig: GrouperRig):
    now = rig.clock.now()
    lane = LaneForecast(lane=LANE, wait_s=4.0, wait_sd_s=1.0, request_s=0.5)
    rig.grouper.state.on_forecast(LanesForecast(epoch=1, at=now, lanes=(lane,)), now)
    rig.broker.down.add(topology.LANES)
    for _ in range(3):
        await rig.publish(BODY)
    tasks = [asyncio.create_task(rig.grouper.on_request(await rig.pull())) for _ in range(3)]
    await eventually(lambda: rig.broker.attempts.count(topology.LANES) >= 3)
    rig.broker.down.clear()
    await asyncio.gather(*tasks)

    reported = [(await rig.queued()).predicted_wait for _ in range(3)]

    assert sorted(each.mean_s for each in reported if each) == pytest.approx([4.0, 4.5, 5.0])


async def test_overflowing_request_has_no_forecast(registry: ModelRegistry):
    """The request waits for its tenant's share, for which a plan has no forecast."""
    settings = GrouperSettings(free_outstanding_tokens=0, max_tenant_share=0.6)
    async with open_grouper(registry, settings) as rig:
        now = rig.clock.now()
        lane = LaneForecast(lane=LANE, wait_s=4.0, wait_sd_s=1.0)
        rig.grouper.state.on_forecast(LanesForecast(epoch=1, at=now, lanes=(lane,)), now)
        rig.grouper.state.shares.admit("other's", "other", 11)  # type: ignore[arg-type]
        for _ in range(2):
            await rig.submit(BODY)

        assert (await rig.queued()).predicted_wait is not None
        assert (await rig.queued(OVERFLOW)).predicted_wait is None


async def test_only_the_tenants_own_request_ends_its_share(rig: GrouperRig):
    await rig.submit(BODY | {"id": "same", "tenant": "a"}, user_id="guest")
    await rig.submit(BODY | {"id": "same", "tenant": "b"}, user_id="guest")
    state = rig.grouper.state
    assert (state.shares.outstanding(TenantId("a")), state.shares.outstanding(TenantId("b"))) == (
        11,
        11,
    )
    state.finish(RequestId("same"), TenantId("b"))
    assert (state.shares.outstanding(TenantId("a")), state.shares.total) == (11, 11)


async def test_request_without_an_observed_end_expires(rig: GrouperRig):
    await rig.submit(BODY)
    rig.clock.advance(OUTSTANDING_MEMORY_S)
    await rig.submit(BODY)
    rig.clock.advance(1.0)
    await rig.grouper.report()
    assert rig.grouper.state.shares.total == 11
    assert len(rig.grouper.state.outstanding) == 1


async def test_requests_beyond_the_token_limit_are_refused_for_now(registry: ModelRegistry):
    """Each request takes 3 + 8 tokens."""
    async with open_grouper(registry, GrouperSettings(max_outstanding_tokens=21)) as rig:
        await rig.submit(BODY)
        await rig.submit(BODY)
        error = (await rig.failure()).error
        assert (error.code, error.status) == ("over_capacity", 429)
        assert error.retry_after_s is not None
        assert (rig.grouper.state.admitted, rig.grouper.state.refused) == (1, 1)


async def test_producer_gets_a_reply_for_a_dead_lettered_request(rig: GrouperRig):
    """The broker dead-letters a request at a lane's delivery limit."""
    request = a_request("r1", reply_to=REPLIES_TO, lane=LANE)
    await topology.declare_work_queue(rig.far, LANE)
    await rig.far.publish(topology.LANES, LANE, queued_bytes(request))
    for _ in range(topology.DELIVERY_LIMIT + 1):
        delivery = await rig.pull(LANE)
        await delivery.settle(Settlement.REQUEUE)
    await rig.handle_dead_letter()
    failure = await rig.failure()
    assert (failure.request_id, failure.error.code) == (RequestId("r1"), "dead_lettered")
    assert "delivery_limit: it was delivered more than 20 times" in failure.error.message
    assert await rig.far.ready(topology.DEAD_LETTERS) == 1


async def test_dead_letter_of_a_service_is_not_answered_again(rig: GrouperRig):
    await rig.submit(BODY | {"n": 3})
    await rig.failure()
    await rig.handle_dead_letter()
    assert await rig.far.ready(REPLIES_TO) == 0
    assert await rig.broker.get(topology.DEAD_LETTER_REPLIES) is None


async def test_dead_letter_reply_for_an_undecodable_body_uses_the_message_id(rig: GrouperRig):
    message = OutMessage(body=b"?", message_id="m1", reply_to=REPLIES_TO)
    await rig.far.publish(topology.DEAD, "", message)
    await rig.handle_dead_letter()
    assert (await rig.failure()).request_id == "m1"


async def test_reports_are_totals_that_only_grow(rig: GrouperRig):
    reports = await listen(rig.far, topology.TELEMETRY, "lanes.#")
    decode: Decoder[LanesObserved] = Decoder(LanesObserved)
    await rig.submit(BODY)
    await rig.grouper.report()
    rig.clock.advance(1)
    await rig.submit(BODY)
    await rig.submit(BODY | {"n": 2})
    await rig.grouper.report()
    first, second = [decode((await rig.far.take(reports)).body) for _ in range(2)]
    assert first.incarnation == second.incarnation
    assert (first.seq, second.seq) == (1, 2)
    assert [(r.admitted, r.refused) for r in (first, second)] == [(1, 0), (2, 1)]
    (total,) = second.lanes
    assert (total.lane, total.requests, total.prompt_tokens, total.expected_tokens) == (
        LANE,
        2,
        6,
        16,
    )
    assert total.arrivals == ((NOW, 1), (NOW + 1, 2))


async def test_request_that_is_too_large_for_the_broker_is_refused_by_name(rig: GrouperRig):
    """The message of a lane is larger than the one of the producer, which the broker accepted."""
    rig.broker.max_message_size = 500
    await rig.submit(BODY | {"prompt": list(range(10, 200))}, message_id="large")
    failure = await rig.failure()
    assert (failure.error.code, failure.error.status) == ("message_too_large", 413)
    assert "500" in failure.error.message
    assert await rig.far.ready(LANE) == 0
    assert await rig.unsettled() == 0


async def test_a_released_queue_is_reported_until_its_retirement_ends(rig: GrouperRig):
    reports = await listen(rig.far, topology.TELEMETRY, "lanes.#")
    decode: Decoder[LanesObserved] = Decoder(LanesObserved)
    await rig.submit(BODY)
    await rig.grouper.reports.on_retiring(QueuesRetiring(queues=(LANE,)))
    rig.grouper.reports.on_retired(QueuesRetired(deleted=(LANE,)))
    await rig.grouper.report()
    released = [decode((await rig.far.take(reports)).body).released for _ in range(2)]

    assert released == [(LANE,), ()]


@pytest.mark.parametrize("name", ["duplicate_memory", "expired_memory"])
def test_memory_of_ids_has_room(name: str):
    """Without room, each request is rejected after it was queued, and its end stops the process."""
    with pytest.raises(msgspec.ValidationError, match=name):
        msgspec.convert({name: 0}, GrouperSettings)
