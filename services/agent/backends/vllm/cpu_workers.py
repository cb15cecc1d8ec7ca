"""Our workers of vLLM on a CPU."""

from vllm.v1.worker.cpu_worker import CPUWorker

from services.agent.backends.vllm.resumable_worker import Resumable
from services.agent.backends.vllm.safepoint_worker import Safepoints


class CpuWorker(Resumable, CPUWorker):  # type: ignore[misc]  # vLLM is untyped to mypy
    """Draws a resumed answer as it would have been drawn."""


class CpuSafepointWorker(Safepoints, CpuWorker):
    """With safepoints; layers are computed when they are called."""
