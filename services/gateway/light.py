"""
The front without vLLM: text of the mesh's own engines, and bodies for simulated engines and servers
of others.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from services.gateway.admission import read_ahead
from services.gateway.door import ROUTES, Door
from services.gateway.instances import Instances
from services.gateway.pass_through import PassThrough
from services.gateway.replies import SIMULATED_ENGINE
from services.gateway.routes import TEXT_ENDPOINTS, build_app
from services.gateway.state import Gateway
from shared.contracts.base import ModelName
from shared.contracts.errors import MeshError
from shared.contracts.models import ModelEntry
from shared.models.registry import ModelRegistry
from shared.runtime.health import Health

BODY_ENDPOINTS = ("/v1/responses", "/v1/messages")
"""Endpoints of which simulated engines of the mesh read bodies."""


def light_front(gateway: Gateway, health: Health) -> "LightFront":
    """The ASGI application of a gateway without vLLM."""
    passing = PassThrough(gateway.producer)
    door = Door(gateway, _Readers(gateway.registry, gateway.instances, passing))
    return LightFront(gateway, build_app(gateway, health), door)


class _Readers(Mapping[ModelName, PassThrough]):
    """
    Base model whose servers or engines read bodies -> its application; follows the registry and the
    instances.
    """

    def __init__(
        self, registry: ModelRegistry, instances: Instances, application: PassThrough
    ) -> None:
        self._registry = registry
        self._instances = instances
        self._application = application

    def __getitem__(self, model: ModelName) -> PassThrough:
        if _reads_bodies(self._registry.entry(model), self._instances):
            return self._application
        raise KeyError(model)

    def __iter__(self) -> Iterator[ModelName]:
        entries = (self._registry.entry(base) for base in self._registry.bases)
        return (entry.name for entry in entries if _reads_bodies(entry, self._instances))

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _reads_bodies(entry: ModelEntry, instances: Instances) -> bool:
    """True if each instance of a model reads bodies, whole and streamed."""
    return entry.takes_bodies or instances.engines(entry.name) == {SIMULATED_ENGINE}


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
        async with read_ahead(self._gateway, scope, receive) as (request, body):
            takes = self._takes_body(self._model_in(body), scope["path"])
            application = self._door if takes else self._text
            await application(request.scope, request.receive, send)

    def _may_take_body(self, scope: dict[str, Any]) -> bool:
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] not in ROUTES:
            return False
        registry = self._gateway.registry
        return scope["path"] in BODY_ENDPOINTS or any(
            registry.entry(base).takes_bodies for base in registry.bases
        )

    def _takes_body(self, model: ModelEntry | None, path: str) -> bool:
        """
        True if the door passes on a body for *model* at *path*. The text application has few
        endpoints, so the door names an unknown model for the others.
        """
        if model is None:
            return path not in TEXT_ENDPOINTS
        if model.takes_bodies:
            return True
        return path in BODY_ENDPOINTS and _reads_bodies(model, self._gateway.instances)

    def _model_in(self, body: bytes) -> ModelEntry | None:
        """The model that a body names; None without a known model, or if *body* was not read."""
        registry = self._gateway.registry
        try:
            name = msgspec.json.decode(body, type=_Named).model
            ref = registry.resolve(name if isinstance(name, str) else "")
        except (MeshError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None  # the application refuses it, in the form of its API
        return registry.entry(ref.base)
