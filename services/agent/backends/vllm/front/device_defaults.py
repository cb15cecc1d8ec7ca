"""Values of the settings that are not set, by device."""

from typing import Any

import msgspec

from services.agent.backends.settings import VllmSettings

CPU_MAX_RUNNING = 64
CPU_KV_CACHE_BYTES = 128 << 20
_CPU: dict[str, Any] = {
    # Compilation takes half a minute for each engine.
    "eager": True,
    # A CPU does not overlap the scheduler with the model, so iterations would be timed less exactly
    # without any gain.
    "async_scheduling": False,
    # Iterations stay short enough for targets of a second.
    "max_running": CPU_MAX_RUNNING,
    "token_budget": 2048,
    # Without a size vLLM takes most of the host's memory.
    "kv_cache_bytes": CPU_KV_CACHE_BYTES,
    # The smallest size that vLLM supports on a CPU: prefixes and checkpoints are whole blocks.
    "block_tokens": 32,
    # Several times as fast as bfloat16 on CPUs without instructions for it.
    "dtype": "float32",
}
_WITH_SAFEPOINTS: dict[str, Any] = {
    # Safepoints are hooks of modules, which compiled models and captured graphs do not call.
    "eager": True,
    # The next iteration must not be decided before the preempted one has ended.
    "async_scheduling": False,
}
"""On a GPU, if safepoints are requested."""


def with_device_defaults(settings: VllmSettings, *, is_cpu: bool) -> VllmSettings:
    """
    Return *settings* with the device's defaults in place of None.

    On a GPU most stay None, which selects vLLM's own value: CUDA graphs, asynchronous scheduling,
    limits and KV memory by the device's size.
    """
    defaults = _CPU if is_cpu else _WITH_SAFEPOINTS if settings.safepoint_layers else {}
    missing = {name: value for name, value in defaults.items() if getattr(settings, name) is None}
    return msgspec.structs.replace(settings, **missing)
