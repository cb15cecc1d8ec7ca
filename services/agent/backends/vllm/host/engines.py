"""vLLM engines inside the host process; their cores are forked where this is safe."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import structlog
import vllm
from vllm.config import KVTransferConfig, StructuredOutputsConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform
from vllm.transformers_utils.config import maybe_register_config_serialize_by_value
from vllm.v1.engine.core_client import EngineCoreClient
from vllm.v1.executor.abstract import Executor

from services.agent.backends.vllm.front.arguments import without_safepoints
from services.agent.backends.vllm.host.core_engine import CoreEngine
from services.agent.backends.vllm.host.core_requests import CoreRequests
from services.agent.backends.vllm.host.engine_processes import forked_cleanly
from services.agent.backends.vllm.shared.core_settings import core_settings, refusal_reason
from services.agent.backends.vllm.shared.safepoint_support import safepoint_refusal
from services.agent.backends.vllm.shared.wire import HostReady
from services.agent.backends.vllm.shared.workers import SAFEPOINT_WORKERS

log = structlog.get_logger()

_END_TIMEOUT_S = 10.0
"""Time limit for killed processes to end, while the kernel frees their memory."""


def describe() -> HostReady:
    """Version of the installed vLLM, and the device that it uses."""
    is_cpu = bool(current_platform.is_cpu())
    device = "cpu" if is_cpu else str(current_platform.get_device_name())
    return HostReady(version=str(vllm.__version__), device=device, is_cpu=is_cpu)


def engine_bytes(engine: CoreEngine) -> int:
    """
    Proportional set size of *engine*'s processes.

    Returns:
        Bytes; 0 where the system does not report it.
    """
    return sum(_proportional_bytes(process.pid or 0) for process in engine.processes)


def end_engine(engine: CoreEngine) -> None:
    """
    Kill *engine*'s processes and wait until their memory is free.

    The processes need no cleanup, and a normal shutdown takes a second for each.
    """
    processes = engine.processes
    engine.shutdown()
    for process in processes:
        process.join(_END_TIMEOUT_S)


def _proportional_bytes(pid: int) -> int:
    try:
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0
    lines = (line.split() for line in rollup.splitlines())
    return next((1024 * int(words[1]) for words in lines if words[0] == "Pss:"), 0)


def make_engine(engine_args: dict[str, Any]) -> CoreEngine:
    """
    Start an engine and load its model. Blocks for seconds.

    Raises:
        Exception: Any error of vLLM, e.g. for unsupported arguments or models.
    """
    config = AsyncEngineArgs(**(engine_args | _nested(engine_args))).create_engine_config()
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
    return CoreEngine(client, requests)


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
