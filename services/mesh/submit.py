"""Publishing requests from the command line."""

import asyncio
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from shared.broker.protocol import Broker
from shared.contracts.base import Decoder
from shared.contracts.errors import ContractError
from shared.contracts.ingress import InferenceRequest
from shared.contracts.requests import Final, ReplyMode, RequestCompleted
from shared.producer.producer import Producer
from shared.runtime.clock import SystemClock

_decode: Decoder[InferenceRequest] = Decoder(InferenceRequest)


def read_requests(file: Path) -> list[InferenceRequest]:
    """
    Requests of a JSON-lines file, `-` for standard input.

    Raises:
        ContractError: Names the line.
    """
    try:
        data = sys.stdin.buffer.read() if str(file) == "-" else file.read_bytes()
    except OSError as error:
        raise ContractError(f"cannot read {file}: {error}", param="file") from error
    requests = []
    for number, line in enumerate(data.splitlines(), start=1):
        if line.strip():
            try:
                requests.append(_decode(line))
            except ContractError as error:
                raise ContractError(f"{file}, line {number}: {error}") from error
    return requests


async def submit_one(
    broker: Broker,
    request: InferenceRequest,
    *,
    reply: ReplyMode,
    user_id: str | None,
    show: Callable[[str], None],
) -> Final:
    """Publish one request, *show* its text as it comes, and give its final."""
    clock = SystemClock()
    async with Producer(broker, name="cli", clock=clock, user_id=user_id) as producer:
        generation = await producer.submit(request, reply=reply)
        try:
            async for part in generation:
                show(part.text)
            return await generation.final()
        except asyncio.CancelledError:
            await generation.cancel()
            raise


async def submit_all(
    broker: Broker,
    requests: Iterable[InferenceRequest],
    *,
    user_id: str | None,
    concurrency: int = 64,
) -> list[Final]:
    """Publish all requests, at most *concurrency* unanswered at a time; finals in order."""
    limit = asyncio.Semaphore(concurrency)

    async with Producer(broker, name="cli", clock=SystemClock(), user_id=user_id) as producer:

        async def one(request: InferenceRequest) -> Final:
            async with limit:
                generation = await producer.submit(request, reply=ReplyMode.FINAL)
                final = await generation.final()
            print(msgspec.json.encode(final).decode(), flush=True)  # noqa: T201 - the output
            return final

        return list(await asyncio.gather(*(one(request) for request in requests)))


def all_completed(finals: Iterable[Final]) -> bool:
    """Whether every final is an answer."""
    return all(isinstance(final, RequestCompleted) for final in finals)
