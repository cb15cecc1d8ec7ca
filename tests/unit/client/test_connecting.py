"""Errors of connecting are those of the client."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

import shared.client.client
from shared.broker.memory.broker import MemoryBroker
from shared.broker.memory.hub import MemoryHub
from shared.client import BrokerUnavailableError, SettingsError, connect
from shared.contracts.errors import ContractError


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("amqp://guest:guest@127.0.0.1:port/", "the broker's URL cannot be read"),
        ("amqp://guest:guest@127.0.0.1:99999/", "the broker's URL cannot be read"),
        ("amqp://[::1/", "the broker's URL cannot be read"),
        ("", "must begin with amqp://"),
        ("127.0.0.1", "must begin with amqp://"),
    ],
)
async def test_an_invalid_url_is_a_settings_error(url: str, message: str):
    with pytest.raises(SettingsError, match=message):
        async with connect(url):
            pass


async def test_a_broker_without_a_mesh_is_named(monkeypatch: pytest.MonkeyPatch):
    @asynccontextmanager
    async def opened(_url: str, *, client_name: str) -> AsyncIterator[MemoryBroker]:
        async with MemoryBroker(MemoryHub()) as broker:
            yield broker

    monkeypatch.setattr(shared.client.client, "AmqpBroker", opened)
    with pytest.raises(BrokerUnavailableError, match="has a planner been started"):
        async with connect("amqp://127.0.0.1/"):
            pass


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
async def test_a_time_limit_is_finite_and_not_negative(value: float):
    with pytest.raises(ContractError, match=r"give_up_after_s is .*at least 0"):
        async with connect("amqp://127.0.0.1/", give_up_after_s=value):
            pass
