"""An intake over the tiny models, without a broker."""

from collections.abc import Mapping
from pathlib import Path

import msgspec

from services.gateway.fallbacks import Fallbacks
from services.gateway.headers import parse_hints
from services.gateway.intake import Accepted, Intake, load_tokenizers
from services.gateway.openai import ChatBody, CompletionBody
from services.gateway.settings import Settings
from shared.contracts.base import TenantId
from shared.contracts.lanes import LaneLayout
from shared.models.registry import ModelRegistry

NOW = 1_000_000_000.0
SEED = 4711
MODEL = "tiny-llama"
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hello there"}]}
COMPLETION = {"model": MODEL, "prompt": "hello there"}


class FixedClock:
    """A constant clock."""

    def now(self) -> float:
        return NOW


class IntakeRig:
    """An intake whose request bodies are plain data."""

    def __init__(self, registry: Path, settings: Settings | None = None) -> None:
        self.registry = ModelRegistry.load(registry)
        self.tokenizers = load_tokenizers(self.registry)
        self.fallbacks = Fallbacks(
            registry=self.registry, layout=LaneLayout(), clock=FixedClock(), answer_tokens=16
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
