"""Publishes requests from the command line."""

import asyncio
import sys
from codecs import BOM_UTF8
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec

from services.planner.grouper.refusals import error_info
from shared.api.calls import call_fields
from shared.broker.protocol import Broker
from shared.broker.retry import Backoff
from shared.contracts.base import Decoder, RequestId, Seconds
from shared.contracts.errors import CapacityError, ContractError, MeshError
from shared.contracts.ingress import CallRequest, InferenceRequest
from shared.contracts.requests import (
    ErrorInfo,
    Final,
    ReplyMode,
    RequestCompleted,
    RequestFailed,
)
from shared.producer.generation import Generation
from shared.producer.producer import Producer, Request
from shared.runtime.clock import SystemClock

PATIENCE_S = 120.0
"""
Time for which a request of a file is retried while the broker or the request's queue is not ready.
"""
_BACKOFF = Backoff(max_s=5.0)
_decode: Decoder[InferenceRequest] = Decoder(InferenceRequest)
_decode_call: Decoder[CallRequest] = Decoder(CallRequest)


class _Form(msgspec.Struct, frozen=True):
    """The field that distinguishes the forms of requests."""

    endpoint: Any = None


_decode_form: Decoder[_Form] = Decoder(_Form)


def decode_request(line: bytes) -> Request:
    """
    The request in *line*, in either form.

    Raises:
        ContractError: The request is invalid.
    """
    return (_decode if _decode_form(line).endpoint is None else _decode_call)(line)


def call_request(endpoint: str, body: str, **fields: Any) -> CallRequest:
    """
    The request for an endpoint.

    Args:
        endpoint: Path of the endpoint.
        body: JSON, or `@` and the name of a file with JSON; `@-` is standard input.
        fields: Other fields of the request.

    Raises:
        ContractError: The body cannot be read, or is not a JSON object.
    """
    is_file = body.startswith("@")
    raw = _contents(Path(body[1:])) if is_file else body.encode().removeprefix(BOM_UTF8)
    call_fields(raw)
    return CallRequest(endpoint=endpoint, body=msgspec.Raw(raw), **fields)


def is_streamed(request: Request) -> bool:
    """Return whether the answer's text can be shown as it arrives."""
    if isinstance(request, InferenceRequest):
        return True
    return bool(call_fields(bytes(request.body)).get("stream") == msgspec.Raw(b"true"))


def _contents(file: Path) -> bytes:
    try:
        content = sys.stdin.buffer.read() if str(file) == "-" else file.read_bytes()
    except OSError as error:
        raise ContractError(f"cannot read {file}: {error}", param="file") from error
    return content.removeprefix(BOM_UTF8)


def read_requests(file: Path) -> list[Request]:
    """
    Requests in a JSON-lines file; `-` reads standard input.

    Raises:
        ContractError: A request is invalid; the message names the line.
    """
    requests: list[Request] = []
    for number, line in enumerate(_contents(file).splitlines(), start=1):
        if line.strip():
            try:
                requests.append(decode_request(line))
            except ContractError as error:
                raise ContractError(f"{file}, line {number}: {error}") from error
    return requests


async def submit_one(
    broker: Broker,
    request: Request,
    *,
    reply: ReplyMode,
    user_id: str | None,
    show: Callable[[str], None],
) -> Final:
    """
    Publish one request, call *show* with the text of its first answer as it arrives, and return
    the final reply.
    """
    clock = SystemClock()
    async with Producer(broker, name="cli", clock=clock, user_id=user_id) as producer:
        generation = await producer.submit(request, reply=reply)
        try:
            async for part in generation:
                if part.child == 0:
                    show(part.text)
            return await generation.final()
        except asyncio.CancelledError:
            await generation.cancel()
            raise


async def submit_all(
    broker: Broker,
    requests: Iterable[Request],
    *,
    user_id: str | None,
    concurrency: int = 64,
    patience_s: Seconds = PATIENCE_S,
) -> list[Final]:
    """
    Publish all requests, of which at most *concurrency* are unanswered; return final replies in
    order.

    A request that cannot be published within *patience_s* gets an error as its final reply; the
    other requests are not affected.
    """
    limit = asyncio.Semaphore(concurrency)

    async with Producer(
        broker, name="cli", clock=SystemClock(), user_id=user_id, give_up_after_s=patience_s
    ) as producer:

        async def one(request: Request) -> Final:
            async with limit:
                final = await _final_of(producer, request, patience_s)
            print(msgspec.json.encode(final).decode(), flush=True)  # noqa: T201 - the output
            return final

        # The task group ends before the producer closes, so that nothing is published afterwards.
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(each), name="submit a line") for each in requests]
    return [task.result() for task in tasks]


async def _final_of(producer: Producer, request: Request, patience_s: Seconds) -> Final:
    """The final reply of the mesh, or a local error for a request that could not be published."""
    request_id = RequestId(request.id or f"req-{uuid4().hex}")
    named = msgspec.structs.replace(request, id=request_id)
    try:
        generation = await _published(producer, named, patience_s)
    except MeshError as error:
        now = SystemClock().now()
        return RequestFailed(request_id=request_id, error=_error_info(error), at=now)
    return await generation.final()


async def _published(producer: Producer, request: Request, patience_s: Seconds) -> Generation:
    """
    Publish a request; retry while the global queue is full.

    While the broker is unavailable, the producer itself retries. When the producer stops retrying,
    it cancels the request's id in the mesh, so the request must not be published again.
    """
    loop = asyncio.get_running_loop()
    give_up_at = loop.time() + patience_s
    delays = _BACKOFF.delays()
    while True:
        try:
            return await producer.submit(request, reply=ReplyMode.FINAL)
        except CapacityError:
            delay_s = next(delays)
            if loop.time() + delay_s > give_up_at:
                raise
        await asyncio.sleep(delay_s)


def _error_info(error: MeshError) -> ErrorInfo:
    """Convert an error to an error reply with the codes that the gateway uses."""
    if isinstance(error, ContractError | CapacityError):
        return error_info(error)
    return ErrorInfo(
        message=f"the mesh cannot be reached: {error}",
        type="server_error",
        code="mesh_unavailable",
        status=503,
    )


def all_completed(finals: Iterable[Final]) -> bool:
    """True if every final reply contains an answer."""
    return all(isinstance(final, RequestCompleted) for final in finals)
