"""
Routed mode: when its router dispatches a request, a grouper sends the request to an instance's
inbox, else to a lane.
"""

import asyncio
from collections.abc import AsyncIterator

import pytest

from services.planner.settings import GrouperSettings, RoutingSettings
from services.planner.state import INBOX_MEMORY_S
from shared.broker import topology
from shared.contracts.base import Decoder
from shared.contracts.estimates import LatencyCoefficients, Profile
from shared.contracts.lanes import inbox_name
from shared.contracts.routing import PrefillsSampled, PrefillTrees, RouterState
from shared.contracts.telemetry import InboxUsed, LanesObserved
from shared.models.registry import ModelRegistry
from shared.runtime.stall_detector import StallDetector
from tests.brokers import eventually
from tests.clocks import NOW
from tests.queued import MODEL
from tests.unit.planner.rig import BODY, LANE, GrouperRig, listen, open_grouper
from tests.unit.planner.routed_rig import ONE, TWO, a_prefill, observed, prefill_of, status

pytestmark = pytest.mark.virtual_time

CHAT = {**BODY, "slo": {"ttft_s": 5.0, "tbt_s": 1.0}}
ROUTED = GrouperSettings(routing=RoutingSettings(policy="default", max_waiting=2))
CHAT_LANE = "lane.2.tiny-llama.high.2.w0"


@pytest.fixture
async def routed(registry: ModelRegistry) -> AsyncIterator[GrouperRig]:
    async with open_grouper(registry, ROUTED) as rig:
        for instance_id in (ONE, TWO):
            await topology.declare_work_queue(rig.far, inbox_name(instance_id))
        yield rig


def learnt(*, linear_s: float, num_iterations: int = 500) -> Profile:
    """A profile of the instances' engine and device."""
    latency = LatencyCoefficients(constant_s=0.01, linear_s=linear_s)
    return Profile(
        model=MODEL,
        engine="e",
        device="d",
        version=1,
        at=NOW,
        latency=latency,
        num_iterations=num_iterations,
    )


async def lanes_with_something(rig: GrouperRig) -> set[str]:
    return {name for name in rig.grouper.placement.queues.put if await rig.far.ready(name)}


async def take(rig: GrouperRig, body: dict[str, object], message_id: str) -> asyncio.Task[None]:
    """Pass a request to the grouper, where it may wait for its turn."""
    await rig.publish(body, message_id=message_id)
    return asyncio.create_task(rig.grouper.on_request(await rig.pull()))


async def test_interactive_request_goes_to_an_instance(routed: GrouperRig):
    assert routed.grouper.routing is not None
    routed.grouper.routing.on_status(status(ONE))
    await routed.submit(CHAT, message_id="m1")

    request = await routed.queued(inbox_name(ONE))
    assert (request.request_id, request.lane.split(".")[0]) == ("m1", "lane")
    assert routed.grouper.routing.num_routed == 1
    assert await routed.unsettled() == 0


async def test_used_inboxes_are_reported_for_an_hour(routed: GrouperRig):
    assert routed.grouper.routing is not None
    reports = await listen(routed.far, topology.TELEMETRY, "lanes.#")
    decode: Decoder[LanesObserved] = Decoder(LanesObserved)
    routed.grouper.routing.on_status(status(ONE))
    await routed.submit(CHAT, message_id="m1")
    reported = []
    for pause_s in (2.0, INBOX_MEMORY_S):
        routed.clock.advance(pause_s)
        await routed.grouper.report()
        reported.append(decode((await routed.far.take(reports)).body).inboxes)

    assert reported == [(InboxUsed(instance_id=ONE, idle_s=2.0),), ()]


async def test_other_requests_are_pulled(routed: GrouperRig):
    assert routed.grouper.routing is not None
    routed.grouper.routing.on_status(status(ONE))
    await routed.submit(BODY, message_id="m1")

    assert (await routed.queued(LANE)).request_id == "m1"


async def test_request_without_an_instance_is_pulled(routed: GrouperRig):
    assert routed.grouper.routing is not None
    routed.grouper.routing.on_status(status(ONE, model="tiny-qwen"))
    await routed.submit(CHAT)

    (lane,) = await lanes_with_something(routed)
    assert lane.startswith("lane.")
    assert routed.grouper.routing.num_left_to_lanes == 1


async def test_number_of_requests_waiting_unacknowledged_is_bounded(routed: GrouperRig):
    routing = routed.grouper.routing
    assert routing is not None
    routing.on_status(status(ONE))
    big = {**CHAT, "prompt": [10] * 4000}
    await routed.submit(big, message_id="runs")
    waiting = [await take(routed, CHAT, f"waits-{number}") for number in range(2)]
    await eventually(lambda: routing.num_waiting == 2)
    await routed.submit(CHAT, message_id="one too many")
    runs = await routed.queued(inbox_name(ONE))

    assert len(await lanes_with_something(routed)) == 1
    routing.on_prefills(observed(prefill_of(runs)))
    await asyncio.gather(*waiting)
    assert await routed.far.ready(inbox_name(ONE)) == 2
    assert await routed.unsettled() == 0


async def test_request_that_waits_for_its_turn_ends_at_its_end(routed: GrouperRig):
    routing = routed.grouper.routing
    assert routing is not None
    routing.on_status(status(ONE))
    await routed.submit({**CHAT, "prompt": [10] * 4000}, message_id="runs")
    await (await take(routed, {**CHAT, "ttl_s": 3.0}, "waits"))

    failed = await routed.failure()
    assert (failed.request_id, failed.error.code) == ("waits", "deadline_expired")
    assert "it waited for its turn" in failed.error.message
    assert (failed.error.status, routing.num_waiting) == (504, 0)
    assert await routed.far.ready(inbox_name(ONE)) == 1
    assert await routed.unsettled() == 0


@pytest.mark.parametrize("gone", [{"draining": True}, {"takes_in": False}])
async def test_requests_of_a_lost_instance_are_reassigned(
    routed: GrouperRig, gone: dict[str, bool]
):
    routing = routed.grouper.routing
    assert routing is not None
    routing.on_status(status(ONE))
    await routed.submit({**CHAT, "prompt": [10] * 4000}, message_id="runs")
    task = await take(routed, CHAT, "waits")
    await eventually(lambda: routing.num_waiting == 1)
    routing.on_status(status(TWO))
    routing.on_status(status(ONE, **gone, seq=2))
    await task

    assert (await routed.queued(inbox_name(TWO))).request_id == "waits"


async def test_silent_instance_gets_no_more_requests(routed: GrouperRig):
    routing = routed.grouper.routing
    assert routing is not None
    routing.on_status(status(ONE))
    await routed.submit({**CHAT, "prompt": [10] * 4000}, message_id="runs")
    task = await take(routed, CHAT, "waits")
    await eventually(lambda: routing.num_waiting == 1)
    routed.clock.advance(10.0)
    await routing.dispatch()
    await task

    assert any(name.startswith("lane.") for name in await lanes_with_something(routed))


async def test_stalled_grouper_declares_no_instance_silent(
    routed: GrouperRig, monkeypatch: pytest.MonkeyPatch
):
    """The grouper has not yet read statuses that were published during its stall."""
    routing = routed.grouper.routing
    assert routing is not None
    routing.on_status(status(ONE))
    monkeypatch.setattr(StallDetector, "missed_s", lambda _: 10.0)
    routed.clock.advance(10.0)
    await routing.dispatch()
    await routed.submit(CHAT, message_id="m1")

    assert (await routed.queued(inbox_name(ONE))).request_id == "m1"


async def test_request_for_a_closed_inbox_goes_to_its_lane(routed: GrouperRig):
    routing = routed.grouper.routing
    assert routing is not None
    routing.on_status(status(ONE))
    await topology.close_work_queue(routed.far, inbox_name(ONE))
    await routed.submit(CHAT, message_id="m1")

    (lane,) = await lanes_with_something(routed)
    assert (await routed.queued(lane)).request_id == "m1"
    assert lane.startswith("lane.")


async def test_waiting_requests_go_to_lanes_when_the_grouper_ends(routed: GrouperRig):
    routing = routed.grouper.routing
    assert routing is not None
    routing.on_status(status(ONE))
    await routed.submit({**CHAT, "prompt": [10] * 4000})
    task = await take(routed, CHAT, "waits")
    await eventually(lambda: routing.num_waiting == 1)
    routing.close()
    await task

    assert any(name.startswith("lane.") for name in await lanes_with_something(routed))


async def test_learnt_state_is_published(routed: GrouperRig):
    routing = routed.grouper.routing
    assert routing is not None
    states = await listen(routed.far, topology.TELEMETRY, topology.ROUTER_KEY)
    samples = await listen(routed.far, topology.TELEMETRY, topology.OBSERVED_SAMPLES_KEY)
    routing.on_status(status(ONE))
    await routed.submit(CHAT)
    request = await routed.queued(inbox_name(ONE))
    routing.on_prefills(observed(a_prefill(1), prefill_of(request, 0.125)))
    await routing.share()

    decode_state: Decoder[RouterState] = Decoder(RouterState)
    decode_samples: Decoder[PrefillsSampled] = Decoder(PrefillsSampled)
    state = decode_state((await routed.far.take(states)).body)
    sampled = decode_samples((await routed.far.take(samples)).body)
    assert state.work.work["grouper-of-the-test"][ONE].num_finished == 1
    assert [each.prefill_s for each in sampled.samples] == [0.125]


async def test_work_is_published_at_once_if_there_is_another_router(routed: GrouperRig):
    routing = routed.grouper.routing
    assert routing is not None
    states = await listen(routed.far, topology.TELEMETRY, topology.ROUTER_KEY)
    routing.on_status(status(ONE))
    await routed.submit(CHAT)
    await routing.share_work()
    alone = await routed.far.ready(states)
    routing.on_state(RouterState(sender="another", model=MODEL, at=NOW))
    await routing.share_work()
    await routing.share_work()

    assert (alone, await routed.far.ready(states)) == (0, 1)


async def test_latency_model_is_used_until_there_are_trees(routed: GrouperRig):
    routing = routed.grouper.routing
    assert routing is not None
    routing.on_status(status(ONE))
    for iterations in (10, 500):
        routing.on_profile(learnt(linear_s=1e-3, num_iterations=iterations))
        versions = [each.prefills.version(("e", "d")) for each in routing.routers]
        assert versions[0].startswith("prior" if iterations == 10 else "latency")


async def test_routers_with_different_latency_models_share_no_residuals(
    registry: ModelRegistry,
):
    """One router started earlier and keeps the latency model of that time."""
    versions = []
    for linear_s in (1e-3, 1e-3, 2e-3):
        async with open_grouper(registry, ROUTED) as rig:
            routing = rig.grouper.routing
            assert routing is not None
            routing.on_status(status(ONE))
            routing.on_profile(learnt(linear_s=linear_s))
            versions += [each.prefills.version(("e", "d")) for each in routing.routers]

    assert versions[0] == versions[1] != versions[2]


async def test_trees_with_another_schema_are_refused(routed: GrouperRig):
    routing = routed.grouper.routing
    assert routing is not None
    routing.on_status(status(ONE))
    body = b'{"schema_version":99,"features":[]}'
    routing.on_trees(
        PrefillTrees(model=MODEL, engine="e", device="d", version=1, at=NOW, trees=body)  # type: ignore[arg-type]
    )
    await routed.submit(CHAT)

    assert routing.routers[0].prefills.version(("e", "d")).startswith("prior")
    assert (await routed.queued(inbox_name(ONE))).model.base == MODEL


async def test_model_may_be_added_while_state_is_published(routed: GrouperRig):
    routing = routed.grouper.routing
    assert routing is not None
    routing.on_status(status(ONE))
    routing.on_state(RouterState(sender="another", model=MODEL, at=NOW))
    await routed.submit(CHAT)
    routed.broker.while_sending = lambda: routing.on_status(
        status(TWO, model=f"model {len(routing.routers)}")
    )
    await routing.share_work()
    assert len(routing.routers) == 2
    await routing.share()

    assert len(routing.routers) == 4


async def test_waiting_requests_are_redelivered_after_a_connection_loss(routed: GrouperRig):
    """The grouper must not also send the requests that the broker redelivers."""
    routing = routed.grouper.routing
    assert routing is not None
    routing.on_status(status(ONE))
    await routed.submit({**CHAT, "prompt": [10] * 4000}, message_id="runs")
    runs = await routed.queued(inbox_name(ONE))
    task = await take(routed, CHAT, "waits")
    await eventually(lambda: routing.num_waiting == 1)
    routing.on_connection_lost()
    await task
    routing.on_prefills(observed(prefill_of(runs)))

    assert (routing.num_waiting, await routed.far.ready(inbox_name(ONE))) == (0, 0)
    assert await lanes_with_something(routed) == set()
    assert await routed.unsettled() == 1


async def test_first_tokens_missed_with_the_connection_are_not_awaited(
    routed: GrouperRig,
):
    routing = routed.grouper.routing
    assert routing is not None
    routing.on_status(status(ONE))
    await routed.submit({**CHAT, "prompt": [10] * 4000}, message_id="runs")
    await routed.queued(inbox_name(ONE))
    routing.on_connection_lost()
    await routed.submit(CHAT, message_id="next")

    assert (await routed.queued(inbox_name(ONE))).request_id == "next"


async def test_wait_for_a_stuck_instance_is_bounded(routed: GrouperRig):
    routing = routed.grouper.routing
    assert routing is not None
    routing.on_status(status(ONE))
    routing.on_profile(learnt(linear_s=1e-3))
    await routed.submit({**CHAT, "prompt": [10] * 4000}, message_id="runs")
    task = await take(routed, CHAT, "waits")
    await eventually(lambda: routing.num_waiting == 1)
    waited_s = 0.0
    while not task.done() and waited_s < 2 * ROUTED.routing.max_wait_s:
        routed.clock.advance(1.0)
        waited_s += 1.0
        routing.on_status(
            status(ONE, at=routed.clock.now(), prefill_backlog_tokens=4000, running=1)
        )
        await routing.dispatch()
        await asyncio.sleep(0)
    await asyncio.wait_for(task, 60)

    (lane,) = await lanes_with_something(routed)
    assert (await routed.queued(lane)).request_id == "waits"
    assert routing.routers[0].num_waiting == 0


async def test_cancelled_wait_leaves_no_state(routed: GrouperRig):
    routing = routed.grouper.routing
    assert routing is not None
    routing.on_status(status(ONE))
    await routed.submit({**CHAT, "prompt": [10] * 4000}, message_id="runs")
    task = await take(routed, CHAT, "waits")
    await eventually(lambda: routing.num_waiting == 1)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)

    assert (routing.num_waiting, routing.routers[0].num_waiting) == (0, 0)


async def test_each_global_queue_has_a_separate_waiting_limit(registry: ModelRegistry):
    routing = RoutingSettings(policy="default", scope="all", max_waiting=1, max_waiting_rest=1)
    async with open_grouper(registry, GrouperSettings(routing=routing)) as rig:
        await topology.declare_work_queue(rig.far, inbox_name(ONE))
        assert rig.grouper.routing is not None
        rig.grouper.routing.on_status(status(ONE))
        await rig.submit({**CHAT, "prompt": [10] * 4000}, message_id="runs")
        waiting = [await take(rig, body, f"waits-{n}") for n, body in enumerate((CHAT, BODY))]
        await eventually(
            lambda: rig.grouper.routing is not None and rig.grouper.routing.num_waiting == 2
        )
        await rig.submit(BODY, message_id="one too many")

        assert (await rig.queued(LANE)).request_id == "one too many"
        rig.grouper.routing.close()
        await asyncio.gather(*waiting)


async def test_requests_of_a_failing_router_go_to_their_lane(
    routed: GrouperRig, monkeypatch: pytest.MonkeyPatch
):
    assert routed.grouper.routing is not None

    async def broken(_request: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(routed.grouper.routing, "place", broken)
    await routed.submit(CHAT, message_id="m1")

    (lane,) = await lanes_with_something(routed)
    assert (await routed.queued(lane)).request_id == "m1"
