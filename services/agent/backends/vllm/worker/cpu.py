"""Headway's workers of vLLM on a CPU."""

from vllm.v1.worker.cpu_worker import CPUWorker

from services.agent.backends.vllm.worker.resumable import Resumable
from services.agent.backends.vllm.worker.safepoints import Safepoints


class CpuWorker(Resumable, CPUWorker):  # type: ignore[misc]  # vLLM is untyped to mypy
    """Draws the tokens of a resumed answer as those of an undisturbed one."""


class CpuSafepointWorker(Safepoints, CpuWorker):
    """A worker with safepoints; layers are computed when they are called."""
