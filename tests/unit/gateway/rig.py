"""Parts of a gateway over the tiny models, without a broker."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry

from services.gateway.application import application_of
from services.gateway.body import BodyMemory
from services.gateway.fallbacks import Fallbacks
from services.gateway.instances import Instances
from services.gateway.metrics import GatewayMetrics
from services.gateway.settings import Settings
from services.gateway.state import Gateway
from services.gateway.tenants import Tenants
from shared.contracts.errors import CapacityError
from shared.contracts.ingress import CallRequest
from shared.contracts.lanes import LaneLayout
from shared.models.registry import ModelRegistry
from shared.runtime.health import Health
from tests.clocks import FakeClock

NOW = 1_000_000_000.0
MODEL = "tiny-llama"
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hello there"}]}
COMPLETION = {"model": MODEL, "prompt": "hello there"}


@dataclass(frozen=True)
class Refused:
    """The error with which a gateway has refused a request."""

    status: int
    code: str
    param: str | None
    message: str


class FullMesh:
    """A producer that records requests and refuses them."""

    def __init__(self) -> None:
        self.given: list[CallRequest] = []

    async def submit(self, body: CallRequest, **_: object) -> None:
        self.given.append(body)
        raise CapacityError("the mesh is full", retry_after_s=1.0)


class DoorRig:
    """
    A gateway whose requests are plain data.

    Args:
        registry: The models.
        fields: Fields of the gateway that differ from those of `gateway_of`.
    """

    def __init__(self, registry: Path, **fields: Any) -> None:
        self._fields = fields
        self.registry = ModelRegistry.load(registry)
        self.fallbacks = Fallbacks(
            registry=self.registry, layout=LaneLayout(), clock=FakeClock(NOW), answer_tokens=16
        )

    def send(
        self,
        raw: bytes,
        headers: Mapping[str, str] | None = None,
        *,
        path: str = "/v1/completions",
    ) -> CallRequest | Refused:
        """Send a request; return what the gateway publishes, or its refusal."""
        mesh = FullMesh()
        gateway = gateway_of(self, mesh, clock=FakeClock(NOW), **self._fields)
        application = application_of(gateway, Health(service="gateway"))
        pairs = [(name.encode(), value.encode()) for name, value in (headers or {}).items()]
        status, _, body = asyncio.run(posted(application, path, raw, *pairs))
        if mesh.given:
            return mesh.given[0]
        error = msgspec.json.decode(body)["error"]
        return Refused(status, error["code"], error["param"], error["message"])

    def completion(self, headers: Mapping[str, str] | None = None, **fields: object) -> CallRequest:
        """What the gateway publishes of a completion with *fields*."""
        published = self.send(msgspec.json.encode(COMPLETION | fields), headers)
        assert isinstance(published, CallRequest), published
        return published

    def refusal(self, headers: Mapping[str, str] | None = None, **fields: object) -> Refused:
        """The gateway's refusal of a completion with *fields*."""
        refused = self.send(msgspec.json.encode(COMPLETION | fields), headers)
        assert isinstance(refused, Refused), refused
        return refused


async def posted(
    application: Any, path: str, body: bytes, *headers: tuple[bytes, bytes]
) -> tuple[int, dict[bytes, bytes], bytes]:
    """Send a request to an ASGI application; return status, headers and body of the answer."""
    sent: list[Any] = []
    events = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Any:
        return events.pop() if events else await asyncio.Event().wait()

    async def send(event: Any) -> None:
        sent.append(event)

    await application(scope_of(path, *headers), receive, send)
    start, *parts = sent
    return start["status"], dict(start["headers"]), b"".join(part["body"] for part in parts)


def tenants_of(**fields: Any) -> Tenants:
    """Tenants without API keys, each with one slot; *fields* override arguments of `Tenants`."""
    values: dict[str, Any] = {
        "api_keys": {},
        "default_tenant": "default",
        "trust_fairness_header": False,
        "max_outstanding": 1,
    }
    return Tenants(**(values | fields))


def gateway_of(rig: DoorRig, producer: Any, **fields: Any) -> Gateway:
    """A gateway that submits requests to *producer*; *fields* override those of `Gateway`."""
    values: dict[str, Any] = {
        "settings": Settings(),
        "registry": rig.registry,
        "fallbacks": rig.fallbacks,
        "tenants": tenants_of(),
        "bodies": BodyMemory(2 * 4 * 2**20),
        "producer": producer,
        "instances": Instances(registry=rig.registry, clock=FakeClock()),
        "metrics": GatewayMetrics(CollectorRegistry()),
        "clock": FakeClock(),
        "stop": asyncio.Event(),
    }
    return Gateway(**(values | fields))


def scope_of(path: str, *headers: tuple[bytes, bytes], method: str = "POST") -> dict[str, Any]:
    """The ASGI scope of an HTTP request."""
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": list(headers),
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 2),
    }
