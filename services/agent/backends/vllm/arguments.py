"""vLLM's engine arguments for a model; decided in the front, used in the host."""

from pathlib import Path
from typing import Any

import msgspec

from services.agent.backends.settings import VllmSettings
from services.agent.backends.vllm.core_settings import CONFIG_KEY, CoreSettings
from shared.contracts.models import ModelEntry

_CPU_KV_CACHE_BYTES = 128 << 20
_CPU_BLOCK_TOKENS = 32
_PACKAGE = "services.agent.backends.vllm"
_STOCK = (
    f"{_PACKAGE}.scheduler.TimedScheduler",
    f"{_PACKAGE}.scheduler.AsyncTimedScheduler",
)
_POLICY = (
    f"{_PACKAGE}.policy_scheduler.PolicyScheduler",
    f"{_PACKAGE}.policy_scheduler.AsyncPolicyScheduler",
)
"""Scheduler classes: synchronous, asynchronous."""


def engine_arguments(
    entry: ModelEntry, settings: VllmSettings, *, is_cpu: bool, stats_path: Path
) -> dict[str, Any]:
    """
    Keyword arguments of `AsyncEngineArgs`.

    Args:
        entry: The model; its own `engine_args` win.
        settings: Of the backend.
        is_cpu: Whether vLLM runs on a CPU, for what the settings leave open.
        stats_path: File of the engine's `StatsWriter`.
    """
    arguments: dict[str, Any] = {
        "model": entry.path,
        "max_model_len": entry.max_model_len,
        "skip_tokenizer_init": True,
        "enforce_eager": settings.eager,
        "dtype": settings.dtype or ("float32" if is_cpu else "auto"),
        "max_num_seqs": settings.max_running,
        "max_num_batched_tokens": max(settings.token_budget, settings.max_running),
        "enable_prefix_caching": settings.prefix_caching,
        "async_scheduling": settings.async_scheduling,
        "scheduler_cls": (_STOCK if settings.policy == "stock" else _POLICY)[
            settings.async_scheduling
        ],
        "additional_config": {
            CONFIG_KEY: msgspec.to_builtins(
                CoreSettings(
                    stats_path=str(stats_path),
                    policy="fcfs" if settings.policy == "stock" else settings.policy,
                    scheduling=settings.scheduling,
                    latency=settings.latency,
                )
            )
        },
        "enable_log_requests": False,
        "disable_log_stats": True,
    }
    kv_cache_bytes = settings.kv_cache_bytes or (_CPU_KV_CACHE_BYTES if is_cpu else None)
    if kv_cache_bytes is not None:
        arguments["kv_cache_memory_bytes"] = kv_cache_bytes
    block_tokens = settings.block_tokens or (_CPU_BLOCK_TOKENS if is_cpu else None)
    if block_tokens is not None:
        arguments["block_size"] = block_tokens
    return arguments | entry.engine_args
