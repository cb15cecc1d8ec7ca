"""Worker classes of engines, and their properties; imports no vLLM."""

from typing import Any

CPU_WORKER = "services.agent.backends.vllm.worker.cpu.CpuWorker"
SAFEPOINT_WORKERS = {
    True: "services.agent.backends.vllm.worker.cpu.CpuSafepointWorker",
    False: "services.agent.backends.vllm.worker.gpu.GpuSafepointWorker",
}
"""True if vLLM runs on a CPU -> class of the worker with safepoints."""
WITHOUT_SAFEPOINTS = {SAFEPOINT_WORKERS[True]: CPU_WORKER, SAFEPOINT_WORKERS[False]: "auto"}
"""Worker with safepoints -> worker without them; on a GPU this is vLLM's own worker."""


def draws_by_position(config: Any) -> bool:
    """
    Return whether an engine of this `VllmConfig` draws each token by seed and position.

    vLLM's model runner V2 draws by seed and position. So does runner V1 with Headway's workers.
    Runner V1 with vLLM's own workers draws all tokens of a run from one generator.
    """
    worker = config.parallel_config.worker_cls
    return bool(config.use_v2_model_runner) or worker in {CPU_WORKER, *SAFEPOINT_WORKERS.values()}
