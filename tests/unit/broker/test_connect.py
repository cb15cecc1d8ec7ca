"""Selection of the broker by URL."""

import pytest

from shared.broker.connect import open_broker
from shared.broker.memory.broker import MemoryBroker
from shared.broker.memory.hub import MemoryHub
from shared.contracts.errors import SettingsError


async def test_memory_with_a_hub_opens_an_in_process_client():
    async with open_broker("memory://", client_name="test", hub=MemoryHub()) as broker:
        assert isinstance(broker, MemoryBroker)
        assert broker.connected


@pytest.mark.parametrize(
    ("url", "hub"),
    [
        ("memory://", None),
        ("http://localhost/", None),
        ("", None),
        ("amqp://localhost/", MemoryHub()),
    ],
)
async def test_urls_with_unknown_schemes_are_settings_errors(url: str, hub: MemoryHub | None):
    with pytest.raises(SettingsError, match="broker URL"):
        async with open_broker(url, client_name="test", hub=hub):
            pass
