"""Selection of the broker by URL."""

import pytest

from shared.broker.connect import check_broker_url, open_broker
from shared.broker.memory.broker import MemoryBroker
from shared.broker.memory.hub import MemoryHub
from shared.contracts.errors import SettingsError


async def test_memory_with_a_hub_opens_an_in_process_client():
    async with open_broker("memory://", client_name="test", hub=MemoryHub()) as broker:
        assert isinstance(broker, MemoryBroker)
        assert broker.connected


@pytest.mark.parametrize("password", ["se/cret", "se#cret", "se?cret"])
async def test_a_password_that_is_not_encoded_is_a_settings_error_without_it(password: str):
    with pytest.raises(SettingsError, match="percent-encoded") as raised:
        async with open_broker(f"amqp://me:{password}@127.0.0.1:1/", client_name="test"):
            pass

    assert "cret" not in str(raised.value)


@pytest.mark.parametrize("url", ["", " ", "amqp://[::1/", "amqp://h:port/", "http://h/"])
def test_an_unusable_url_is_refused_without_a_connection(url: str):
    with pytest.raises(SettingsError, match=r"must be|must begin"):
        check_broker_url(url)


@pytest.mark.parametrize("url", ["memory://", "amqp://h/", "amqps://u:p@a:1/v,amqps://u:p@b:1/v"])
def test_a_usable_url_is_accepted_without_a_connection(url: str):
    check_broker_url(url)


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
