"""Worker class of an engine, and its properties; does not import vLLM."""

from typing import Any

CPU_WORKER = "services.agent.backends.vllm.worker.cpu.CpuWorker"
SAFEPOINT_WORKERS = {
    True: "services.agent.backends.vllm.worker.cpu.CpuSafepointWorker",
    False: "services.agent.backends.vllm.worker.gpu.GpuSafepointWorker",
}
"""Whether vLLM runs on a CPU -> class of the worker with safepoints."""
WITHOUT_SAFEPOINTS = {SAFEPOINT_WORKERS[True]: CPU_WORKER, SAFEPOINT_WORKERS[False]: "auto"}
"""Worker with safepoints -> worker without safepoints; on a GPU that is vLLM's own."""


def draws_by_position(config: Any) -> bool:
    """
    Return whether an engine of this `VllmConfig` draws each token by seed and position.

    vLLM's model runner V2 does, and so do Headway's workers with V1. V1 with vLLM's own workers
    seeds one generator per run and draws all tokens of the run from it.
    """
    worker = config.parallel_config.worker_cls
    return bool(config.use_v2_model_runner) or worker in {CPU_WORKER, *SAFEPOINT_WORKERS.values()}
