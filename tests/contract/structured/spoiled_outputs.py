"""A scheduler for vLLM's engine core whose outputs are invalid for some requests; imports vLLM."""

from typing import Any

from services.agent.backends.vllm.core.scheduler import TimedScheduler
from tests.contract.structured.structured_engines import SPOILED


class SpoilingScheduler(TimedScheduler):
    """Sends outputs with an invalid prefill time for requests named `SPOILED`."""

    def update_from_output(self, *args: Any, **kwargs: Any) -> Any:
        result = super().update_from_output(*args, **kwargs)
        for each in result.values():
            for output in each.outputs:
                if output.request_id.startswith(SPOILED):
                    output.kv_transfer_params = {"headway_prefill_s": "soon"}
        return result
