"""A client of a gateway's files and batches."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from http import HTTPStatus
from pathlib import Path
from typing import IO, Any

import aiohttp
import msgspec

from services.mesh.verbs.options import gateway_address
from shared.contracts.errors import ContractError, MeshError
from shared.runtime.http.failures import failure_reason

BLOCK_BYTES = 2**18
TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=10.0, sock_read=120.0)


class GatewayError(MeshError):
    """
    The gateway refused a request or cannot be reached.

    Args:
        message: The reason.
        status: HTTP status; 0 without an answer.
    """

    def __init__(self, message: str, *, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class BatchClient:
    """
    Files and batches of one tenant.

    Args:
        session: HTTP connections.
        url: Address of the gateway.
    """

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self._url = url.rstrip("/").removesuffix("/v1")

    async def upload(self, file: Path) -> str:
        """
        Upload a file of requests; return its id.

        Raises:
            ContractError: The file cannot be read.
            GatewayError: The gateway refuses it.
        """
        try:
            with file.open("rb") as content:
                form = aiohttp.FormData()
                form.add_field("purpose", "batch")
                form.add_field("file", content, filename=file.name)
                made = await self._json("POST", "/v1/files", data=form)
        except OSError as error:
            raise ContractError(f"cannot read {file}: {error}", param="FILE") from error
        return str(made["id"])

    async def create(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """
        Create a batch.

        Raises:
            GatewayError: The gateway refuses it.
        """
        return await self._json("POST", "/v1/batches", json=dict(body))

    async def get(self, batch_id: str) -> dict[str, Any]:
        """
        The object of a batch.

        Raises:
            GatewayError: There is no such batch.
        """
        return await self._json("GET", f"/v1/batches/{batch_id}")

    async def cancel(self, batch_id: str) -> dict[str, Any]:
        """
        Cancel a batch.

        Raises:
            GatewayError: It cannot be cancelled.
        """
        return await self._json("POST", f"/v1/batches/{batch_id}/cancel")

    async def list(self, limit: int) -> list[dict[str, Any]]:
        """
        The newest batches.

        Raises:
            GatewayError: The gateway refuses the request.
        """
        page = await self._json("GET", f"/v1/batches?limit={limit}")
        return list(page["data"])

    async def download(self, file_id: str, out: IO[bytes]) -> None:
        """
        Append the content of a file to *out*.

        Raises:
            GatewayError: There is no such file.
        """
        async with self._answer("GET", f"/v1/files/{file_id}/content") as answer:
            async for block in answer.content.iter_chunked(BLOCK_BYTES):
                out.write(block)

    async def _json(self, method: str, path: str, **options: Any) -> dict[str, Any]:
        async with self._answer(method, path, **options) as answer:
            found: dict[str, Any] = msgspec.json.decode(await answer.read())
            return found

    @asynccontextmanager
    async def _answer(
        self, method: str, path: str, **options: Any
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        try:
            async with self._session.request(method, self._url + path, **options) as answer:
                if answer.status >= HTTPStatus.BAD_REQUEST:
                    raise _refusal(answer.status, await answer.read())
                yield answer
        except (aiohttp.ClientError, TimeoutError) as error:
            raise GatewayError(f"no answer from {self._url}: {failure_reason(error)}") from error


@asynccontextmanager
async def batch_client(url: str, key: str | None) -> AsyncIterator[BatchClient]:
    """
    Context with a client of the gateway at *url*, with the API key *key*.

    Raises:
        SettingsError: The URL is not an HTTP address.
    """
    address = gateway_address(url)
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    async with aiohttp.ClientSession(headers=headers, timeout=TIMEOUT) as session:
        yield BatchClient(session, address)


class _ErrorBody(msgspec.Struct):
    message: str
    code: str | None = None


class _Refused(msgspec.Struct):
    error: _ErrorBody


def _refusal(status: int, body: bytes) -> GatewayError:
    try:
        error = msgspec.json.decode(body, type=_Refused).error
    except msgspec.DecodeError:
        return GatewayError(
            f"status {status}: {body[:200].decode(errors='replace')}", status=status
        )
    return GatewayError(f"{error.code or status}: {error.message}", status=status)
