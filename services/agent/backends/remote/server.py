"""One server: its address, and what it says about itself."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgspec

from services.agent.backends.settings import RemoteSettings
from shared.contracts.base import Seconds
from shared.contracts.errors import EngineError, SettingsError
from shared.runtime.http.failures import failure_reason

OK = 200
COMPLETIONS = "/v1/completions"
GENERATE = "/inference/v1/generate"
"""Path of vLLM's API for tokens, which needs `vllm serve --enable-scale-out`."""
PROBE_TIMEOUT_S = 2.0
"""Time limit of a question about the server's state."""
LOST = (aiohttp.ClientError, TimeoutError, OSError)
"""Errors of a connection to a server."""
_SILENT_LOOKS = 4
"""Number of looks without a new byte after which a server is silent."""
_KEEP_ALIVE_S = 2.0
"""
Time after which an idle connection is closed: earlier than servers close it (uvicorn after 5 s), so
that no request is sent on a connection that its server is closing.
"""


class ServedModel(msgspec.Struct, frozen=True):
    """One model in a server's list."""

    id: str
    max_model_len: int | None = None
    root: str | None = None
    """Directory or name from which the server has loaded the model."""
    parent: str | None = None
    """Base model of an adapter."""


class _ModelList(msgspec.Struct, frozen=True):
    data: tuple[ServedModel, ...] = ()


class _Version(msgspec.Struct, frozen=True):
    version: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """What a server says about itself."""

    version: str | None
    """Version of vLLM; None for servers of other makes."""
    models: tuple[ServedModel, ...]
    """Models that the server lists; some servers list none."""

    @property
    def is_vllm(self) -> bool:
        return self.version is not None

    @property
    def engine(self) -> str:
        """Name and version of the engine, as in profiles."""
        version = (self.version or "").partition("+")[0]  # without the build suffix
        return f"vllm-{version}" if self.is_vllm else "openai-server"

    @property
    def bases(self) -> tuple[ServedModel, ...]:
        """Models of the list that are no adapters."""
        return tuple(each for each in self.models if each.parent is None)


class Server:
    """
    HTTP client of one server.

    Args:
        settings: Address, key and certificates.
    """

    def __init__(self, settings: RemoteSettings) -> None:
        self._settings = settings
        self._session: aiohttp.ClientSession | None = None

    @property
    def url(self) -> str:
        """Address of the server, without a path."""
        return self._settings.url.rstrip("/").removesuffix("/v1")

    @property
    def _hostname(self) -> str | None:
        """Name in the certificate of a server whose address was looked up."""
        is_tls, host = self.url.startswith("https:"), self._settings.host
        return urlsplit(f"//{host}").hostname if is_tls and host else None

    async def describe(self) -> Description:
        """
        Ask the server for its version and its models.

        Raises:
            EngineError: The server does not answer, or refuses the key.
        """
        await self.healthy()
        version = await self._answer("/version", _Version)
        models = await self._answer("/v1/models", _ModelList)
        listed: tuple[ServedModel, ...] = models.data if models else ()
        return Description(version=version.version if version else None, models=listed)

    async def alive(self) -> bool:
        """Return whether the server answers."""
        try:
            await self.healthy()
        except EngineError:
            return False
        return True

    async def text(self, path: str) -> str:
        """
        Text of one of the server's pages; empty if there is none.

        Raises:
            EngineError: The server does not answer.
        """
        status, body = await self._ask("GET", path)
        return body.decode(errors="replace") if status == OK else ""

    @asynccontextmanager
    async def posted(self, path: str, body: bytes) -> AsyncIterator[aiohttp.ClientResponse]:
        """
        Context with the response to a body; its end closes the connection of a stream.

        Raises:
            Exception: One of `LOST`: the connection broke.
        """
        # No limit of the whole time: answers may take hours.
        limit = aiohttp.ClientTimeout(
            total=None,
            sock_connect=self._settings.connect_timeout_s,
            sock_read=self._settings.silence_timeout_s,
        )
        headers = {"content-type": "application/json"}
        async with self._open().post(
            self.url + path,
            data=body,
            headers=headers,
            timeout=limit,
            server_hostname=self._hostname,
        ) as response:
            with _silence_limited(response, self._settings.silence_timeout_s):
                yield response

    async def close(self) -> None:
        """Close all connections."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def healthy(self) -> None:
        """
        Check that the server answers.

        Raises:
            EngineError: It does not.
        """
        status, _ = await self._ask("GET", "/health")
        if status == OK:
            return
        status, body = await self._ask("GET", "/v1/models")  # not every server has /health
        if status != OK:
            text = body[:200].decode(errors="replace")
            raise EngineError(f"{self.url} answers with status {status}: {text}", engine_dead=True)

    async def _answer(self, path: str, kind: type[Any]) -> Any:
        """A page of the server; None if the server has no such page."""
        status, body = await self._ask("GET", path)
        try:
            return msgspec.json.decode(body, type=kind) if status == OK else None
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None

    async def orders(self, model: str) -> bool:
        """
        Return whether vLLM's server accepts a priority, which needs a setting of the server.

        Raises:
            EngineError: The server does not answer.
        """
        body = {"model": model, "prompt": "a", "max_tokens": 1, "priority": 1}
        status, _ = await self._ask("POST", COMPLETIONS, msgspec.json.encode(body))
        return status == OK

    async def generates(self, model: str) -> bool:
        """
        Return whether vLLM's server takes whole requests in tokens, which needs a setting of the
        server.

        Raises:
            EngineError: The server does not answer.
        """
        body = {"model": model, "token_ids": [0], "sampling_params": {"max_tokens": 1}}
        status, _ = await self._ask("POST", GENERATE, msgspec.json.encode(body))
        return status == OK

    async def _ask(self, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
        limit = aiohttp.ClientTimeout(total=PROBE_TIMEOUT_S if body is None else None)
        headers = {"content-type": "application/json"} if body else {}
        try:
            async with self._open().request(
                method,
                self.url + path,
                data=body,
                headers=headers,
                timeout=limit,
                server_hostname=self._hostname,
            ) as response:
                return response.status, await response.read()
        except LOST as error:
            raise EngineError(
                f"{self.url} does not answer: {failure_reason(error)}", engine_dead=True
            ) from error

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            settings = self._settings
            headers = {"host": settings.host} if settings.host else {}
            if settings.api_key:
                headers["authorization"] = f"Bearer {settings.api_key}"
            self._session = aiohttp.ClientSession(
                headers=headers,
                connector=aiohttp.TCPConnector(
                    limit=0, ssl=_ssl(settings), keepalive_timeout=_KEEP_ALIVE_S
                ),
                auto_decompress=True,
            )
        return self._session


@contextmanager
def _silence_limited(response: aiohttp.ClientResponse, limit_s: Seconds) -> Iterator[None]:
    """
    Context in which reading a response fails once its server has sent nothing for *limit_s*, at
    most a quarter later.

    aiohttp's own limit makes a timer for each packet, which costs more than reading the packet.
    """
    connection, content = response.connection, response.content
    if connection is None or connection.protocol is None:  # the response is here as a whole
        yield
        return
    connection.protocol.read_timeout = None
    loop = asyncio.get_running_loop()
    seen, num_quiet = content.total_bytes, 0
    timer: asyncio.TimerHandle

    def look() -> None:
        nonlocal seen, num_quiet, timer
        num_quiet = num_quiet + 1 if content.total_bytes == seen else 0
        seen = content.total_bytes
        if num_quiet >= _SILENT_LOOKS:
            content.set_exception(aiohttp.SocketTimeoutError(f"silent for {limit_s:g} s"))
        else:
            timer = loop.call_later(limit_s / _SILENT_LOOKS, look)

    timer = loop.call_later(limit_s / _SILENT_LOOKS, look)
    try:
        yield
    finally:
        timer.cancel()


def _ssl(settings: RemoteSettings) -> ssl.SSLContext | bool:
    """TLS of the connection; True: with the system's certificates."""
    if settings.ca_file is None:
        return True
    try:
        return ssl.create_default_context(cafile=settings.ca_file)
    except (OSError, ssl.SSLError) as error:
        raise SettingsError(f"engine.remote.ca_file {settings.ca_file}: {error}") from error
