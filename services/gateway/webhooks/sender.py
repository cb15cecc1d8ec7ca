"""
Sends webhooks, and refuses addresses inside the network of the mesh.

Names are resolved here, and connections are made to the addresses that were checked: a name that
resolves differently a moment later cannot lead elsewhere.
"""

import ipaddress
import socket
from email.utils import parsedate_to_datetime
from types import TracebackType
from typing import Self

import aiohttp
import msgspec
from aiohttp.abc import AbstractResolver, ResolveResult
from aiohttp.resolver import ThreadedResolver
from yarl import URL

from shared.contracts.base import Seconds, UnixTime
from shared.contracts.errors import MeshError
from shared.runtime.http.failures import failure_reason
from shared.store.objects.webhooks import DELIVERED

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
LOST = (aiohttp.ClientError, TimeoutError, OSError, ValueError)
"""Failures of one attempt; a ValueError is an invalid URL or header."""
SUCCESS = range(200, 300)
_ASSIGNED = ipaddress.IPv6Network("2000::/3")
_DOCUMENTATION = ipaddress.IPv6Network("3fff::/20")
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_ISATAP = (0x00005EFE, 0x02005EFE)
"""Upper half of the interface ids of ISATAP (RFC 5214); the lower half is an IPv4 address."""
GONE = 410
"""Status with which a receiver says that it wants no more events."""


class PrivateAddressError(MeshError):
    """A name leads to an address that webhooks may not reach."""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What came of one attempt."""

    outcome: str
    """`delivered`, or what failed."""
    is_final: bool = False
    """True if another attempt is pointless."""
    retry_after_s: Seconds | None = None
    """Time that the receiver asks for."""


def is_public(address: Address) -> bool:
    """
    True if *address* is one of the public internet.

    IPv4 addresses inside of IPv6 addresses (mapped, 6to4, NAT64, ISATAP) count as what they lead
    to; other IPv6 addresses are public only among those that are assigned to the internet, which
    leaves out IPv4-compatible ones (`::127.0.0.1`), Teredo, and NAT64 inside of one network.
    """
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour or _inner(address)
        if inner is not None:
            return is_public(inner)
        if address.teredo is not None or address not in _ASSIGNED or address in _DOCUMENTATION:
            return False
    return address.is_global and not address.is_multicast


def _inner(address: ipaddress.IPv6Address) -> ipaddress.IPv4Address | None:
    """The IPv4 address to which NAT64 or ISATAP lead."""
    number = int(address)
    is_isatap = (number >> 32) & 0xFFFFFFFF in _ISATAP
    if is_isatap or address in _NAT64:
        return ipaddress.IPv4Address(number & 0xFFFFFFFF)
    return None


class CheckedResolver(AbstractResolver):
    """
    Resolves names to public addresses only.

    Args:
        resolver: Resolves names to all their addresses.
    """

    def __init__(self, resolver: AbstractResolver) -> None:
        self._resolver = resolver

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """
        The public addresses of *host*.

        Raises:
            PrivateAddressError: It has another address; a name with both kinds is also refused.
        """
        found = await self._resolver.resolve(host, port, family)
        for each in found:
            check_address(host, each["host"])
        return found

    async def close(self) -> None:
        await self._resolver.close()


def check_address(host: str, text: str) -> None:
    """
    Check an address of *host*.

    Raises:
        PrivateAddressError: It is not public.
    """
    address = ipaddress.ip_address(text.partition("%")[0])
    if not is_public(address):
        raise PrivateAddressError(
            f"{host} has the address {address}, which is not public (webhooks.allow_private)"
        )


class Sender:
    """
    Makes attempts; an async context.

    Args:
        timeout_s: Time limit of one attempt.
        allow_private: True if all addresses are allowed.
        resolver: Resolves names; tests replace it.
    """

    def __init__(
        self,
        *,
        timeout_s: Seconds,
        allow_private: bool,
        resolver: AbstractResolver | None = None,
    ) -> None:
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._allow_private = allow_private
        self._resolver = resolver
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        resolver = self._resolver or ThreadedResolver()
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                resolver=resolver if self._allow_private else CheckedResolver(resolver),
                use_dns_cache=False,
                force_close=True,  # a kept connection would skip the check
            ),
            timeout=self._timeout,
            cookie_jar=aiohttp.DummyCookieJar(),
            # Proxies of the environment would connect to addresses that were not checked.
            trust_env=False,
        )
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._session is not None:
            await self._session.close()

    async def send(
        self, url: str, payload: bytes, headers: dict[str, str], *, now: UnixTime
    ) -> Answer:
        """
        Make one attempt; failures are answers. Redirects are not followed, and bodies not read.

        Args:
            url: URL of the receiver.
            payload: The event.
            headers: Headers with its signature.
            now: The time, for `Retry-After` with a date.
        """
        assert self._session is not None  # noqa: S101 - an entered context
        try:
            if not self._allow_private:
                self._check_literal(url)
            async with self._session.post(
                url, data=payload, headers=headers, allow_redirects=False
            ) as response:
                return _answer(response.status, response.headers.get("retry-after"), now)
        except PrivateAddressError as error:
            return Answer(outcome=str(error))
        except LOST as error:
            return Answer(outcome=f"{type(error).__name__}: {failure_reason(error)}"[:500])

    def _check_literal(self, url: str) -> None:
        """Check a URL with an address, which no resolver sees."""
        host = URL(url).host or ""  # as the client connects, which normalizes it
        try:
            ipaddress.ip_address(host.partition("%")[0])
        except ValueError:
            return
        check_address(host, host)


def _answer(status: int, retry_after: str | None, now: UnixTime) -> Answer:
    if status in SUCCESS:
        return Answer(outcome=DELIVERED, is_final=True)
    return Answer(
        outcome=f"status {status}",
        is_final=status == GONE,
        retry_after_s=_retry_after_s(retry_after, now),
    )


def _retry_after_s(text: str | None, now: UnixTime) -> Seconds | None:
    """The header `Retry-After`: seconds, or a date."""
    if text is None:
        return None
    if text.strip().isdecimal():
        return float(text)
    try:
        return max(0.0, parsedate_to_datetime(text).timestamp() - now)
    except (ValueError, OverflowError):  # the second: a year or an offset that no date has
        return None
