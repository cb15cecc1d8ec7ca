"""Sends prefill times out of the engine core with the first tokens of each request."""

from collections.abc import Iterable, Mapping
from typing import Any

from services.agent.backends.prefill_times import PrefillTimes
from shared.contracts.base import Seconds

_KEY = "headway_prefill_s"


class PrefillTimeReporter:
    """
    Writes the prefill time of each request into the output with its first tokens.

    Decided: the time is sent as a parameter of KV transfer, which vLLM passes through unchanged.
    vLLM's own request statistics would slow down all requests, and include preempted time only at
    the end of a request.
    """

    def __init__(self) -> None:
        self.times = PrefillTimes()

    def annotate(self, outputs: Iterable[Any], now: float) -> None:
        """Write prefill times into an iteration's *outputs*."""
        for output in outputs:
            is_first = output.new_token_ids or output.pooling_output is not None
            prefill_s = self.times.end(output.request_id, now) if is_first else None
            if prefill_s is not None:
                output.kv_transfer_params = (output.kv_transfer_params or {}) | {_KEY: prefill_s}
            if output.finish_reason is not None:
                self.times.forget(output.request_id)


def reported_prefill_s(kv_transfer_params: Mapping[str, Any] | None) -> Seconds:
    """Prefill time that a `PrefillTimeReporter` wrote; 0 if the parameters contain none."""
    return float((kv_transfer_params or {}).get(_KEY, 0.0))
