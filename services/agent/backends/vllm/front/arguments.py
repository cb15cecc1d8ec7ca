"""vLLM's engine arguments for a model; computed in the front, used in the host."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from services.agent.backends.settings import VllmSettings
from services.agent.backends.vllm.front.device_defaults import with_device_defaults
from services.agent.backends.vllm.shared.core_settings import CONFIG_KEY, CoreSettings
from services.agent.backends.vllm.shared.schedulers import POLICY, PREEMPTIBLE, STOCK
from services.agent.backends.vllm.shared.workers import (
    CPU_WORKER,
    SAFEPOINT_WORKERS,
    WITHOUT_SAFEPOINTS,
)
from services.engine_core.serve_arguments import GRAMMARS
from shared.contracts.errors import SettingsError
from shared.contracts.models import ModelEntry
from shared.models.files.derive import adapter_facts
from shared.models.files.model_files import has_processor

_SAFEPOINT_LAYERS = 4
_CPU_HOST_KV_BYTES = 256 << 20
_DEFAULT_RANK = 16
_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM allows for the largest rank of adapters."""


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
    chosen = with_device_defaults(settings, is_cpu=is_cpu)
    tested = is_cpu and chosen.eager and not chosen.async_scheduling
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
    chosen = with_device_defaults(settings, is_cpu=is_cpu)
    arguments: dict[str, Any] = {
        "model": entry.path,
        # Sleeping engines release the device's memory.
        "enable_sleep_mode": not is_cpu,
        "max_model_len": entry.max_model_len,
        # The engine core loads a tokenizer for its first structured output.
        "skip_tokenizer_init": True,
        "enforce_eager": bool(chosen.eager),
        "dtype": chosen.dtype or "auto",
        "enable_prefix_caching": settings.prefix_caching,
        # The host replaces the class if vLLM's configuration schedules asynchronously.
        "scheduler_cls": STOCK if settings.policy == "stock" else POLICY,
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
        arguments |= {"scheduler_cls": PREEMPTIBLE, "worker_cls": SAFEPOINT_WORKERS[is_cpu]}
    arguments |= _limits(chosen) | _lora(entry)
    if entry.pools:
        return arguments | _pooling(entry, chosen) | entry.engine_args
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


def _limits(chosen: VllmSettings) -> dict[str, Any]:
    """The arguments that vLLM chooses by itself if they are missing."""
    given = {
        "async_scheduling": chosen.async_scheduling,
        "max_num_seqs": chosen.max_running,
        "max_num_batched_tokens": _token_budget(chosen),
        "kv_cache_memory_bytes": chosen.kv_cache_bytes,
        "block_size": chosen.block_tokens,
    }
    return {name: value for name, value in given.items() if value is not None}


def _token_budget(chosen: VllmSettings, least: int = 0) -> int | None:
    """Tokens of one iteration, for at least *least* tokens and one of each running request."""
    if chosen.token_budget is None:
        return None
    return max(chosen.token_budget, chosen.max_running or 0, least)


def _pooling(entry: ModelEntry, chosen: VllmSettings) -> dict[str, Any]:
    """
    Arguments for a pooling model, which has no safepoints and no copies of KV: its requests are
    short, and some models have no KV.
    """
    arguments = {
        "runner": "pooling",
        # None: vLLM caches prefixes of those models that support it.
        "enable_prefix_caching": None if chosen.prefix_caching else False,
        # Some models compute each input in one iteration.
        "max_num_batched_tokens": _token_budget(chosen, entry.max_model_len),
    }
    if arguments["max_num_batched_tokens"] is None:
        del arguments["max_num_batched_tokens"]  # vLLM's own value
    return arguments


def _lora(entry: ModelEntry) -> dict[str, Any]:
    """
    Arguments for LoRA adapters, if the engine needs room for them.

    `max_loras` is one more than the adapters that the host loads: on a CPU, vLLM applies the
    adapter of the last slot to requests without an adapter in a batch with adapters, and the last
    slot is therefore left empty.
    """
    if not entry.adapter_slots:
        return {}
    num_slots = entry.adapter_slots + 1
    ranks = [_DEFAULT_RANK, *(_rank(Path(each)) for each in entry.adapters.values())]
    return {
        "enable_lora": True,
        "max_loras": num_slots,
        "max_cpu_loras": num_slots,
        "max_lora_rank": min(rank for rank in _RANKS if rank >= min(max(ranks), _RANKS[-1])),
    }


def _rank(directory: Path) -> int:
    """Rank of an adapter; 0 if its files are unusable, which ends its own requests only."""
    try:
        return adapter_facts(directory).rank
    except SettingsError:
        return 0


def _grammars(entry: ModelEntry) -> dict[str, Any]:
    """Keyword arguments of `StructuredOutputsConfig`."""
    own = entry.engine_args.get("structured_outputs_config") or {}
    return {"backend": GRAMMARS} | own


def without_safepoints(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return *arguments* with the scheduler and worker classes that have no safepoints."""
    worker = WITHOUT_SAFEPOINTS[arguments["worker_cls"]]
    return {**arguments, "scheduler_cls": POLICY, "worker_cls": worker}
