"""The front without vLLM: text of the mesh's own engines, and bodies for servers of others."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

import msgspec

from services.gateway.door import ROUTES, Door, tenant_of
from services.gateway.pass_through import PassThrough
from services.gateway.routes import TEXT_ENDPOINTS, build_app
from services.gateway.settings import Settings
from services.gateway.state import Gateway
from shared.contracts.base import ModelName
from shared.contracts.errors import ContractError, MeshError
from shared.contracts.models import ModelEntry
from shared.models.registry import ModelRegistry
from shared.runtime.health import Health


def light_front(gateway: Gateway, health: Health) -> "LightFront":
    """The ASGI application of a gateway without vLLM."""
    passing = PassThrough(gateway.producer)
    door = Door(gateway, _Servers(gateway.registry, passing))
    return LightFront(gateway, build_app(gateway, health), door)


class _Servers(Mapping[ModelName, PassThrough]):
    """Base model that takes bodies -> its application; follows the registry."""

    def __init__(self, registry: ModelRegistry, application: PassThrough) -> None:
        self._registry = registry
        self._application = application

    def __getitem__(self, model: ModelName) -> PassThrough:
        if self._registry.entry(model).takes_bodies:
            return self._application
        raise KeyError(model)

    def __iter__(self) -> Iterator[ModelName]:
        return (base for base in self._registry.bases if self._registry.entry(base).takes_bodies)

    def __len__(self) -> int:
        return sum(1 for _ in self)


class _Named(msgspec.Struct, frozen=True):
    model: Any = None


class LightFront:
    """
    ASGI application that selects the application of a request by its model.

    Args:
        gateway: Components that all requests share.
        text: Application of models that take tokens.
        door: Application of models that take bodies.
    """

    def __init__(self, gateway: Gateway, text: Any, door: Door) -> None:
        self._gateway = gateway
        self._text = text
        self._door = door

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """Answer one request; its body is read here only if a model takes bodies."""
        if not self._may_take_body(scope):
            await self._text(scope, receive, send)
            return
        replay = Replay(receive)
        model = self._model_in(await replay.body(self._gateway.settings))
        # The text application has few endpoints; the door names an unknown model for all of them.
        is_text = scope["path"] in TEXT_ENDPOINTS if model is None else not model.takes_bodies
        application = self._text if is_text else self._door
        await application(scope, replay.receive, send)

    def _may_take_body(self, scope: dict[str, Any]) -> bool:
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] not in ROUTES:
            return False
        registry = self._gateway.registry
        if not any(registry.entry(base).takes_bodies for base in registry.bases):
            return False
        headers = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]
        }
        try:
            tenant_of(self._gateway.tenants, scope, headers)
        except MeshError:
            return False  # refused before its body is read
        return True

    def _model_in(self, body: bytes) -> ModelEntry | None:
        """The model that a body names; None without a known model."""
        registry = self._gateway.registry
        try:
            name = msgspec.json.decode(body, type=_Named).model
            ref = registry.resolve(name if isinstance(name, str) else "")
        except (ContractError, msgspec.DecodeError, UnicodeDecodeError):
            return None
        return registry.entry(ref.base)


class Replay:
    """
    Events of a client that are read before an application reads them.

    Args:
        receive: The `receive` of ASGI.
    """

    def __init__(self, receive: Any) -> None:
        self._receive = receive
        self._events: deque[dict[str, Any]] = deque()

    async def read(self) -> AsyncIterator[bytes]:
        """Read the parts of the body, which `receive` then returns again."""
        more = True
        while more:
            event = await self._receive()
            self._events.append(event)
            more = event.get("more_body", False)
            yield event.get("body", b"")

    async def body(self, settings: Settings) -> bytes:
        """The body up to the limits of size and time, beyond which the application refuses it."""
        body = b""
        try:
            async with asyncio.timeout(settings.body_timeout_s):
                async for part in self.read():
                    body += part
                    if len(body) > settings.limits.max_body_bytes:
                        break
        except TimeoutError:
            return b""
        return body

    async def receive(self) -> dict[str, Any]:
        """The next event, for the application."""
        if self._events:
            return self._events.popleft()
        event: dict[str, Any] = await self._receive()
        return event
