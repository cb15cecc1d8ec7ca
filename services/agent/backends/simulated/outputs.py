"""What an iteration gave, on its way to whoever reads it."""

from collections.abc import Iterable, Mapping

from services.agent.backends.prefill_times import PrefillTimes
from services.agent.backends.simulated.schedule import TokenOutput
from services.agent.backends.stream import OutputStream
from shared.contracts.base import RequestId, UnixTime


def deliver(
    outputs: Iterable[TokenOutput],
    streams: Mapping[RequestId, OutputStream],
    prefill_times: PrefillTimes,
    now: UnixTime,
) -> None:
    """Push tokens to those that still wait for them; a first one ends its prefill *now*."""
    for output in outputs:
        prefill_s = prefill_times.end(output.request_id, now) or 0.0
        stream = streams.get(output.request_id)
        if stream is not None:
            stream.push(
                (output.token_id,),
                output.finish_reason,
                cached_tokens=output.cached_tokens,
                prefill_s=prefill_s,
            )
