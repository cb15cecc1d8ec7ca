"""Failures of the broker or the mesh: a producer raises errors and leaves no state behind."""

from dataclasses import replace

import pytest

from ops.generate.replies import REQUEST, started
from shared.broker import topology
from shared.broker.memory.broker import MemoryBroker
from shared.broker.memory.hub import MemoryHub
from shared.broker.protocol import BindingSpec
from shared.contracts.base import RunId
from shared.contracts.control import RunStop, StopReason
from shared.contracts.errors import BrokerUnavailableError, CapacityError
from shared.contracts.requests import ReplyMode
from shared.producer.producer import Producer
from shared.runtime.clock import SystemClock
from tests.unit.producer.producer_rig import BODY, rig

pytestmark = pytest.mark.virtual_time


async def test_absent_broker_is_reported_and_no_state_is_kept():
    async with rig() as it:
        it.hub.stop()

        with pytest.raises(BrokerUnavailableError):
            await it.producer.submit(BODY, reply=ReplyMode.STREAM)

        assert it.producer.num_outstanding == 0
        it.hub.start()
        # The request may have arrived despite the error: then its run must be stopped.
        await it.reply(started("b"))
        stop = RunStop(request_id=REQUEST, run_id=RunId("b"), reason=StopReason.CANCELLED)
        assert stop in [await it.controlled(), await it.controlled()]


async def test_full_global_queue_is_a_capacity_error():
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


async def test_missing_global_queues_make_the_mesh_unavailable():
    hub = MemoryHub()
    async with MemoryBroker(hub) as broker:
        for exchange in topology.EXCHANGES:
            await broker.declare_exchange(exchange)
        async with Producer(broker, name="test", clock=SystemClock()) as producer:
            with pytest.raises(BrokerUnavailableError):
                await producer.submit(BODY, reply=ReplyMode.FINAL)
