"""Messages between the front and the engine host on their unix socket."""

import asyncio
import struct
from collections.abc import AsyncIterator
from typing import Any, Generic, TypeVar

import msgspec

from services.agent.backends.base import EngineRequest
from services.agent.backends.settings import RemoteSettings
from shared.contracts.base import Seconds
from shared.contracts.models import ModelEntry
from shared.contracts.requests import StepDetails, Tokens

T = TypeVar("T")

_LENGTH = struct.Struct("<I")


class _Frame(msgspec.Struct, frozen=True, array_like=True, tag=True):
    pass


class Activate(_Frame, frozen=True, array_like=True, tag=True):
    """
    Activate the model in its own parked engine, in the donor's engine, or in a new engine.

    The engines in `drop` are shut down first. With `sleep`, parked engines sleep.
    """

    model: str
    engine_args: dict[str, Any]
    drop: tuple[str, ...] = ()
    donor: str = ""
    sleep: bool = False


class Warm(_Frame, frozen=True, array_like=True, tag=True):
    """Create an engine for the model and park it, while the active engine serves."""

    model: str
    engine_args: dict[str, Any]
    sleep: bool = False


class Drop(_Frame, frozen=True, array_like=True, tag=True):
    """Shut down the engines of these models."""

    models: tuple[str, ...]


class Models(_Frame, frozen=True, array_like=True, tag=True):
    """Registry entries of the models whose calls the host answers; sent before all calls."""

    entries: tuple[ModelEntry, ...]


class Attach(_Frame, frozen=True, array_like=True, tag=True):
    """
    Use a server of others that serves a model of `Models`; `Reply` names its address, as `Submit`
    does.
    """

    model: str
    engine_args: dict[str, Any]
    """Arguments of an engine of the model, whose configuration checks the requests."""
    remote: RemoteSettings
    served: str
    """Name of the model at the server."""
    generates: bool = False
    """True if the server takes whole requests in tokens (`/inference/v1/generate`)."""
    orders: bool = False
    """True if the server orders requests by priority."""


class Detach(_Frame, frozen=True, array_like=True, tag=True):
    """End all requests at a server of others, and forget the server."""

    url: str


class Submit(_Frame, frozen=True, array_like=True, tag=True):
    """Run a request. Limits count all tokens of the answer, not of the run."""

    request: EngineRequest
    stop_token_ids: Tokens
    """
    All tokens that end the answer; ignored if the request has a payload, which has its own stop
    tokens.
    """
    adapter_path: str = ""
    """Directory of the request's adapter; empty without an adapter."""
    server: str = ""
    """Address of the server of others that runs the request; empty: an engine of the host."""


class Abort(_Frame, frozen=True, array_like=True, tag=True):
    """End a run; a run that is ended this way gets no `Outputs` with a finish reason."""

    request_id: str


class ClearCaches(_Frame, frozen=True, array_like=True, tag=True):
    """Drop all KV that no run owns, in every engine; `Reply` follows."""


class Shutdown(_Frame, frozen=True, array_like=True, tag=True):
    """Shut down all engines and exit."""


HostCommand = (
    Activate | Warm | Drop | Models | Attach | Detach | Submit | Abort | ClearCaches | Shutdown
)


class HostReady(_Frame, frozen=True, array_like=True, tag=True):
    """The host has imported vLLM; no model is loaded."""

    version: str
    device: str
    is_cpu: bool


class EngineChoices(msgspec.Struct, frozen=True):
    """Configuration of one engine: settings, the model's `engine_args`, and vLLM's own choices."""

    eager: bool
    """False: the model is compiled, on a GPU with CUDA graphs."""
    graphs: str
    """vLLM's `cudagraph_mode`; `NONE` without CUDA graphs."""
    async_scheduling: bool
    model_runner: str
    """`V1` or `V2`."""
    scheduler: str
    """Name of the scheduler class."""
    safepoint_layers: int
    """Layers between safepoints; 0 without safepoints."""
    max_running: int
    token_budget: int
    block_tokens: int
    kv_cache_bytes: int | None
    """KV memory; None: vLLM takes the share `gpu_memory_utilization` of the device."""
    gpu_memory_utilization: float
    dtype: str
    num_devices: int
    """Number of devices, or of workers on a CPU, over which the engine is spread."""


class Reply(_Frame, frozen=True, array_like=True, tag=True):
    """
    `Activate`, `Warm` or `ClearCaches` was executed or failed.

    After a failed `Activate` or `Warm`, neither the model nor the donor has an engine; the host
    continues to run.
    """

    model: str = ""
    """Model of the command; empty for `ClearCaches`."""
    error: str = ""
    """Why the command failed; empty if it succeeded."""
    host_bytes: int = 0
    """Host memory of the engine's processes; 0 when unknown."""
    choices: EngineChoices | None = None
    """Configuration of the engine that `Activate` or `Warm` created or used."""


class RunOutput(msgspec.Struct, frozen=True, array_like=True):
    """New tokens of one run; `finish` is a `FinishReason` or empty."""

    request_id: str
    token_ids: Tokens
    finish: str = ""
    cached_tokens: int = 0
    prefill_s: Seconds = 0.0
    """Prefill time, sent with the first tokens; 0 if the engine did not report it."""
    details: tuple[StepDetails, ...] = ()
    """vLLM's encoded outputs, if they have more than token ids."""
    child: int | None = None
    """Index of the answer of a call."""
    prompt_tokens: int = 0
    """Length of the answer's prompt in tokens; sent with the first answer to each prompt."""


class Outputs(_Frame, frozen=True, array_like=True, tag=True):
    """New tokens of several runs, collected in one turn of the host's event loop."""

    runs: tuple[RunOutput, ...]


class RunFailed(_Frame, frozen=True, array_like=True, tag=True):
    """The engine refused the run."""

    request_id: str
    message: str


class RunRefused(_Frame, frozen=True, array_like=True, tag=True):
    """A server of others refused the run, with its status, code and field."""

    request_id: str
    message: str
    status: int
    code: str
    param: str | None = None


class RunDisplaced(_Frame, frozen=True, array_like=True, tag=True):
    """The run ended by no fault of its request, which another instance may serve."""

    request_id: str
    message: str


class CallAnswered(_Frame, frozen=True, array_like=True, tag=True):
    """The end of a run of a call: vLLM's response, or its error with a status from 400 on."""

    request_id: str
    status: int
    body: bytes
    events: tuple[StepDetails, ...] = ()
    """Events of all steps, and those that follow them, if the application has streamed them."""


class EngineDied(_Frame, frozen=True, array_like=True, tag=True):
    """The model's engine has died with all its runs; the host continues to run."""

    model: str
    message: str


HostEvent = (
    HostReady | Reply | Outputs | CallAnswered | RunFailed | RunRefused | RunDisplaced | EngineDied
)


class Connection(Generic[T]):
    """Connection for length-prefixed msgpack frames; received frames have type *incoming*."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, incoming: Any
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(incoming)

    def send(self, frame: msgspec.Struct) -> None:
        """Queue *frame* for sending; if the peer has ended, `frames` detects it."""
        body = self._encoder.encode(frame)
        self._writer.write(_LENGTH.pack(len(body)) + body)

    async def frames(self) -> AsyncIterator[T]:
        """Frames from the peer, until it closes the connection or dies."""
        while True:
            try:
                (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
                body = await self._reader.readexactly(length)
            except (asyncio.IncompleteReadError, ConnectionError):
                return
            yield self._decoder.decode(body)

    def close(self) -> None:
        """Close the connection; the peer's `frames` then ends."""
        self._writer.close()
