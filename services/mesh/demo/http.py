"""The gateway as the demo sees it: its models, and streamed answers."""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import msgspec

from services.mesh.demo.classes import Asked, DemoClass, PromptForm
from shared.contracts.base import Seconds
from shared.contracts.errors import MeshError, SettingsError
from shared.runtime.http.failures import failure_reason

_OK = 200
_RETRY_S = 0.5
_KEY_REFUSED = (401, 403)
_STREAM_TIMEOUT_S = 120.0
_LIST_TIMEOUT_S = 10.0


class NotServedError(MeshError):
    """The gateway does not serve the request."""


class _Delta(msgspec.Struct, frozen=True):
    content: str | None = None


class _Choice(msgspec.Struct, frozen=True):
    """One choice of a chunk: `delta` for chats, `text` for completions."""

    delta: _Delta = _Delta()
    text: str | None = None


class _Chunk(msgspec.Struct, frozen=True):
    choices: tuple[_Choice, ...] = ()
    error: dict[str, Any] | None = None


class _Model(msgspec.Struct, frozen=True):
    id: str
    parent: str | None = None
    """The base model of an adapter."""


class _List(msgspec.Struct, frozen=True):
    data: tuple[_Model, ...]


_decode = msgspec.json.Decoder(_Chunk)
_decode_list = msgspec.json.Decoder(_List)


class Gateway:
    """
    A gateway's OpenAI API.

    Args:
        session: HTTP session whose base URL is the gateway's, with a slash at its end.
    """

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session

    async def models(self, *, within_s: Seconds) -> tuple[str, ...]:
        """
        Names of the models, once the gateway answers.

        Raises:
            SettingsError: It does not answer in time, or refuses the key, or has no model.
        """
        reason = "no answer"
        until = time.monotonic() + within_s
        while time.monotonic() < until:
            try:
                return await self._listed()
            except (aiohttp.ClientError, NotServedError, TimeoutError) as error:
                reason = failure_reason(error)
            await asyncio.sleep(_RETRY_S)
        raise SettingsError(
            f"the gateway has not answered within {within_s:g} s ({reason}); start the mesh with "
            "`docker compose up`, or name the gateway with --url"
        )

    async def _listed(self) -> tuple[str, ...]:
        """
        Names of the models.

        Raises:
            NotServedError: The gateway gives no list now.
            SettingsError: It refuses the key, or has no model.
        """
        timeout = aiohttp.ClientTimeout(total=_LIST_TIMEOUT_S)
        async with self._session.get("v1/models", timeout=timeout) as response:
            if response.status != _OK:
                reason = f"status {response.status}: {(await response.text())[:200]}"
                if response.status in _KEY_REFUSED:
                    raise SettingsError(f"HEADWAY_API_KEY is not accepted: {reason}")
                raise NotServedError(reason)
            try:
                listed = _decode_list.decode(await response.read())
            except msgspec.MsgspecError as error:
                raise NotServedError(f"the list of models cannot be read: {error}") from error
        names = tuple(each.id for each in listed.data if not each.parent)
        if not names:
            raise SettingsError("the gateway has no model")
        return names

    async def ask(self, demo_class: DemoClass, model: str, prompt: str, form: PromptForm) -> Asked:
        """
        Send one request and read its stream.

        Raises:
            NotServedError: The gateway refuses the request, or the stream ends with an error or
                cannot be read.
        """
        body = {
            **form.fields(prompt),
            "model": model,
            "max_tokens": demo_class.max_tokens,
            "stream": True,
            "slo": demo_class.slo,
        }
        began = time.monotonic()
        first_s: Seconds | None = None
        text = ""
        timeout = aiohttp.ClientTimeout(total=_STREAM_TIMEOUT_S)
        async with self._session.post(
            form.value.removeprefix("/"), json=body, timeout=timeout
        ) as response:
            async for part in _parts(response):
                if part and first_s is None:
                    first_s = time.monotonic() - began
                text += part
        return Asked(
            name=demo_class.name,
            model=model,
            prompt=prompt,
            text=text,
            first_s=first_s,
            whole_s=time.monotonic() - began,
        )


async def _parts(response: aiohttp.ClientResponse) -> AsyncIterator[str]:
    """
    The parts of the text of a streamed answer.

    Raises:
        NotServedError: The gateway refuses the request, or the stream ends with an error or cannot
            be read.
    """
    if response.status != _OK:
        raise NotServedError(f"HTTP {response.status}: {(await response.text())[:300]}")
    async for line in response.content:
        data = line.strip().removeprefix(b"data: ")
        if not data.startswith(b"{"):
            continue
        try:
            chunk = _decode.decode(data)
        except msgspec.MsgspecError as error:
            raise NotServedError(f"the stream cannot be read: {error}") from error
        if chunk.error is not None:
            raise NotServedError(str(chunk.error.get("message", chunk.error)))
        yield "".join(each.delta.content or each.text or "" for each in chunk.choices)
