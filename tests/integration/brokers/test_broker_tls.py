"""A broker that is reached over TLS, with a certificate of a private authority."""

import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from ops.broker import PrivateNode
from ops.ports import free_ports
from shared.broker.amqp.broker import AmqpBroker
from shared.broker.protocol import OutMessage, PublishOutcome, QueueSpec, QueueType
from shared.contracts.errors import BrokerUnavailableError
from tests.brokers import release_of
from tests.requirements import program

pytestmark = pytest.mark.rabbitmq
PRIVATE = QueueSpec(name="private", type=QueueType.CLASSIC, durable=False, exclusive=True)


@dataclass(frozen=True)
class Authority:
    """A private certificate authority."""

    certificate: Path
    key: Path

    @classmethod
    def in_folder(cls, folder: Path) -> "Authority":
        folder.mkdir()
        made = cls(folder / "ca.pem", folder / "ca.key")
        _request("/CN=private authority", made.certificate, made.key)
        return made

    def certify(self, certificate: Path, key: Path) -> None:
        """Make a certificate for 127.0.0.1, and its key."""
        _request(
            "/CN=node",
            certificate,
            key,
            *("-addext", "subjectAltName=IP:127.0.0.1"),
            *("-CA", str(self.certificate), "-CAkey", str(self.key)),
        )


def _request(subject: str, certificate: Path, key: Path, *options: str) -> None:
    subprocess.run(
        [
            *(program("openssl", "openssl"), "req", "-x509", "-nodes", "-days", "2"),
            *("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-subj", subject),
            *("-keyout", str(key), "-out", str(certificate), *options),
        ],
        check=True,
        capture_output=True,
    )


@dataclass(frozen=True)
class Rig:
    """A node that accepts TLS, and the authority of its certificate."""

    port: int
    authority: Authority

    def url(self, authority: Authority) -> str:
        return f"amqps://guest:guest@127.0.0.1:{self.port}/?cafile={authority.certificate}"


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    root = tmp_path_factory.mktemp("tls")
    authority = Authority.in_folder(root / "authority")
    certificate, key = root / "node.pem", root / "node.key"
    authority.certify(certificate, key)
    (port,) = free_ports(1)
    node = PrivateNode(
        root / "node",
        release=release_of("rabbitmq"),
        settings={
            "listeners.ssl.1": f"127.0.0.1:{port}",
            "ssl_options.cacertfile": authority.certificate,
            "ssl_options.certfile": certificate,
            "ssl_options.keyfile": key,
        },
    )
    node.start()
    yield Rig(port, authority)
    node.close()


async def test_a_client_that_knows_the_authority_publishes_over_tls(rig: Rig):
    async with AmqpBroker(rig.url(rig.authority), client_name="test") as broker:
        await broker.declare_queue(PRIVATE)
        outcome = await broker.publish("", "private", OutMessage(body=b"a"))

    assert outcome is PublishOutcome.CONFIRMED


async def test_a_list_of_nodes_is_reached_over_tls(rig: Rig):
    (closed,) = free_ports(1)
    url = rig.url(rig.authority)
    urls = f"{url.replace(str(rig.port), str(closed))},{url}"
    async with AmqpBroker(urls, client_name="test") as broker:
        assert broker.connected


async def test_a_certificate_of_another_authority_is_refused(rig: Rig, tmp_path: Path):
    other = Authority.in_folder(tmp_path / "other")
    with pytest.raises(BrokerUnavailableError, match="certificate verify failed"):
        async with AmqpBroker(rig.url(other), client_name="test"):
            pass
