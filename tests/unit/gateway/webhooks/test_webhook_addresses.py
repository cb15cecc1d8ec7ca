"""Addresses that webhooks reach, and those that they do not."""

import ipaddress
import socket

import pytest
from aiohttp.abc import AbstractResolver, ResolveResult

from services.gateway.webhooks.sender import (
    CheckedResolver,
    PrivateAddressError,
    Sender,
    is_public,
)

PUBLIC = ("93.184.216.34", "8.8.8.8", "2606:2800:220:1:248:1893:25c8:1946", "64:ff9b::8.8.8.8")
PRIVATE = (
    *("127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "0.0.0.0"),
    *("100.64.0.1", "224.0.0.1", "255.255.255.255", "192.0.2.1", "198.18.0.1"),
    *("::1", "::", "fe80::1", "fc00::1", "fec0::1", "ff02::1", "2001:db8::1"),
    *("::ffff:127.0.0.1", "::ffff:10.0.0.1", "64:ff9b::127.0.0.1", "2002:7f00:1::", "2001::1"),
    *("::127.0.0.1", "::8.8.8.8", "::ffff:0:127.0.0.1", "64:ff9b:1::127.0.0.1", "3fff::1"),
    *("2606:2800::5efe:127.0.0.1", "2606:2800::200:5efe:10.0.0.1", "5f00::1"),
)


@pytest.mark.parametrize("text", PUBLIC)
def test_addresses_of_the_internet_are_public(text: str):
    assert is_public(ipaddress.ip_address(text))


@pytest.mark.parametrize("text", PRIVATE)
def test_other_addresses_are_not(text: str):
    assert not is_public(ipaddress.ip_address(text))


class Names(AbstractResolver):
    """A resolver with fixed answers, one after the other."""

    def __init__(self, *answers: list[str]) -> None:
        self.answers = list(answers)

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        return [
            ResolveResult(hostname=host, host=each, port=port, family=family, proto=0, flags=0)
            for each in self.answers.pop(0)
        ]

    async def close(self) -> None:
        pass


async def test_a_name_with_a_private_address_is_refused_even_beside_a_public_one():
    resolver = CheckedResolver(Names(["8.8.8.8"], ["8.8.8.8", "10.0.0.1"]))

    first = await resolver.resolve("example.com", 443)
    with pytest.raises(PrivateAddressError, match=r"example.com has the address 10\.0\.0\.1"):
        await resolver.resolve("example.com", 443)

    assert [each["host"] for each in first] == ["8.8.8.8"]


@pytest.mark.parametrize(
    "url",
    [
        "https://127.0.0.1:1/hook",
        "https://[::1]:1/hook",
        "https://internal.example:1/hook",
    ],
    ids=["IPv4", "IPv6", "a name"],
)
async def test_no_connection_is_made_to_a_private_address(url: str):
    async with Sender(timeout_s=5.0, allow_private=False, resolver=Names(["127.0.0.1"])) as sender:
        answer = await sender.send(url, b"{}", {}, now=0.0)

    assert "is not public" in answer.outcome
    assert not answer.is_final
