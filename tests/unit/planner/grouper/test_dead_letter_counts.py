"""A grouper counts dead letters by reason, and requests that end without an instance by class."""

import asyncio
from dataclasses import replace

import pytest

from services.planner.grouper.dead_letter_replies import DEAD_LETTER_REASONS
from services.planner.grouper.watched_ends import GRACE_S
from shared.broker import topology
from shared.broker.protocol import HeaderValue, OutMessage
from shared.runtime.metrics import OTHER
from tests.brokers import eventually
from tests.queued import BATCH, a_request
from tests.unit.planner.rig import BODY, LANE, REPLIES_TO, GrouperRig, queued_bytes

pytestmark = pytest.mark.virtual_time


async def dead_letter(rig: GrouperRig, body: bytes = b"?", **headers: HeaderValue) -> None:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    await rig.far.publish(topology.DEAD, LANE, OutMessage(body=body, headers=named))
    await rig.handle_dead_letter()


@pytest.mark.parametrize(
    ("headers", "reason"),
    [
        ({"headway_reason": "poison_request: the engine crashed 3 times"}, "poison_request"),
        ({"headway_reason": "undecodable: not JSON: at byte 3"}, "undecodable"),
        ({"headway_reason": "model_not_found: x", "x_first_death_reason": "rejected"}, None),
        ({"x_first_death_reason": "delivery_limit"}, "delivery_limit"),
        ({"headway_reason": "code_of_an_attached_server: x"}, OTHER),
        ({"headway_reason": "no code"}, OTHER),
        ({}, OTHER),
    ],
)
async def test_dead_letter_counts_by_its_code_or_the_brokers_reason(
    rig: GrouperRig, headers: dict[str, str], reason: str | None
):
    await dead_letter(rig, **headers)

    assert rig.grouper.state.dead_letters == {reason or "model_not_found": 1}
    assert rig.grouper.state.dead_letters.keys() <= {*DEAD_LETTER_REASONS}


async def test_refused_request_counts_once(rig: GrouperRig):
    await rig.submit(BODY | {"model": "no-such-model"})
    await rig.handle_dead_letter()

    assert rig.grouper.state.dead_letters == {"model_not_found": 1}
    assert rig.grouper.state.violated == {}


async def test_dead_letter_counts_when_its_reply_is_confirmed(rig: GrouperRig):
    request = a_request("r1", reply_to=REPLIES_TO, lane=LANE)
    death = {"x-first-death-reason": "delivery_limit", "x-first-death-queue": LANE}
    rig.broker.down.add(topology.REPLIES)
    await rig.far.publish(topology.DEAD, LANE, replace(queued_bytes(request), headers=death))
    handling = asyncio.create_task(rig.handle_dead_letter())
    await eventually(lambda: topology.REPLIES in rig.broker.attempts)
    assert rig.grouper.state.dead_letters == {}
    rig.broker.down.clear()
    await handling

    assert rig.grouper.state.dead_letters == {"delivery_limit": 1}
    assert rig.grouper.state.violated == {"interactive": 1}
    assert rig.grouper.state.violated_by_tenant.samples() == [(("acme", "interactive"), 1.0)]


async def test_request_that_ends_where_it_waits_counts_as_missed_by_class_and_tenant(
    rig: GrouperRig,
):
    await rig.submit(BODY | {"ttl_s": 10.0, "slo": {"ttlt_s": 60.0}})
    rig.clock.advance(10.0 + GRACE_S)
    await rig.grouper.expiry.end_due()

    assert rig.grouper.state.violated == {"non_interactive": 1}
    assert rig.grouper.state.violated_by_tenant.samples() == [
        (("anonymous", "non_interactive"), 1.0)
    ]


async def test_request_that_the_broker_drops_at_its_end_counts_as_missed_once(rig: GrouperRig):
    request = a_request("r1", slo=BATCH, expires_at=rig.clock.now(), lane=LANE)
    body = queued_bytes(request).body
    for _ in range(2):
        await dead_letter(rig, body, x_first_death_reason="expired", x_first_death_queue=LANE)

    assert rig.grouper.state.violated == {"non_interactive": 1}
    assert rig.grouper.state.dead_letters == {"expired": 2}
