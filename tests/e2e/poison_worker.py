"""A vLLM worker that dies of one token, as real workers may die of a kernel's bug."""

import os
from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker

POISON_TOKEN = 333


class PoisonWorker(CPUWorker):
    """Ends its process when a new prompt contains the poison token."""

    def execute_model(self, scheduler_output: Any) -> Any:
        for request in scheduler_output.scheduled_new_reqs:
            if POISON_TOKEN in (request.prompt_token_ids or ()):
                os._exit(13)
        return super().execute_model(scheduler_output)
