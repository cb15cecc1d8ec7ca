"""Selects the application that reads requests and writes answers."""

import asyncio
import importlib
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import structlog

from services.engine_core.environment import use_no_device
from services.gateway.bodies import NoSteps, bodies_front
from services.gateway.state import Gateway
from shared.contracts.base import ModelName
from shared.contracts.errors import SettingsError
from shared.models.registry import ModelRegistry
from shared.models.watch import RegistrySteps
from shared.runtime.health import Health

log = structlog.get_logger()
Front = Literal["bodies", "vllm"]


def front_of(registry: ModelRegistry) -> Front:
    """
    Front for the setting `auto`: `vllm` if vLLM is installed and a model of *registry* has weights,
    which only real engines need.
    """
    entries = (registry.entry(base) for base in registry.bases)
    paths = (Path(entry.path) for entry in entries if not entry.takes_bodies)
    has_weights = any(next(path.glob("*.safetensors"), None) for path in paths)
    return "vllm" if has_weights and find_spec("vllm") is not None else "bodies"


@dataclass(frozen=True, slots=True)
class OpenFront:
    """A front that serves."""

    application: Any
    """ASGI application."""
    steps: RegistrySteps
    """What the front does about changes of the registry."""
    digests: Mapping[ModelName, str]
    """
    Base model -> digest of the files with which the front renders requests; contains models that
    are added later. Empty if engines render the requests.
    """


@asynccontextmanager
async def open_front(gateway: Gateway, health: Health) -> AsyncIterator[OpenFront]:
    """
    Context with the gateway's front.

    Raises:
        SettingsError: vLLM cannot be imported.
    """
    front = gateway.settings.front
    if front == "auto":
        front = front_of(gateway.registry)
    log.info("front.selected", front=front)
    if front == "bodies":
        yield OpenFront(bodies_front(gateway, health), NoSteps(), {})
        return
    use_no_device()
    try:
        # Import in a thread: the import takes seconds, and heartbeats to the broker must continue.
        module = await asyncio.to_thread(importlib.import_module, "services.gateway.vllm.front")
    except ImportError as error:
        raise SettingsError(f"front `vllm` cannot import vLLM: {error}") from error
    async with module.vllm_front(gateway, health) as (application, steps, digests):
        yield OpenFront(application, steps, digests)
