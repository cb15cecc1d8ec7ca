"""What all requests of one gateway share."""

import asyncio
from dataclasses import dataclass

from services.gateway.intake import Intake
from services.gateway.metrics import GatewayMetrics
from services.gateway.openai import ChatBody, CompletionBody
from services.gateway.settings import Settings
from services.gateway.shapes import Shape
from services.gateway.tenants import Tenants
from shared.models.registry import ModelRegistry
from shared.producer.producer import Producer
from shared.runtime.clock import Clock


@dataclass(frozen=True, slots=True, kw_only=True)
class Gateway:
    """The parts, wired by `service.py`."""

    settings: Settings
    registry: ModelRegistry
    intake: Intake
    tenants: Tenants
    producer: Producer
    metrics: GatewayMetrics
    clock: Clock
    stop: asyncio.Event
    """Set: no new requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """One of the two generating endpoints."""

    name: str
    body_type: type[ChatBody] | type[CompletionBody]
    shape: Shape
