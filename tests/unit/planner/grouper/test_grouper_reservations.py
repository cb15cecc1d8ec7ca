"""A request's tokens count for its tenant from admission to the request's end."""

import asyncio
from typing import Any

import pytest
from msgspec.structs import replace

from services.planner.settings import GrouperSettings, RoutingSettings
from shared.broker import topology
from shared.broker.protocol import QueueSpec, QueueType
from shared.contracts.base import RequestId, TenantId
from shared.contracts.lanes import LaneKey, inbox_name
from shared.contracts.telemetry import RequestObserved
from shared.models.registry import ModelRegistry
from tests.brokers import eventually
from tests.clocks import NOW
from tests.unit.planner.rig import BODY, LANE, OBSERVED, GrouperRig, open_grouper
from tests.unit.planner.routed_rig import ONE, status

pytestmark = pytest.mark.virtual_time

EACH = 11
"""Tokens of `BODY`: 3 of the prompt and 8 of the answer."""
OVERFLOW = LaneKey.parse(LANE).overflow_name
ACME = TenantId("acme")
SHARED = GrouperSettings(free_outstanding_tokens=0, max_tenant_share=0.6)
CHAT = {**BODY, "slo": {"ttft_s": 5.0, "tbt_s": 1.0}}
LONG_OVERFLOW = "overflow.2.tiny-llama.high.12.w6"
LONG_CHATS = "lane.2.tiny-llama.high.3.w5"
ROUTED = GrouperSettings(
    routing=RoutingSettings(policy="default"), free_outstanding_tokens=0, max_tenant_share=0.6
)


def end_of(request_id: str) -> RequestObserved:
    """End of a request of `acme`."""
    return replace(OBSERVED, request_id=RequestId(request_id), tenant=ACME)


def other_holds(rig: GrouperRig, tokens: int) -> None:
    rig.grouper.state.admit(RequestId("other's"), TenantId("other"), tokens, at=NOW)


async def take(rig: GrouperRig, request_id: str, **fields: Any) -> asyncio.Task[None]:
    """Pass a request of `acme` to the grouper, where it may wait."""
    body = BODY | {"id": request_id, "tenant": ACME} | fields
    await rig.publish(body, user_id="guest")
    return asyncio.create_task(rig.grouper.on_request(await rig.pull()))


async def take_into_outage(rig: GrouperRig, request_id: str) -> asyncio.Task[None]:
    """Pass a request of `acme` to the grouper; it waits for the lanes' exchange."""
    rig.broker.down.add(topology.LANES)
    before = rig.broker.attempts.count(topology.LANES)
    task = await take(rig, request_id)
    await eventually(lambda: rig.broker.attempts.count(topology.LANES) > before)
    return task


def outstanding(rig: GrouperRig) -> tuple[int, int]:
    """Numbers of outstanding tokens and requests."""
    state = rig.grouper.state
    return state.shares.total, len(state.outstanding)


@pytest.mark.parametrize(
    "settings",
    [
        GrouperSettings(max_outstanding_tokens=2 * EACH),
        GrouperSettings(max_tenant_tokens=2 * EACH),
    ],
    ids=["of all", "of a tenant"],
)
async def test_burst_is_admitted_only_up_to_the_limit(
    registry: ModelRegistry, settings: GrouperSettings
):
    async with open_grouper(registry, settings) as rig:
        rig.broker.down.add(topology.LANES)
        tasks = [await take(rig, f"r{number}") for number in range(5)]
        await eventually(lambda: sum(task.done() for task in tasks) == 3)
        state = rig.grouper.state
        before = (state.admitted, state.refused)
        rig.broker.down.clear()
        await asyncio.gather(*tasks)

        assert before == (0, 3)
        assert (state.admitted, state.refused) == (2, 3)
        assert await rig.far.ready(LANE) == 2
        assert outstanding(rig) == (2 * EACH, 2)


async def test_burst_above_its_tenants_share_goes_to_overflow(registry: ModelRegistry):
    """The first request makes the tenant's share half; the second would make it two thirds."""
    async with open_grouper(registry, SHARED) as rig:
        other_holds(rig, EACH)
        rig.broker.down.add(topology.LANES)
        tasks = [await take(rig, f"r{number}") for number in range(2)]
        await eventually(lambda: rig.broker.attempts.count(topology.LANES) >= 2)
        rig.broker.down.clear()
        await asyncio.gather(*tasks)

        assert (await rig.far.ready(LANE), await rig.far.ready(OVERFLOW)) == (1, 1)


async def test_request_that_ends_before_its_confirm_no_longer_counts(rig: GrouperRig):
    """The agent ends the request before the lane's confirm arrives."""
    task = await take_into_outage(rig, "quick")
    rig.grouper.on_ended(end_of("quick"))
    rig.broker.down.clear()
    await task

    assert outstanding(rig) == (0, 0)
    assert rig.grouper.state.admitted == 1


async def test_request_refused_by_its_lane_is_not_counted(rig: GrouperRig):
    await rig.far.declare_queue(QueueSpec(name=LANE, type=QueueType.CLASSIC))
    await (await take(rig, "r1"))

    assert outstanding(rig) == (0, 0)
    assert rig.grouper.state.admitted == 0


async def test_request_cancelled_while_publishing_is_not_counted(rig: GrouperRig):
    task = await take_into_outage(rig, "r1")
    during = outstanding(rig)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)

    assert during == (EACH, 1)
    assert outstanding(rig) == (0, 0)


async def test_failed_copy_keeps_the_reservation_of_the_first_copy(registry: ModelRegistry):
    """The grouper publishes the copy, because it has forgotten the id (after 20,000 others)."""
    async with open_grouper(registry, GrouperSettings(duplicate_memory=1)) as rig:
        await (await take(rig, "same"))
        await (await take(rig, "other"))
        rig.grouper.on_ended(end_of("other"))
        task = await take_into_outage(rig, "same")
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        after_copy = outstanding(rig)
        rig.grouper.on_ended(end_of("same"))

        assert after_copy == (EACH, 1)
        assert outstanding(rig) == (0, 0)


async def test_waiting_request_counts_until_it_is_redelivered(registry: ModelRegistry):
    async with open_grouper(registry, ROUTED) as rig:
        routing = rig.grouper.routing
        assert routing is not None
        await topology.declare_work_queue(rig.far, inbox_name(ONE))
        routing.on_status(status(ONE))
        await (await take(rig, "runs", **CHAT | {"prompt": [10] * 4000}))
        runs = outstanding(rig)
        task = await take(rig, "waits", **CHAT)
        await eventually(lambda: routing.num_waiting == 1)
        waits = outstanding(rig)
        routing.on_connection_lost()
        await task

        assert waits == (runs[0] + EACH, 2)
        assert outstanding(rig) == runs


async def test_share_is_decided_at_arrival(registry: ModelRegistry):
    """The request has half of all tokens; its tenant's later requests do not change its share."""
    async with open_grouper(registry, ROUTED) as rig:
        routing = rig.grouper.routing
        assert routing is not None
        await topology.declare_work_queue(rig.far, inbox_name(ONE))
        routing.on_status(status(ONE))
        await (await take(rig, "runs", **CHAT | {"prompt": [10] * 4000, "tenant": "other"}))
        task = await take(rig, "waits", **CHAT | {"max_tokens": 3000, "ignore_eos": True})
        await eventually(lambda: routing.num_waiting == 1)
        await (await take(rig, "later", **BODY | {"max_tokens": 4000, "ignore_eos": True}))
        routing.close()
        await task

        assert rig.grouper.state.shares.outstanding(ACME) == 3003 + 4003
        assert await rig.far.ready(LONG_OVERFLOW) == 1
        assert await rig.far.ready(LONG_CHATS) == 1
