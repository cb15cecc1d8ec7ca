"""vLLM's engine arguments for a model; computed in the front, used in the host."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from services.agent.backends.settings import VllmSettings
from services.agent.backends.vllm.shared.core_settings import CONFIG_KEY, CoreSettings
from services.agent.backends.vllm.shared.workers import (
    CPU_WORKER,
    SAFEPOINT_WORKERS,
    WITHOUT_SAFEPOINTS,
)
from shared.contracts.models import ModelEntry
from shared.models.processors import has_processor

CPU_KV_CACHE_BYTES = 128 << 20
_CPU_BLOCK_TOKENS = 32
_SAFEPOINT_LAYERS = 4
_CPU_HOST_KV_BYTES = 256 << 20
_STOCK = (
    "services.agent.backends.vllm.core.scheduler.TimedScheduler",
    "services.agent.backends.vllm.core.scheduler.AsyncTimedScheduler",
)
_POLICY = (
    "services.agent.backends.vllm.core.policy_scheduler.PolicyScheduler",
    "services.agent.backends.vllm.core.policy_scheduler.AsyncPolicyScheduler",
)
"""Scheduler classes: synchronous, asynchronous."""
_PREEMPTIBLE = "services.agent.backends.vllm.core.layer_preemption.PreemptibleScheduler"


def safepoint_layers(settings: VllmSettings, *, is_cpu: bool) -> int:
    """
    Layers between safepoints; 0 without safepoints.

    Only `qoserve` supports safepoints; other policies would continue as if dropped work were
    computed.
    """
    if settings.policy != "qoserve":
        return 0
    if settings.safepoint_layers is not None:
        return settings.safepoint_layers
    tested = is_cpu and settings.eager and not settings.async_scheduling
    return _SAFEPOINT_LAYERS if tested else 0


def has_checkpoints(settings: VllmSettings, *, is_cpu: bool) -> bool:
    """Return whether engines copy KV to host memory if the model allows it."""
    return is_cpu and settings.host_kv_bytes != 0


def _checkpoints(settings: VllmSettings) -> dict[str, Any]:
    """Keyword arguments of `KVTransferConfig`."""
    required = settings.host_kv_bytes is not None
    return {
        "kv_connector": "HostKvConnector",
        "kv_connector_module_path": "services.agent.backends.vllm.kv.connector",
        "kv_role": "kv_both",
        # Blocks that cannot be loaded are computed.
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "host_kv_bytes": host_kv_bytes(settings),
            "required": required,
        },
    }


def host_kv_bytes(settings: VllmSettings) -> int:
    """Host memory for KV copies of one engine on a CPU, in bytes."""
    return _CPU_HOST_KV_BYTES if settings.host_kv_bytes is None else settings.host_kv_bytes


def engine_arguments(
    entry: ModelEntry, settings: VllmSettings, *, is_cpu: bool, stats_path: Path
) -> dict[str, Any]:
    """
    Keyword arguments of `AsyncEngineArgs`.

    Args:
        entry: The model; its own `engine_args` take precedence.
        settings: Settings of the backend.
        is_cpu: True if vLLM runs on a CPU; selects the defaults of settings that are None.
        stats_path: File of the engine's `StatsWriter`.
    """
    layers = 0 if entry.pools else safepoint_layers(settings, is_cpu=is_cpu)
    arguments: dict[str, Any] = {
        "model": entry.path,
        # Sleeping engines release the device's memory.
        "enable_sleep_mode": not is_cpu,
        "max_model_len": entry.max_model_len,
        # The engine core loads a tokenizer for its first structured output.
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
        "worker_cls": CPU_WORKER if is_cpu else "auto",
        "additional_config": {
            CONFIG_KEY: msgspec.to_builtins(
                CoreSettings(
                    stats_path=str(stats_path),
                    policy="fcfs" if settings.policy == "stock" else settings.policy,
                    scheduling=settings.scheduling,
                    latency=settings.latency,
                    grammar_timeout_s=settings.grammar_timeout_s,
                    safepoint_layers=layers,
                    safepoints_required=settings.safepoint_layers is not None,
                )
            )
        },
        "enable_log_requests": False,
        "disable_log_stats": True,
    }
    if layers:
        # Also set these with asynchronous scheduling: the host then reports why safepoints do not
        # work.
        arguments |= {"scheduler_cls": _PREEMPTIBLE, "worker_cls": SAFEPOINT_WORKERS[is_cpu]}
    kv_cache_bytes = settings.kv_cache_bytes or (CPU_KV_CACHE_BYTES if is_cpu else None)
    if kv_cache_bytes is not None:
        arguments["kv_cache_memory_bytes"] = kv_cache_bytes
    block_tokens = settings.block_tokens or (_CPU_BLOCK_TOKENS if is_cpu else None)
    if block_tokens is not None:
        arguments["block_size"] = block_tokens
    if entry.pools:
        return arguments | _pooling(entry, settings) | entry.engine_args
    if has_checkpoints(settings, is_cpu=is_cpu):
        arguments["kv_transfer_config"] = _checkpoints(settings)
    if entry.reasoning_parser is not None:
        # The gateway's parser, so that no grammar restricts the reasoning.
        arguments["reasoning_parser"] = entry.reasoning_parser
        arguments["skip_tokenizer_init"] = False  # the parser reads its tokens from the tokenizer
    if has_processor(entry):
        # Images arrive complete, and the engine core processes an image to measure its memory.
        arguments |= {"mm_processor_cache_gb": 0, "skip_tokenizer_init": False}
    return arguments | entry.engine_args | {"structured_outputs_config": _grammars(entry)}


def _pooling(entry: ModelEntry, settings: VllmSettings) -> dict[str, Any]:
    """
    Arguments for a pooling model, which has no safepoints and no copies of KV: its requests are
    short, and some models have no KV.
    """
    return {
        "runner": "pooling",
        # None: vLLM caches prefixes of those models that support it.
        "enable_prefix_caching": None if settings.prefix_caching else False,
        # Some models compute each input in one iteration.
        "max_num_batched_tokens": max(
            settings.token_budget, settings.max_running, entry.max_model_len
        ),
    }


def _grammars(entry: ModelEntry) -> dict[str, Any]:
    """
    Keyword arguments of `StructuredOutputsConfig`.

    An engine core has one backend for all requests; `xgrammar` supports all kinds of grammars.
    """
    own = entry.engine_args.get("structured_outputs_config") or {}
    return {"backend": "xgrammar"} | own


def without_safepoints(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return *arguments* with the scheduler and worker classes that have no safepoints."""
    is_async = bool(arguments.get("async_scheduling"))
    worker = WITHOUT_SAFEPOINTS[arguments["worker_cls"]]
    return {**arguments, "scheduler_cls": _POLICY[is_async], "worker_cls": worker}
