"""Connections to a broker by URL."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from shared.broker.amqp.broker import AmqpBroker
from shared.broker.amqp.nodes import Nodes, parts_of
from shared.broker.memory.broker import MemoryBroker
from shared.broker.memory.hub import MemoryHub
from shared.broker.protocol import Broker
from shared.contracts.errors import SettingsError


@asynccontextmanager
async def open_broker(
    url: str, client_name: str, *, hub: MemoryHub | None = None
) -> AsyncIterator[Broker]:
    """
    Context with a connected broker client.

    Args:
        url: `amqp://`, `amqps://`, or `memory://`; a list separated by commas names several nodes
            of a broker.
        client_name: Name of the connection in the broker's management view.
        hub: The in-process server; required with `memory://` and forbidden otherwise.

    Raises:
        SettingsError: The scheme is unknown, the login is refused, or `memory://` has no hub.
        BrokerUnavailableError: The broker does not answer.
    """
    scheme = scheme_of(url)
    broker: AmqpBroker | MemoryBroker
    if scheme in ("amqp", "amqps") and hub is None:
        broker = AmqpBroker(url, client_name=client_name)
    elif scheme == "memory" and hub is not None:
        broker = MemoryBroker(hub, client_name=client_name)
    else:
        raise SettingsError(
            "broker URL memory:// works only inside one process (the `headway` command); "
            "use amqp://user:password@host:5672/ between processes"
        )
    async with broker:
        yield broker


def check_broker_url(url: str) -> None:
    """
    Check a broker's URL without connecting.

    Raises:
        SettingsError: It is empty or cannot be read, or its scheme is unknown.
    """
    if scheme_of(url) != "memory":
        Nodes(url)


def scheme_of(url: str) -> str:
    """
    The scheme of a broker's URL.

    Raises:
        SettingsError: The URL is empty or cannot be read, or its scheme is unknown.
    """
    scheme = parts_of(url).scheme
    if scheme not in ("amqp", "amqps", "memory"):
        raise SettingsError(
            f"broker URL must begin with amqp://, amqps:// or memory://, not {scheme!r}"
        )
    return scheme
