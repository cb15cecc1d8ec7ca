"""Parts of a gateway over the tiny models, without a broker."""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry

from services.gateway.body import BodyMemory
from services.gateway.fallbacks import Fallbacks
from services.gateway.headers import parse_hints
from services.gateway.instances import Instances
from services.gateway.intake import Accepted, Intake, load_tokenizers
from services.gateway.metrics import GatewayMetrics
from services.gateway.openai import ChatBody, CompletionBody
from services.gateway.settings import Settings
from services.gateway.state import Gateway
from services.gateway.tenants import Tenants
from shared.contracts.base import TenantId
from shared.contracts.lanes import LaneLayout
from shared.models.registry import ModelRegistry
from tests.clocks import FakeClock

NOW = 1_000_000_000.0
SEED = 4711
MODEL = "tiny-llama"
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hello there"}]}
COMPLETION = {"model": MODEL, "prompt": "hello there"}


class IntakeRig:
    """An intake whose request bodies are plain data."""

    def __init__(self, registry: Path, settings: Settings | None = None) -> None:
        self.registry = ModelRegistry.load(registry)
        self.tokenizers = load_tokenizers(self.registry)
        self.fallbacks = Fallbacks(
            registry=self.registry, layout=LaneLayout(), clock=FakeClock(NOW), answer_tokens=16
        )
        self.intake = Intake(
            settings=settings or Settings(),
            registry=self.registry,
            tokenizers=self.tokenizers,
            fallbacks=self.fallbacks,
            new_seed=lambda: SEED,
        )

    def raw(
        self, raw: bytes, headers: Mapping[str, str] | None = None, *, chat: bool = False
    ) -> Accepted:
        return self.intake.accept(
            raw,
            ChatBody if chat else CompletionBody,
            hints=parse_hints(headers or {}),
            tenant=TenantId("acme"),
            request_id="req-1",
            arrived_at=NOW,
        )

    def completion(self, headers: Mapping[str, str] | None = None, **fields: object) -> Accepted:
        return self.raw(msgspec.json.encode(COMPLETION | fields), headers)

    def chat(self, headers: Mapping[str, str] | None = None, **fields: object) -> Accepted:
        return self.raw(msgspec.json.encode(CHAT | fields), headers, chat=True)


def tenants_of(**fields: Any) -> Tenants:
    """Tenants without API keys, each with one slot; *fields* override arguments of `Tenants`."""
    values: dict[str, Any] = {
        "api_keys": {},
        "default_tenant": "default",
        "trust_fairness_header": False,
        "max_outstanding": 1,
    }
    return Tenants(**(values | fields))


def gateway_of(rig: IntakeRig, producer: Any, **fields: Any) -> Gateway:
    """A gateway that submits requests to *producer*; *fields* override those of `Gateway`."""
    values: dict[str, Any] = {
        "settings": Settings(),
        "registry": rig.registry,
        "intake": rig.intake,
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
