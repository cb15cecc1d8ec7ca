"""A mesh in this process whose real engines evict each answer once, after a seeded token."""

import hashlib
import signal
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from random import Random
from typing import Any

from services.agent.backends.base import EngineBackend, EngineOutput, EngineRequest
from services.mesh.embedded import EmbeddedMesh
from services.mesh.processes import MeshProcess
from services.mesh.spec import MeshSpec
from shared.broker.connect import open_broker
from shared.broker.protocol import Broker
from shared.contracts.base import RequestId
from shared.contracts.errors import NotActiveError

GATEWAY = "gateway"


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
        self._seed = seed
        self._lengths: dict[bytes, int] = defaultdict(int)

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
    contents = repr((request.prompt, request.sampling, parts))
    return hashlib.sha256(contents.encode()).digest()


class EvictingEngine:
    """
    An engine that ends the first run of each request as if the request was evicted.

    The other engine continues the request: the first one refuses it.
    """

    def __init__(self, engine: EngineBackend, name: str, evictions: Evictions) -> None:
        self._engine = engine
        self._name = name
        self._evictions = evictions

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate(self, request: EngineRequest) -> AsyncIterator[EngineOutput]:
        """Outputs of the engine, up to the eviction."""
        evictions = self._evictions
        origin = request.origin or request.request_id
        if evictions.evicted.get(origin) == self._name:
            raise NotActiveError("the engine that evicted this request does not continue it")
        if origin in evictions.evicted:
            evictions.continued.add(origin)
        is_first = evictions.active and origin not in evictions.evicted
        last, length = evictions.tokens_before(request), 0
        async for output in self._engine.generate(request):
            length += len(output.token_ids)
            yield output
            if is_first and length >= last and output.finish_reason is None:
                evictions.evicted[origin] = self._name
                await self._engine.abort(request.request_id)
                raise NotActiveError("evicted by the test")
        if not evictions.active:
            evictions.learn(request, length)


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

    async def stop_services(self, *, agents: bool) -> None:
        if not agents:
            self._gateway.signal(signal.SIGTERM)
            await self._gateway.wait()
        await super().stop_services(agents=agents)

    def open_broker(self, client_name: str) -> AbstractAsyncContextManager[Broker]:
        return open_broker(self._url, client_name=client_name)

    def _start(self, name: str, service: str, values: dict[str, Any]) -> None:
        if name != GATEWAY:
            super()._start(name, service, values)
