"""A worker with safepoints on a GPU. Not yet run on one."""

from typing import Any

import torch
from vllm.v1.worker.gpu_worker import Worker

from services.agent.backends.vllm.resumable_worker import Resumable
from services.agent.backends.vllm.safepoint_worker import Safepoints


class GpuSafepointWorker(Safepoints, Resumable, Worker):  # type: ignore[misc]  # vLLM is untyped
    """
    Layers are launched ahead of their computation, here by one safepoint at most.

    Only iterations with best-effort work pay for that.
    """

    _launched: Any = None

    def catch_up(self) -> None:
        before, self._launched = self._launched, torch.cuda.Event()
        self._launched.record()
        if before is not None:
            before.synchronize()
