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
_ASYNC_LLM = f"{_V1}.engine.async_llm:AsyncLLM"

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
    _ASYNC_LLM: {
        "reset_prefix_cache": ["reset_running_requests", "reset_connector"],
        "collective_rpc": ["method", "timeout", "args", "kwargs"],
        "sleep": ["level", "mode"],
        "wake_up": ["tags"],
        "shutdown": ["timeout"],
    },
    f"{_V1}.core.kv_cache_manager:KVCacheManager": {"evict_blocks": ["block_ids"]},
    f"{_V1}.core.block_pool:BlockPool": {"get_num_free_blocks": [], "evict_blocks": ["block_ids"]},
}
"""Parameters by method, without `self`."""

FIELDS: dict[str, list[str]] = {
    _SCHEDULER: [
        *("requests", "running", "waiting", "current_step", "block_size", "connector"),
        *("max_num_scheduled_tokens", "max_num_active_reqs", "prev_step_scheduled_req_ids"),
        *("kv_cache_manager", "kv_cache_config", "scheduler_config", "_inflight_prefills"),
    ],
    f"{_V1}.request:Request": [
        *("num_computed_tokens", "num_in_flight_tokens", "num_output_placeholders"),
        *("is_prefill_chunk", "next_decode_eligible_step", "block_hashes", "sampling_params"),
    ],
    _RUNNER: ["execute_model_state", "discard_request_mask", "input_batch", "requests"],
    _BATCH: ["generators", "num_tokens_no_spec", "num_reqs", "req_ids", "sampling_metadata"],
    f"{_V1}.core.single_type_kv_cache_manager:SingleTypeKVCacheManager": [
        "num_cached_block",
        "req_to_blocks",
    ],
    f"{_V1}.sample.metadata:SamplingMetadata": ["no_penalties", "output_token_ids"],
    f"{_V1}.core.sched.output:SchedulerOutput": [
        *("scheduled_new_reqs", "scheduled_cached_reqs", "num_scheduled_tokens"),
        *("total_num_scheduled_tokens", "finished_req_ids", "free_encoder_mm_hashes"),
        *("new_block_ids_to_zero", "kv_cache_block_copies", "kv_connector_block_state"),
    ],
    f"{_V1}.core.sched.output:CachedRequestData": [
        *("req_ids", "resumed_req_ids", "new_token_ids", "all_token_ids", "new_block_ids"),
        *("num_computed_tokens", "num_output_tokens"),
    ],
    _ASYNC_LLM: ["engine_core", "vllm_config", "errored"],
}
"""Attributes that the class declares or sets."""

SCRIPT = """
import importlib, inspect, json, sys

def found(path):
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)

methods, fields = json.load(sys.stdin)
import vllm
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.engine import EngineCoreRequest
out = {"version": vllm.__version__, "methods": {}, "fields": {}}
for path, names in methods.items():
    there = out["methods"][path] = {}
    for name in names:
        method = getattr(found(path), name, None)
        there[name] = method and list(inspect.signature(method).parameters)[1:]
for path, names in fields.items():
    source = "".join(inspect.getsource(each) for each in found(path).__mro__[:-1]
                     if each.__module__.startswith("vllm"))
    out["fields"][path] = [
        name for name in names
        if f"self.{name}" in source or f" {name}:" in source or f"def {name}(" in source
    ]
request = type("Request", (), {"external_req_id": None, "request_id": "a-b/c"})()
InputProcessor.assign_request_id(request)
out["id"] = request.request_id

from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.engine.output_processor import RequestOutputCollector
from services.agent.backends.vllm.core import prefill_reports
reporter = prefill_reports.PrefillTimeReporter()
reporter.times.begin("r", 1.0)
unread = RequestOutputCollector(RequestOutputKind.DELTA, "r")
for token in (7, 8, 9):
    step = EngineCoreOutput(request_id="r", new_token_ids=[token])
    reporter.annotate([step], 1.25)
    part = CompletionOutput(0, "", [token], None, None)
    unread.put(RequestOutput("r", None, [1], None, [part], False,
                             kv_transfer_params=step.kv_transfer_params))
merged = unread.get_nowait()
out["merged"] = [list(merged.outputs[0].token_ids),
                 prefill_reports.reported_prefill_s(merged.kv_transfer_params)]
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
    assert found["methods"] == METHODS


def test_attributes_of_vllm_that_headway_uses_exist(found: dict[str, Any]) -> None:
    assert found["fields"] == FIELDS


def test_engine_core_ids_are_our_ids_with_a_suffix(found: dict[str, Any]) -> None:
    """`layer_preemption` removes vLLM's suffix from request ids."""
    ours, _, suffix = found["id"].rpartition("-")

    assert (ours, len(suffix)) == ("a-b/c", 8)


def test_unread_outputs_keep_the_prefill_time(found: dict[str, Any]) -> None:
    assert found["merged"] == [[7, 8, 9], 0.25]
