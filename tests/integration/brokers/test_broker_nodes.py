"""Clients whose URL names several nodes of a broker, of which some do not answer."""

import contextlib
import socket
from collections.abc import Iterator

import pytest
from yarl import URL

from ops.ports import free_port
from shared.broker.amqp.broker import AmqpBroker
from shared.broker.protocol import OutMessage, PublishOutcome, QueueSpec, QueueType
from shared.contracts.errors import BrokerUnavailableError, SettingsError
from tests.brokers import eventually
from tests.tcp_proxy import TcpProxy

pytestmark = pytest.mark.rabbitmq
PRIVATE = QueueSpec(name="private", type=QueueType.CLASSIC, durable=False, exclusive=True)


def at(url: str, port: int) -> str:
    return str(URL(url).with_host("127.0.0.1").with_port(port))


@contextlib.contextmanager
def silent_port() -> Iterator[int]:
    """A port that accepts connections, and answers nothing, as a frozen node does."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


async def test_the_first_node_that_answers_is_used(rabbit_url: str):
    with silent_port() as silent:
        urls = f"{at(rabbit_url, free_port())},{at(rabbit_url, silent)},{rabbit_url}"
        async with AmqpBroker(urls, client_name="test", timeout_s=1.0) as broker:
            await broker.declare_queue(PRIVATE)
            outcome = await broker.publish("", "private", OutMessage(body=b"a"))

    assert outcome is PublishOutcome.CONFIRMED


async def test_an_error_names_each_node_that_does_not_answer(rabbit_url: str):
    ports = free_port(), free_port()
    urls = ",".join(at(rabbit_url, port) for port in ports)
    with pytest.raises(BrokerUnavailableError) as raised:
        async with AmqpBroker(urls, client_name="test", timeout_s=1.0):
            pass

    assert "none of the broker's 2 nodes answers" in str(raised.value)
    assert all(f"to 127.0.0.1:{port}:" in str(raised.value) for port in ports)


async def test_a_refused_login_is_reported_although_another_node_does_not_answer(rabbit_url: str):
    wrong = str(URL(rabbit_url).with_password("wrong"))
    with pytest.raises(SettingsError, match="refuses the login"):
        async with AmqpBroker(f"{at(wrong, free_port())},{wrong}", client_name="test"):
            pass


async def test_a_client_moves_to_another_node_when_its_own_is_lost(rabbit_url: str):
    url = URL(rabbit_url)
    host, port = url.host or "127.0.0.1", url.port or 5672
    async with TcpProxy(host, port) as first, TcpProxy(host, port) as second:
        urls = f"{at(rabbit_url, first.port)},{at(rabbit_url, second.port)}"
        async with AmqpBroker(urls, client_name="test", timeout_s=5.0, reconnect_s=0.02) as broker:
            await broker.declare_queue(PRIVATE)
            first.refusing = True
            first.drop()

            async def arrives() -> bool:
                try:
                    outcome = await broker.publish("", "private", OutMessage(body=b"a"))
                except BrokerUnavailableError:
                    return False
                return outcome is PublishOutcome.CONFIRMED

            await eventually(arrives)
