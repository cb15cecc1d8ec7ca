"""Headway's workers of vLLM on a CPU."""

from vllm.v1.worker.cpu_worker import CPUWorker

from services.agent.backends.vllm.worker.resumable import Resumable
from services.agent.backends.vllm.worker.safepoints import Safepoints


class CpuWorker(Resumable, CPUWorker):  # type: ignore[misc]  # vLLM is untyped to mypy
    """Worker whose random draws are the same for a resumed answer as for an uninterrupted one."""


class CpuSafepointWorker(Safepoints, CpuWorker):
    """Worker with safepoints; the CPU computes each layer when the layer is called."""
