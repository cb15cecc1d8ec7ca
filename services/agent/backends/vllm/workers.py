"""Which worker an engine has, and what follows from that; without vLLM itself."""

from typing import Any

_PACKAGE = "services.agent.backends.vllm"
CPU_WORKER = f"{_PACKAGE}.cpu_workers.CpuWorker"
SAFEPOINT_WORKERS = {
    True: f"{_PACKAGE}.cpu_workers.CpuSafepointWorker",
    False: f"{_PACKAGE}.gpu_safepoint_worker.GpuSafepointWorker",
}
"""Worker classes: on a CPU, on a GPU."""
WITHOUT_SAFEPOINTS = {SAFEPOINT_WORKERS[True]: CPU_WORKER, SAFEPOINT_WORKERS[False]: "auto"}
"""The same without; on a GPU vLLM's own."""


def draws_by_position(config: Any) -> bool:
    """
    Whether an engine of this `VllmConfig` draws each token by seed and place in its sequence.

    vLLM's model runner V2 does, and so do our workers with V1. V1 alone begins one generator with
    each run and draws all its tokens from that.
    """
    worker = config.parallel_config.worker_cls
    return bool(config.use_v2_model_runner) or worker in {CPU_WORKER, *SAFEPOINT_WORKERS.values()}
