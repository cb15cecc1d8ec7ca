"""A worker with safepoints on a GPU; not tested on a GPU yet."""

from typing import Any

import torch
from vllm.v1.worker.gpu_worker import Worker

from services.agent.backends.vllm.worker.resumable import Resumable
from services.agent.backends.vllm.worker.safepoints import Safepoints


class GpuSafepointWorker(Safepoints, Resumable, Worker):  # type: ignore[misc]  # vLLM is untyped
    """
    Worker that launches layers at most one safepoint ahead of their computation.

    This limit slows down only iterations with best-effort work.
    """

    _launched: Any = None

    def catch_up(self) -> None:
        before, self._launched = self._launched, torch.cuda.Event()
        self._launched.record()
        if before is not None:
            before.synchronize()
