"""The id of an instance belongs to one connection."""

import asyncio

import pytest

from shared.broker import declaring
from shared.broker.declaring import claim_instance
from shared.contracts.errors import SettingsError
from tests.brokers import BrokerRig


async def test_an_id_in_use_is_refused_by_name(
    broker_rig: BrokerRig, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(declaring, "STALE_S", 0.2)
    monkeypatch.setattr(declaring, "CLAIM_PERIOD_S", 0.1)
    one, two = await broker_rig.connect("one"), await broker_rig.connect("two")
    await claim_instance(one, "a-1")
    await claim_instance(two, "a-2")
    await claim_instance(one, "a-1")
    with pytest.raises(SettingsError, match=r"instance_id 'a-1' is in use by another agent"):
        await claim_instance(two, "a-1")


async def test_an_id_is_free_as_soon_as_its_connection_has_ended(broker_rig: BrokerRig):
    two = await broker_rig.connect("two")
    async with broker_rig.open("one") as one:
        await claim_instance(one, "a-1")
        waiting = asyncio.create_task(claim_instance(two, "a-1"))
        await asyncio.sleep(0.1)
        was_refused = waiting.done()
    await waiting

    assert not was_refused
