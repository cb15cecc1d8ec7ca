"""vLLM engines inside the host process: made by fork where that is safe."""

import importlib
import os
from typing import Any

import vllm
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.model_executor.models.registry import ModelRegistry
from vllm.platforms import current_platform
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.executor.abstract import Executor

from services.agent.backends.vllm.wire import HostReady

_CPU_MODULES = (
    "vllm.model_executor.model_loader.default_loader",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.v1.core.sched.scheduler",
    "vllm.v1.engine.core",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.cpu_worker",
    "services.agent.backends.vllm.policy_scheduler",
    "services.agent.backends.vllm.scheduler",
)
"""What an engine core imports before it serves; a forked one finds it done."""


def describe() -> HostReady:
    """The vLLM that is installed, and its device."""
    is_cpu = bool(current_platform.is_cpu())
    device = "cpu" if is_cpu else str(current_platform.get_device_name())
    return HostReady(version=str(vllm.__version__), device=device, is_cpu=is_cpu)


def import_early(architectures: list[str]) -> None:
    """
    Import on a CPU what engine cores need, so that forking one is all there is to do.

    Not on a GPU: there cores are spawned, and importing models here could touch the device.
    """
    if not current_platform.is_cpu():
        return
    for name in _CPU_MODULES:
        importlib.import_module(name)
    for architecture in architectures:
        lazy = ModelRegistry.models.get(architecture)
        if lazy is not None:
            # Registered as a class it is not inspected in a process of its own, which would
            # import all of vLLM once more.
            ModelRegistry.register_model(architecture, lazy.load_model_cls())


def make_engine(engine_args: dict[str, Any]) -> AsyncLLM:
    """
    A running engine with its model loaded. Blocks for seconds; call it in the running loop.

    Raises:
        Exception: Whatever vLLM raises for arguments or models that it does not take.
    """
    config = AsyncEngineArgs(**engine_args).create_engine_config()
    # Making the configuration sets "spawn" on a CPU. Fork is safe here as long as this
    # process has not computed anything with torch; with CUDA it never is.
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork" if current_platform.is_cpu() else "spawn"
    return AsyncLLM(
        vllm_config=config,
        executor_class=Executor.get_class(config),
        log_stats=False,
        log_requests=False,
    )
