"""
Private names of vLLM that Headway uses; an update of vLLM could remove or change them.

Other contract tests cover the behaviour; this test finds missing names within a minute.
"""

import json
import subprocess
import sys
from typing import Any

import pytest

from services.agent.backends.vllm.front.process import vllm_unavailable_reason
from tests.requirements import absent

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

_V1 = "vllm.v1"
_SCHEDULER = f"{_V1}.core.sched.scheduler:Scheduler"
_RUNNER = f"{_V1}.worker.gpu_model_runner:GPUModelRunner"
_BATCH = f"{_V1}.worker.gpu_input_batch:InputBatch"
_CONNECTOR = "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1"
_CLIENT = f"{_V1}.engine.core_client:AsyncMPClient"

METHODS: dict[str, dict[str, list[str]]] = {
    _SCHEDULER: {
        "schedule": ["throttle_prefills"],
        "update_from_output": ["scheduler_output", "model_runner_output"],
        "add_request": ["request"],
        "finish_requests": ["request_ids", "finished_status"],
        "reset_prefix_cache": ["reset_running_requests", "reset_connector"],
        "get_request_counts": [],
        "_preempt_request": ["request", "timestamp", "drop_stale_output"],
        "_free_request": ["request", "delay_free_blocks"],
    },
    _CONNECTOR: {
        "on_new_request": ["request"],
        "get_num_new_matched_tokens": ["request", "num_computed_tokens"],
        "update_state_after_alloc": ["request", "blocks", "num_external_tokens"],
        "build_connector_meta": ["scheduler_output"],
        "update_connector_output": ["connector_output"],
        "has_pending_push_work": [],
        "reset_cache": [],
        "register_kv_caches": ["kv_caches"],
        "handle_preemptions": ["kv_connector_metadata"],
        "get_block_ids_with_load_errors": [],
        "build_connector_worker_meta": [],
    },
    f"{_V1}.worker.cpu_worker:CPUWorker": {
        "load_model": ["load_dummy_weights"],
        "execute_model": ["scheduler_output"],
        "sample_tokens": ["grammar_output"],
    },
    f"{_V1}.worker.gpu_worker:Worker": {
        "load_model": ["load_dummy_weights"],
        "execute_model": ["scheduler_output"],
        "sample_tokens": ["grammar_output"],
        "reload_weights": ["args", "kwargs"],
    },
    f"{_V1}.engine.core_client:EngineCoreClient": {
        "make_async_mp_client": [
            *("vllm_config", "executor_class", "log_stats", "client_addresses", "client_count"),
            *("client_index", "renderer"),
        ],
    },
    _CLIENT: {
        "add_request_async": ["request"],
        "abort_requests_async": ["request_ids"],
        "get_output_async": [],
        "get_supported_tasks_async": [],
        "reset_prefix_cache_async": ["reset_running_requests", "reset_connector"],
        "collective_rpc_async": ["method", "timeout", "args", "kwargs"],
        "sleep_async": ["level", "mode"],
        "wake_up_async": ["tags"],
        "add_lora_async": ["lora_request"],
        "remove_lora_async": ["lora_id"],
        "shutdown": ["timeout"],
    },
    f"{_V1}.engine.input_processor:InputProcessor": {
        "_validate_params": ["params", "supported_tasks"],
        "_validate_prompt_len": ["prompt_len", "prompt_type"],
        "apply_watermarking": ["params", "watermarking"],
    },
    "vllm.sampling_params:SamplingParams": {
        "update_from_generation_config": ["generation_config", "eos_token_id"],
    },
    f"{_V1}.structured_output:StructuredOutputManager": {
        "grammar_init": ["request"],
        "_create_grammar": ["request"],
        "_get_reasoner": ["request"],
        "_get_constraint_bounds": ["request", "spec_tokens", "spec_tokens_committed"],
    },
    _BATCH: {"update_async_output_token_ids": []},
    f"{_V1}.engine.detokenizer:IncrementalDetokenizer": {
        "from_new_request": ["tokenizer", "request"],
        "update": ["new_token_ids", "stop_terminated"],
        "num_output_tokens": [],
    },
    f"{_V1}.sample.thinking_budget_state:ThinkingBudgetStateHolder": {
        "update_state": ["output_token_ids", "spec_token_ids", "repeat_indices"],
        "has_tracked_requests": [],
    },
    f"{_V1}.engine.async_llm:AsyncLLM": {
        "abort": ["request_id", "internal"],
        "_run_output_handler": [],
        "shutdown": ["timeout"],
    },
    f"{_V1}.engine.output_processor:OutputProcessor": {
        "process_outputs": [
            *("engine_core_outputs", "engine_core_timestamp", "iteration_stats"),
            "weight_version",
        ],
        "abort_requests": ["request_ids", "internal"],
    },
    f"{_V1}.engine.output_processor:RequestOutputCollector": {"put": ["output"]},
    f"{_V1}.core.kv_cache_manager:KVCacheManager": {"evict_blocks": ["block_ids"]},
    f"{_V1}.core.block_pool:BlockPool": {"get_num_free_blocks": [], "evict_blocks": ["block_ids"]},
}
"""Parameters by method, without `self`."""

FIELDS: dict[str, list[str]] = {
    _SCHEDULER: [
        *("requests", "running", "waiting", "current_step", "block_size", "connector"),
        *("max_num_scheduled_tokens", "max_num_active_reqs", "prev_step_scheduled_req_ids"),
        *("kv_cache_manager", "kv_cache_config", "scheduler_config", "_inflight_prefills"),
        *("structured_output_manager", "grammar_compile_error_reqs", "max_model_len"),
    ],
    f"{_V1}.request:Request": [
        *("num_computed_tokens", "num_in_flight_tokens", "num_output_placeholders"),
        *("is_prefill_chunk", "next_decode_eligible_step", "block_hashes", "sampling_params"),
        *("pooling_params", "structured_output_request", "use_structured_output", "prefill_stats"),
    ],
    _RUNNER: ["execute_model_state", "discard_request_mask", "input_batch", "requests"],
    _BATCH: ["generators", "num_tokens_no_spec", "num_reqs", "req_ids", "sampling_metadata"],
    f"{_V1}.core.single_type_kv_cache_manager:SingleTypeKVCacheManager": [
        "num_cached_block",
        "req_to_blocks",
    ],
    f"{_V1}.sample.metadata:SamplingMetadata": [
        *("no_penalties", "output_token_ids", "bad_words_token_ids"),
        "thinking_budget_state_holder",
    ],
    f"{_V1}.engine.output_processor:OutputProcessor": ["request_states"],
    f"{_V1}.engine.output_processor:RequestState": ["queue"],
    f"{_V1}.core.sched.output:SchedulerOutput": [
        *("scheduled_new_reqs", "scheduled_cached_reqs", "num_scheduled_tokens"),
        *("total_num_scheduled_tokens", "finished_req_ids", "free_encoder_mm_hashes"),
        *("new_block_ids_to_zero", "kv_cache_block_copies", "kv_connector_block_state"),
    ],
    f"{_V1}.core.sched.output:CachedRequestData": [
        *("req_ids", "resumed_req_ids", "new_token_ids", "all_token_ids", "new_block_ids"),
        *("num_computed_tokens", "num_output_tokens"),
    ],
    _CLIENT: ["resources"],
    f"{_V1}.engine.core_client:BackgroundResources": ["engine_dead", "engine_manager"],
    f"{_V1}.engine.utils:CoreEngineProcManager": ["processes"],
    f"{_V1}.engine:EngineCoreRequest": [
        *("request_id", "prompt_token_ids", "mm_features", "sampling_params", "pooling_params"),
        *("arrival_time", "lora_request", "cache_salt", "data_parallel_rank", "priority"),
    ],
    f"{_V1}.engine:EngineCoreOutput": [
        *("request_id", "new_token_ids", "finish_reason", "stop_reason", "prefill_stats"),
        *("kv_transfer_params", "finished", "pooling_output"),
    ],
    f"{_V1}.metrics.stats:PrefillStats": ["num_cached_tokens"],
    f"{_V1}.engine.input_processor:InputProcessor": ["generation_config_fields"],
    f"{_V1}.structured_output:StructuredOutputManager": ["tokenizer", "vllm_config"],
    f"{_V1}.structured_output.request:StructuredOutputRequest": ["reasoning_ended", "grammar"],
    "vllm.pooling_params:PoolingParams": ["extra_kwargs", "task", "late_interaction_params"],
    f"{_V1}.kv_cache_interface:KVCacheConfig": ["kv_cache_groups", "num_blocks"],
    "vllm.config:SchedulerConfig": ["enable_chunked_prefill"],
    "vllm.config:ModelConfig": ["embedding_size", "hf_config", "runner_type"],
}
"""Attributes that the class declares or sets."""

SCRIPT = """
import importlib, inspect, json, sys

def found(path):
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)

methods, fields = json.load(sys.stdin)
import vllm
out = {"version": vllm.__version__, "methods": {}, "fields": {}}
for path, names in methods.items():
    there = out["methods"][path] = {}
    for name in names:
        method = getattr(found(path), name, None)
        there[name] = method and [
            each for each in inspect.signature(method).parameters if each != "self"
        ]
for path, names in fields.items():
    source = "".join(inspect.getsource(each) for each in found(path).__mro__[:-1]
                     if each.__module__.startswith("vllm"))
    out["fields"][path] = [
        name for name in names
        if f"self.{name}" in source or f" {name}:" in source or f"def {name}(" in source
    ]
print(json.dumps(out))
"""


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """Names in the installed vLLM, read in another process: this process must not import vLLM."""
    if (reason := vllm_unavailable_reason()) is not None:
        absent(reason, "vllm")
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        input=json.dumps([METHODS, FIELDS]),
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    result: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return result


def test_the_installed_version_is_a_tested_version(found: dict[str, Any]) -> None:
    assert found["version"].startswith("0.32."), (
        "run the whole contract suite, then update the version here"
    )


def test_method_parameters_are_unchanged(found: dict[str, Any]) -> None:
    changed = {
        f"{path}.{name}": found["methods"][path][name]
        for path, methods in METHODS.items()
        for name, parameters in methods.items()
        if found["methods"][path][name] != parameters
    }

    assert changed == {}, "None: the method is gone; otherwise its present parameters"


def test_attributes_of_vllm_that_headway_uses_exist(found: dict[str, Any]) -> None:
    missing = [
        f"{path}.{name}"
        for path, names in FIELDS.items()
        for name in names
        if name not in found["fields"][path]
    ]

    assert missing == []
