"""Prefill times on their way out of the engine core, with the first token of each request."""

from collections.abc import Iterable, Mapping
from typing import Any

from services.agent.backends.prefill_times import PrefillTimes
from shared.contracts.base import Seconds

_KEY = "headway_prefill_s"


def tell_prefills(outputs: Iterable[Any], times: PrefillTimes, now: float) -> None:
    """
    Write the prefill time of each request in *outputs* that has its first token into its output.

    Decided: as a parameter of KV transfer, which vLLM hands through as it is; its own statistics
    of requests would cost all requests something, and know preempted time only when they end.
    """
    for output in outputs:
        if output.new_token_ids and (prefill_s := times.end(output.request_id, now)) is not None:
            output.kv_transfer_params = {**(output.kv_transfer_params or {}), _KEY: prefill_s}


def told_prefill_s(kv_transfer_params: Mapping[str, Any] | None) -> Seconds:
    """What `tell_prefills` wrote; 0 when it wrote nothing."""
    return float((kv_transfer_params or {}).get(_KEY, 0.0))
