"""Starts of runs for the store."""

import pytest

from services.agent.telemetry.stored_starts import StoredStarts
from shared.broker import topology
from shared.broker.memory.hub import MemoryHub
from shared.contracts.base import Decoder, RequestId, TenantId
from shared.contracts.stored import RunsStarted, StoredStart
from tests.agents.rig import I1
from tests.deliveries import UnreliableBroker

pytestmark = pytest.mark.virtual_time
decode_starts: Decoder[RunsStarted] = Decoder(RunsStarted)


async def test_starts_for_the_store_are_gathered_into_one_message():
    starts = [
        StoredStart(tenant=TenantId("t"), request_id=RequestId(f"r{n}"), at=1.0) for n in range(3)
    ]
    async with UnreliableBroker(MemoryHub()) as broker:
        await topology.declare(broker)
        stored = StoredStarts(broker, I1)
        for each in starts:
            stored.add(each)
        await stored.send()
        await stored.send()

        assert await broker.ready(topology.STORED) == 1
        sent = decode_starts((await broker.take(topology.STORED)).body)
        assert sent == RunsStarted(instance_id=I1, starts=tuple(starts))
