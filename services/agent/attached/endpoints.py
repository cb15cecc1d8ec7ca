"""The addresses of the servers behind one name, which may change at any time."""

import asyncio
import ipaddress
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol
from urllib.parse import SplitResult, urlsplit

import msgspec

from services.agent.backends.settings import RemoteSettings
from shared.contracts.errors import EngineError, SettingsError

FILE = "file:"
ROUTER = "router+"
_SCHEMES = {"http": 80, "https": 443}


class Endpoints(Protocol):
    """Source of addresses."""

    async def now(self) -> tuple[RemoteSettings, ...]:
        """
        Settings of each server that exists now, in a stable order.

        Raises:
            EngineError: The source cannot be read now.
        """
        ...

    async def close(self) -> None:
        """Release connections and files."""
        ...


def endpoints_of(settings: RemoteSettings) -> Endpoints:
    """
    The source that `engine.remote.url` names.

    Raises:
        SettingsError: The address is not a URL, or `engine.remote.host` not a host.
    """
    url = settings.url
    if settings.host is not None:
        _check_host(settings.host)
    if url.startswith(FILE):
        return EndpointFile(Path(url.removeprefix(FILE)), settings)
    if url.startswith(ROUTER):
        router = msgspec.structs.replace(
            settings, url=url.removeprefix(ROUTER), shared_address=True
        )
        split_url(router.url)
        return FixedEndpoints((router,))
    urls = url.split() or [url]
    if all(is_fixed(each) for each in urls):
        each_url = (msgspec.structs.replace(settings, url=each) for each in urls)
        return FixedEndpoints(tuple(each_url))
    return NamedEndpoints(split_url(url), settings)


def is_fixed(url: str) -> bool:
    """
    True if *url* is one server: its host is an IP address, or this machine.

    Raises:
        SettingsError: It is not the address of a server.
    """
    if url.startswith((FILE, ROUTER)):
        return False
    host = split_url(url).hostname or ""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost"
    return True


def split_url(url: str) -> SplitResult:
    """
    The parts of a server's address.

    Raises:
        SettingsError: It is not the address of a server.
    """
    try:
        parts = urlsplit(url)
        parts.port  # noqa: B018 - raises for an invalid port
    except ValueError as error:
        raise SettingsError(f"engine.remote.url {url!r}: {error}") from error
    if parts.scheme not in _SCHEMES or not parts.hostname:
        raise SettingsError(
            "engine.remote.url must be http://HOST:PORT, router+http://HOST:PORT or file:PATH, "
            f"not {url!r}"
        )
    if parts.username or parts.password:
        raise SettingsError("engine.remote.url has a user or password; set engine.remote.api_key")
    return parts


def _check_host(host: str) -> None:
    """
    Check a value of the header `Host`.

    Raises:
        SettingsError: It is not a host with or without a port.
    """
    try:
        is_host = bool(urlsplit(f"//{host}").hostname)
    except ValueError:
        is_host = False
    if not is_host:
        raise SettingsError(f"engine.remote.host must be HOST or HOST:PORT, not {host!r}")


def name_of(settings: RemoteSettings) -> str:
    """Name of a server in the names of instances, made of its address."""
    parts = split_url(settings.url)
    port = parts.port or _SCHEMES[parts.scheme]
    host = parts.hostname or ""
    return "".join(each if each.isalnum() else "-" for each in f"{host}-{port}")


@dataclass(frozen=True, slots=True)
class FixedEndpoints:
    """Servers that do not change."""

    servers: tuple[RemoteSettings, ...]

    async def now(self) -> tuple[RemoteSettings, ...]:
        return self.servers

    async def close(self) -> None:
        """Nothing is open."""


@dataclass(frozen=True, slots=True)
class NamedEndpoints:
    """Each address of a name in DNS, e.g. of a headless service."""

    parts: SplitResult
    settings: RemoteSettings

    async def now(self) -> tuple[RemoteSettings, ...]:
        host = self.parts.hostname or ""
        port = self.parts.port or _SCHEMES[self.parts.scheme]
        loop = asyncio.get_running_loop()
        try:
            found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise EngineError(f"the name {host!r} cannot be resolved: {error}") from error
        addresses = sorted({str(address[0]) for *_, address in found})
        return tuple(self._at(address, port) for address in addresses)

    async def close(self) -> None:
        """Nothing is open."""

    def _at(self, address: str, port: int) -> RemoteSettings:
        shown = f"[{address}]" if ":" in address else address
        url = self.parts._replace(netloc=f"{shown}:{port}").geturl()
        host = self.settings.host or self.parts.netloc.rpartition("@")[2]
        return msgspec.structs.replace(self.settings, url=url, host=host)


@dataclass(frozen=True, slots=True)
class EndpointFile:
    """A file with one address per line; empty lines and lines with `#` do not count."""

    path: Path
    settings: RemoteSettings

    async def now(self) -> tuple[RemoteSettings, ...]:
        try:
            text = await asyncio.to_thread(self.path.read_text, "utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise EngineError(f"cannot read the endpoints in {self.path}: {error}") from error
        lines = (line.partition("#")[0].strip() for line in text.splitlines())
        urls = dict.fromkeys(line for line in lines if line)
        for number, url in enumerate(urls, start=1):
            try:
                split_url(url)
            except SettingsError as error:
                raise EngineError(f"address {number} of {self.path}: {error}") from error
        return tuple(msgspec.structs.replace(self.settings, url=url) for url in urls)

    async def close(self) -> None:
        """Nothing is open."""
