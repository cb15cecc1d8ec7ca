"""A mesh in this process whose real engines evict each answer once, after a seeded token."""

import hashlib
import math
import signal
from collections import defaultdict
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from random import Random
from typing import Any

from services.agent.backends.base import (
    EngineBackend,
    EngineEvent,
    EngineLost,
    EngineRequest,
    Listener,
    NewOutput,
    RunEnded,
)
from services.mesh.embedded import EmbeddedMesh
from services.mesh.processes import MeshProcess
from services.mesh.spec import MeshSpec
from shared.broker import topology
from shared.broker.connect import open_broker
from shared.broker.protocol import BindingSpec, Broker, Delivery, Settlement
from shared.contracts.base import Decoder, RequestId
from shared.contracts.control import RequestCancel
from shared.contracts.errors import NotActiveError

GATEWAY = "gateway"
_decode_cancel: Decoder[RequestCancel] = Decoder(RequestCancel)


class Evictions:
    """
    Selects the token after which each request is evicted, and follows the requests.

    Args:
        seed: Selects the tokens.
    """

    def __init__(self, seed: int) -> None:
        self.active = False
        """False: requests run undisturbed, and their lengths become known."""
        self.evicted: dict[RequestId, str] = {}
        """Request -> the engine that evicted it."""
        self.continued: set[RequestId] = set()
        """Evicted requests that another engine finished or continued."""
        self.cancelled: set[RequestId] = set()
        """Requests that their front has left, because it could not write an output."""
        self._seed = seed
        self._lengths: dict[bytes, int] = defaultdict(int)

    async def observe(self, broker: Broker) -> None:
        """Follow cancellations while *broker* is connected."""

        async def on_cancel(delivery: Delivery) -> None:
            self.cancelled.add(_decode_cancel(delivery.body).request_id)
            await delivery.settle(Settlement.ACK)

        queue = topology.private_queue("test.cancelled")
        binding = BindingSpec(
            exchange=topology.CONTROL, queue=queue.name, routing_key=topology.CONTROL_CANCEL
        )
        await broker.declare_queue(queue)
        await broker.bind(binding)
        await broker.consume(queue.name, on_cancel, prefetch=64)

    def learn(self, request: EngineRequest, length: int) -> None:
        """Take the length of an undisturbed answer."""
        self._lengths[_digest(request)] = length

    def tokens_before(self, request: EngineRequest) -> int:
        """Tokens of the first run: from one to one less than the answer has, if that is known."""
        digest = _digest(request)
        known = self._lengths.get(digest, 2)
        chance = Random(self._seed.to_bytes(8) + digest)
        return chance.randint(1, max(1, known - 1))


def _digest(request: EngineRequest) -> bytes:
    """Equal for equal requests."""
    parts = request.payload.parts if request.payload else ()
    call = (request.call.endpoint, request.call.body) if request.call else ()
    contents = repr((request.prompt, request.sampling, parts, call))
    return hashlib.sha256(contents.encode()).digest()


@dataclass(slots=True)
class _Run:
    request: EngineRequest
    last: float
    """Length after which the run is evicted; infinite: it is not."""
    length: int = 0


class EvictingEngine:
    """
    An engine that ends the first run of each request as if the request was evicted.

    The other engine continues the request: the first one refuses it.
    """

    def __init__(self, engine: EngineBackend, name: str, evictions: Evictions) -> None:
        self._engine = engine
        self._name = name
        self._evictions = evictions
        self._runs: dict[RequestId, _Run] = {}
        self._listener: Listener = lambda _events: None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def listen(self, listener: Listener) -> None:
        self._listener = listener
        self._engine.listen(self._on_events)

    def submit(self, request: EngineRequest) -> None:
        evictions = self._evictions
        origin = request.origin or request.request_id
        if evictions.evicted.get(origin) == self._name:
            raise NotActiveError("the engine that evicted this request does not continue it")
        if origin in evictions.evicted:
            evictions.continued.add(origin)
        is_first = evictions.active and origin not in evictions.evicted
        last = evictions.tokens_before(request) if is_first else math.inf
        self._runs[request.request_id] = _Run(request, last)
        self._engine.submit(request)

    def _on_events(self, events: Sequence[EngineEvent]) -> None:
        passed: list[EngineEvent] = []
        evicted: list[RequestId] = []
        for event in events:
            passed.append(event)
            if isinstance(event, EngineLost) or event.request_id not in self._runs:
                continue
            if event.request_id in evicted:
                passed.pop()  # the run has ended for the agent
                continue
            run = self._runs[event.request_id]
            if isinstance(event, NewOutput):
                run.length += len(event.output.token_ids)
                ends = event.output.is_last or event.output.finish_reason is not None
                if run.length >= run.last and not ends:
                    error = NotActiveError("evicted by the test")
                    passed.append(RunEnded(event.request_id, error))
                    evicted.append(event.request_id)
            if isinstance(event, RunEnded) or event.output.is_last:
                self._runs.pop(event.request_id)
                if not self._evictions.active:
                    self._evictions.learn(run.request, run.length)
        for request_id in evicted:
            request = self._runs.pop(request_id).request
            self._evictions.evicted[request.origin or request_id] = self._name
        self._listener(passed)
        for request_id in evicted:
            self._engine.abort(request_id)


class RabbitEmbeddedMesh(EmbeddedMesh):
    """The services as tasks of this process, over RabbitMQ, except the gateway."""

    def __init__(self, spec: MeshSpec, url: str) -> None:
        super().__init__(spec)
        self._url = url
        spec.log_dir.mkdir(parents=True, exist_ok=True)
        service, settings = spec.service_settings()[GATEWAY]
        self._gateway = MeshProcess(
            GATEWAY,
            service=service,
            settings=settings | {"amqp_url": url},
            directory=spec.log_dir,
        )

    async def start(self) -> None:
        await self._gateway.start()
        await super().start()

    async def stop_services(self, *, serving: bool) -> None:
        if serving:
            self._gateway.signal(signal.SIGTERM)
            await self._gateway.wait()
        await super().stop_services(serving=serving)

    def open_broker(self, client_name: str) -> AbstractAsyncContextManager[Broker]:
        return open_broker(self._url, client_name=client_name)

    def _start(self, name: str, service: str, values: dict[str, Any]) -> None:
        if name != GATEWAY:
            super()._start(name, service, values)
