"""vLLM engines inside the host process; their cores are forked where this is safe."""

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import structlog
import vllm
from vllm.config import KVTransferConfig, StructuredOutputsConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform
from vllm.transformers_utils.config import maybe_register_config_serialize_by_value
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.core_client import EngineCoreClient
from vllm.v1.executor.abstract import Executor

from services.agent.backends.vllm.front.arguments import without_safepoints
from services.agent.backends.vllm.host.adapters import Adapters
from services.agent.backends.vllm.host.core_engine import CoreEngine
from services.agent.backends.vllm.host.core_requests import CoreRequests
from services.agent.backends.vllm.host.processes.engine_processes import forked_cleanly
from services.agent.backends.vllm.host.processes.process_trees import children_of
from services.agent.backends.vllm.shared.core_settings import (
    CONFIG_KEY,
    Uncompiled,
    core_settings,
    refusal_reason,
)
from services.agent.backends.vllm.shared.safepoint_support import safepoint_refusal
from services.agent.backends.vllm.shared.schedulers import fit_scheduler
from services.agent.backends.vllm.shared.wire import EngineChoices, HostReady
from services.agent.backends.vllm.shared.workers import SAFEPOINT_WORKERS

log = structlog.get_logger()


def describe() -> HostReady:
    """Version of the installed vLLM, and the device that it uses."""
    is_cpu = bool(current_platform.is_cpu())
    device = "cpu" if is_cpu else str(current_platform.get_device_name())
    return HostReady(version=str(vllm.__version__), device=device, is_cpu=is_cpu)


def make_engine(engine_args: dict[str, Any]) -> CoreEngine:
    """
    Start an engine and load its model. Blocks for seconds.

    Raises:
        Exception: Any error of vLLM, e.g. for unsupported arguments or models.
    """
    config = engine_config(engine_args)
    if config.parallel_config.worker_cls in SAFEPOINT_WORKERS.values():
        # Check here, because a core that refuses to start cannot report its reason to the front.
        refusal = safepoint_refusal(config)
        if refusal is not None and core_settings(config.additional_config).safepoints_required:
            raise ValueError(refusal)
        if refusal is not None:
            log.warning("engine.without_safepoints", reason=refusal)
            return make_engine(without_safepoints(engine_args))
    requests = CoreRequests(config)
    # Configurations of models with their own code cannot be sent to another process otherwise.
    maybe_register_config_serialize_by_value()
    try:
        with forked_cleanly() if current_platform.is_cpu() else _spawned():
            client = EngineCoreClient.make_async_mp_client(
                config, Executor.get_class(config), log_stats=False
            )
    except RuntimeError as error:
        reason = refusal_reason(config.additional_config)
        if reason is None:
            raise
        raise ValueError(reason) from error
    slots = config.lora_config.max_loras - 1 if config.lora_config else 0
    engine = CoreEngine(client, requests, Adapters(client, slots), _choices_of(config))
    engine.workers = children_of(engine)
    return engine


def engine_config(engine_args: dict[str, Any]) -> Any:
    """
    The `VllmConfig` of an engine.

    Raises:
        Exception: Any error of vLLM, e.g. for unsupported arguments or models.
    """
    arguments = AsyncEngineArgs(**(engine_args | _nested(engine_args)))
    # The defaults of vLLM's limits depend on the usage: these are the ones of its own server.
    config = arguments.create_engine_config(UsageContext.OPENAI_API_SERVER)
    if engine_args.get("async_scheduling") and current_platform.is_cpu():
        # vLLM turns it off on a CPU, where it gains nothing, but works as on a GPU.
        config.scheduler_config.async_scheduling = True
    fit_scheduler(config)
    if set(config.additional_config) == {CONFIG_KEY}:  # an operator's or vLLM's own keys may matter
        config.additional_config = Uncompiled(config.additional_config)
    return config


def _choices_of(config: Any) -> EngineChoices:
    """The choices in a `VllmConfig` whose engine has started, since vLLM may still change it."""
    scheduler, cache, model = config.scheduler_config, config.cache_config, config.model_config
    has_safepoints = config.parallel_config.worker_cls in SAFEPOINT_WORKERS.values()
    graphs = config.compilation_config.cudagraph_mode
    return EngineChoices(
        eager=model.enforce_eager,
        graphs="NONE" if graphs is None else graphs.name,
        async_scheduling=bool(scheduler.async_scheduling),
        model_runner="V2" if config.use_v2_model_runner else "V1",
        scheduler=str(scheduler.scheduler_cls).rpartition(".")[2],
        safepoint_layers=(
            core_settings(config.additional_config).safepoint_layers if has_safepoints else 0
        ),
        max_running=scheduler.max_num_seqs,
        token_budget=scheduler.max_num_batched_tokens,
        block_tokens=cache.block_size,
        kv_cache_bytes=cache.kv_cache_memory_bytes,
        gpu_memory_utilization=cache.gpu_memory_utilization,
        dtype=str(model.dtype).removeprefix("torch."),
        num_devices=config.parallel_config.world_size_across_dp,
    )


def _nested(engine_args: dict[str, Any]) -> dict[str, Any]:
    """The arguments that vLLM expects as objects."""
    types = {
        "kv_transfer_config": KVTransferConfig,
        "structured_outputs_config": StructuredOutputsConfig,
    }
    given = {name: engine_args[name] for name in types if isinstance(engine_args.get(name), dict)}
    return {name: types[name](**values) for name, values in given.items()}


@contextlib.contextmanager
def _spawned() -> Iterator[None]:
    """Context in which engine cores are spawned, which CUDA requires."""
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    yield
