"""The servers of a service of Kubernetes, from its EndpointSlices."""

import asyncio
import contextlib
import os
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import aiohttp
import msgspec
import structlog

from services.agent.backends.settings import RemoteSettings
from shared.contracts.base import Seconds
from shared.contracts.errors import EngineError, SettingsError
from shared.runtime.http.failures import failure_reason

log = structlog.get_logger()
SCHEME = "kubernetes"
SERVICE_LABEL = "kubernetes.io/service-name"
CREDENTIALS = Path("/var/run/secrets/kubernetes.io/serviceaccount")
LIST_TIMEOUT_S = 10.0
WATCH_S = 300
"""Duration of one watch, after which the next one begins."""
RETRY_S: Seconds = 1.0
"""Pause before each watch but the first."""
MOST_SLICE_BYTES = 2 * 2**20
"""More than etcd stores in one object; an event of a watch is one line."""
OK, GONE = 200, 410


class _Conditions(msgspec.Struct, frozen=True):
    ready: bool | None = None
    """None counts as ready, as the API says."""


class _Endpoint(msgspec.Struct, frozen=True):
    addresses: tuple[str, ...] = ()
    conditions: _Conditions = _Conditions()


class _Port(msgspec.Struct, frozen=True):
    port: int | None = None
    name: str | None = None


class _Metadata(msgspec.Struct, frozen=True):
    name: str = ""
    resource_version: str = msgspec.field(default="", name="resourceVersion")


class _Slice(msgspec.Struct, frozen=True):
    metadata: _Metadata = _Metadata()
    endpoints: tuple[_Endpoint, ...] | None = None
    ports: tuple[_Port, ...] | None = None


class _SliceList(msgspec.Struct, frozen=True):
    metadata: _Metadata = _Metadata()
    items: tuple[_Slice, ...] = ()


class _Event(msgspec.Struct, frozen=True):
    type: str
    object: msgspec.Raw


class _Status(msgspec.Struct, frozen=True):
    code: int = 0
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """The EndpointSlices that are watched."""

    namespace: str
    selector: str
    port: str | None
    """Name or number of the port; None: the only port."""


def service_of(url: str) -> Service:
    """
    The service in `kubernetes://NAMESPACE/SERVICE?port=PORT`, or in
    `kubernetes://NAMESPACE/?selector=LABELS&port=PORT`.

    Raises:
        SettingsError: It is not a URL; the namespace, or both service and selector are missing.
    """
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise SettingsError(f"engine.remote.url {url!r}: {error}") from error
    query = {name: values[0] for name, values in parse_qs(parts.query).items()}
    name = parts.path.strip("/")
    selector = query.get("selector") or (f"{SERVICE_LABEL}={name}" if name else "")
    if not parts.hostname or not selector:
        raise SettingsError(
            f"engine.remote.url must be kubernetes://NAMESPACE/SERVICE?port=PORT, not {url!r}"
        )
    return Service(namespace=parts.hostname, selector=selector, port=query.get("port"))


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterApi:
    """Address and credentials of the cluster's API."""

    url: str
    token_file: Path | None = None
    """Read for each request, since Kubernetes renews the token."""
    ca_file: Path | None = None

    @classmethod
    def of_pod(cls) -> "ClusterApi":
        """
        The API as a pod of the cluster sees it.

        Raises:
            SettingsError: This process is not in a pod.
        """
        host = os.environ.get("KUBERNETES_SERVICE_HOST")
        if not host:
            raise SettingsError(
                "engine.remote.url names a service of Kubernetes, but KUBERNETES_SERVICE_HOST is "
                "not set: run the agent in a pod whose service account may list and watch "
                "endpointslices"
            )
        shown = f"[{host}]" if ":" in host else host
        port = os.environ.get("KUBERNETES_SERVICE_PORT", "443")
        return cls(
            url=f"https://{shown}:{port}",
            token_file=CREDENTIALS / "token",
            ca_file=CREDENTIALS / "ca.crt",
        )

    @property
    def headers(self) -> dict[str, str]:
        if self.token_file is None:
            return {}
        return {"authorization": f"Bearer {self.token_file.read_text().strip()}"}


class EndpointSlices:
    """
    The ready endpoints of a service; lists them once, then watches their changes.

    A watch that ends begins again at its last version; if the API has forgotten this version, the
    endpoints are listed again. While the API does not answer, the last endpoints count.

    Args:
        service: The EndpointSlices.
        api: The cluster's API.
        settings: Settings of each server; their `url` is replaced.
    """

    def __init__(self, service: Service, api: ClusterApi, settings: RemoteSettings) -> None:
        self._service = service
        self._api = api
        self._settings = settings
        self._slices: dict[str, _Slice] = {}
        self._version = ""
        self._session: aiohttp.ClientSession | None = None
        self._watching: asyncio.Task[None] | None = None

    async def now(self) -> tuple[RemoteSettings, ...]:
        """
        Settings of each ready server.

        Raises:
            EngineError: The endpoints could not be listed yet.
        """
        if self._watching is None:
            await self._list()
            self._watching = asyncio.create_task(self._watch(), name="watch endpoint slices")
        elif self._watching.done():
            self._watching.result()  # raises the bug that ended the watch
        urls = {url for each in self._slices.values() for url in self._urls(each)}
        return tuple(msgspec.structs.replace(self._settings, url=url) for url in sorted(urls))

    async def close(self) -> None:
        """Stop watching."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait({self._watching})
        if self._session is not None:
            await self._session.close()

    def _urls(self, each: _Slice) -> list[str]:
        ports = [
            port.port
            for port in each.ports or ()
            if self._service.port in (None, port.name, str(port.port))
        ]
        if len(ports) != 1 or ports[0] is None:
            return []
        addresses = (
            address
            for endpoint in each.endpoints or ()
            if endpoint.conditions.ready is not False
            for address in endpoint.addresses
        )
        return [
            f"http://{f'[{address}]' if ':' in address else address}:{ports[0]}"
            for address in addresses
        ]

    async def _list(self) -> None:
        """
        List all slices.

        Raises:
            EngineError: The API refuses or does not answer.
        """
        limit = aiohttp.ClientTimeout(total=LIST_TIMEOUT_S)
        try:
            async with self._get({}, limit) as response:
                body = await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise EngineError(
                f"the API of Kubernetes does not answer: {failure_reason(error)}"
            ) from error
        if response.status != OK:
            text = body[:300].decode(errors="replace")
            raise EngineError(f"the API of Kubernetes answers {response.status}: {text}")
        try:
            found = msgspec.json.decode(body, type=_SliceList)
        except msgspec.DecodeError as error:
            raise EngineError(f"the list of EndpointSlices cannot be read: {error}") from error
        self._slices = {each.metadata.name: each for each in found.items}
        self._version = found.metadata.resource_version

    async def _watch(self) -> None:
        while True:
            try:
                if not self._version:
                    await self._list()
                await self._changes()
            except (EngineError, aiohttp.ClientError, TimeoutError, OSError) as error:
                log.warning("endpoints.unknown", error=failure_reason(error))
            except msgspec.DecodeError as error:
                log.warning("endpoints.unreadable", error=str(error))
                self._version = ""
            await asyncio.sleep(RETRY_S)

    async def _changes(self) -> None:
        """Follow the changes until the API ends the watch."""
        query: dict[str, str] = {
            "watch": "1",
            "resourceVersion": self._version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(WATCH_S),
        }
        limit = aiohttp.ClientTimeout(total=None, sock_read=WATCH_S + LIST_TIMEOUT_S)
        async with self._get(query, limit) as response:
            if response.status != OK:
                if response.status == GONE:
                    self._version = ""
                    return
                raise EngineError(f"the API of Kubernetes answers {response.status}")
            async for line in response.content:
                if line.strip() and not self._apply(msgspec.json.decode(line, type=_Event)):
                    return

    def _apply(self, event: _Event) -> bool:
        """Apply one change; return False if the watch must begin again."""
        if event.type == "ERROR":
            status = msgspec.json.decode(event.object, type=_Status)
            log.info("endpoints.listed_again", code=status.code, reason=status.message)
            self._version = ""
            return False
        changed = msgspec.json.decode(event.object, type=_Slice)
        if event.type == "DELETED":
            self._slices.pop(changed.metadata.name, None)
        elif event.type != "BOOKMARK":
            self._slices[changed.metadata.name] = changed
        self._version = changed.metadata.resource_version or self._version
        return True

    @contextlib.asynccontextmanager
    async def _get(
        self, query: dict[str, str], limit: aiohttp.ClientTimeout
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        if self._session is None:
            tls: Any = True
            if self._api.ca_file is not None:
                tls = ssl.create_default_context(cafile=str(self._api.ca_file))
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(ssl=tls), read_bufsize=MOST_SLICE_BYTES
            )
        path = f"/apis/discovery.k8s.io/v1/namespaces/{self._service.namespace}/endpointslices"
        async with self._session.get(
            self._api.url + path,
            params={"labelSelector": self._service.selector, **query},
            headers=self._api.headers,
            timeout=limit,
        ) as response:
            yield response
