"""What the front and the engine host say to each other over their unix socket."""

import asyncio
import struct
from collections.abc import AsyncIterator
from typing import Any, Generic, TypeVar

import msgspec

from shared.contracts.base import Seconds, TenantId, UnixTime
from shared.contracts.qos import Importance, Slo
from shared.contracts.requests import Sampling, Tokens

T = TypeVar("T")

_LENGTH = struct.Struct("<I")


class _Frame(msgspec.Struct, frozen=True, array_like=True, tag=True):
    pass


class Activate(_Frame, frozen=True, array_like=True, tag=True):
    """
    Make the model the active one: with its parked engine, with the donor's, or with a new one.

    The engines in `drop` are shut down before. With `sleep` engines sleep while they are parked.
    """

    model: str
    engine_args: dict[str, Any]
    drop: tuple[str, ...] = ()
    donor: str = ""
    sleep: bool = False


class Warm(_Frame, frozen=True, array_like=True, tag=True):
    """Make an engine for the model beside the active one, and park it."""

    model: str
    engine_args: dict[str, Any]
    sleep: bool = False


class Drop(_Frame, frozen=True, array_like=True, tag=True):
    """Shut these models' engines down."""

    models: tuple[str, ...]


class Submit(_Frame, frozen=True, array_like=True, tag=True):
    """Run a request. `sampling` counts from the first token of the answer."""

    model: str
    request_id: str
    prompt: Tokens
    progress: Tokens
    stop_token_ids: Tokens
    sampling: Sampling
    slo: Slo = Slo()
    arrived_at: UnixTime = 0.0
    importance: Importance = Importance.HIGH
    tenant: TenantId | None = None
    application: str = "*"
    priority: int = 0
    checkpointed: bool = False
    origin: str = ""


class Abort(_Frame, frozen=True, array_like=True, tag=True):
    """End a run; no `Outputs` of it with a finish reason follows if it was running."""

    request_id: str


class ClearCaches(_Frame, frozen=True, array_like=True, tag=True):
    """Forget all KV that no run owns, in every engine; `CachesCleared` follows."""


class Shutdown(_Frame, frozen=True, array_like=True, tag=True):
    """Stop everything and exit."""


HostCommand = Activate | Warm | Drop | Submit | Abort | ClearCaches | Shutdown


class HostReady(_Frame, frozen=True, array_like=True, tag=True):
    """vLLM is imported; no model is loaded."""

    version: str
    device: str
    is_cpu: bool


class Activated(_Frame, frozen=True, array_like=True, tag=True):
    """The model's engine can take requests, or, after `Warm`, is parked."""

    model: str
    host_bytes: int = 0
    """What its processes take of host memory; 0 when unknown."""


class ActivationFailed(_Frame, frozen=True, array_like=True, tag=True):
    """After `Activate` or `Warm`: the model has no engine, nor has the donor; the host lives on."""

    model: str
    message: str


class CachesCleared(_Frame, frozen=True, array_like=True, tag=True):
    """All engines have forgotten what no run owns, unless *message* says what went wrong."""

    message: str = ""


class RunOutput(msgspec.Struct, frozen=True, array_like=True):
    """New tokens of one run; `finish` is `stop`, `length` or empty."""

    request_id: str
    token_ids: Tokens
    finish: str = ""
    cached_tokens: int = 0
    prefill_s: Seconds = 0.0
    """With the first tokens; 0 when the engine did not say."""


class Outputs(_Frame, frozen=True, array_like=True, tag=True):
    """New tokens of many runs: one turn of the host's loop."""

    runs: tuple[RunOutput, ...]


class RunFailed(_Frame, frozen=True, array_like=True, tag=True):
    """The engine refused the run."""

    request_id: str
    message: str


class EngineDied(_Frame, frozen=True, array_like=True, tag=True):
    """The model's engine is gone with all its runs; the host lives on."""

    model: str
    message: str


HostEvent = (
    HostReady | Activated | ActivationFailed | CachesCleared | Outputs | RunFailed | EngineDied
)


class Connection(Generic[T]):
    """Frames of length-prefixed msgpack, sent and received in order; receives type *incoming*."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, incoming: Any
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(incoming)

    def send(self, frame: msgspec.Struct) -> None:
        """Queue *frame*; a peer that is gone is noticed by `frames`."""
        body = self._encoder.encode(frame)
        self._writer.write(_LENGTH.pack(len(body)) + body)

    async def frames(self) -> AsyncIterator[T]:
        """What the peer sends, until it closes or dies."""
        while True:
            try:
                (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
                body = await self._reader.readexactly(length)
            except (asyncio.IncompleteReadError, ConnectionError):
                return
            yield self._decoder.decode(body)

    def close(self) -> None:
        """Drop the connection; the peer's `frames` end."""
        self._writer.close()
