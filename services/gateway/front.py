"""Selects the application that reads requests and writes answers."""

import asyncio
import importlib
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from services.gateway.routes import build_app
from services.gateway.state import Gateway
from shared.contracts.errors import SettingsError
from shared.runtime.health import Health

ENVIRONMENT = {
    "VLLM_TARGET_DEVICE": "cpu",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}
"""Variables for vLLM in the gateway, which needs no device; the process's own take precedence."""


@asynccontextmanager
async def open_front(front: str, gateway: Gateway, health: Health) -> AsyncIterator[Any]:
    """
    Context with the ASGI application of the front *front*, `light` or `vllm`.

    Raises:
        SettingsError: vLLM cannot be imported.
    """
    if front == "light":
        yield build_app(gateway, health)
        return
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        # In a thread, since the import takes seconds: the broker needs heartbeats.
        module = await asyncio.to_thread(importlib.import_module, "services.gateway.vllm.front")
    except ImportError as error:
        raise SettingsError(f"front `vllm` cannot import vLLM: {error}") from error
    async with module.vllm_front(gateway, health) as application:
        yield application
