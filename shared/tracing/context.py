"""W3C's trace context: how it travels, and that of a request."""

import re
from collections.abc import Mapping

from shared.contracts.base import Value
from shared.contracts.requests import QueuedRequest

TRACEPARENT, TRACESTATE = "traceparent", "tracestate"
"""Headers of W3C's trace context, over HTTP and AMQP."""
_MAX_TRACEPARENT_CHARS, _MAX_TRACESTATE_CHARS = 128, 512
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
_SAMPLED = 1


class TraceContext(Value, frozen=True, kw_only=True, omit_defaults=True):
    """W3C's trace context of a request: its trace, and the span that is the parent of others."""

    traceparent: str
    tracestate: str | None = None

    @property
    def is_sampled(self) -> bool:
        """True if the context is valid and the spans of its trace are to be exported."""
        is_valid = _TRACEPARENT.match(self.traceparent) is not None
        return is_valid and bool(self.flags & _SAMPLED)

    @property
    def trace_id(self) -> str:
        """Id of the trace, 32 hexadecimal digits; the context must be valid."""
        return self.traceparent[3:35]

    @property
    def span_id(self) -> str:
        """Id of the parent of further spans, 16 hexadecimal digits; the context must be valid."""
        return self.traceparent[36:52]

    @property
    def flags(self) -> int:
        """W3C's trace flags; the context must be valid."""
        return int(self.traceparent[53:55], 16)

    @property
    def headers(self) -> dict[str, str]:
        """The headers that carry the context."""
        state = {} if self.tracestate is None else {TRACESTATE: self.tracestate}
        return {TRACEPARENT: self.traceparent} | state


def trace_of(headers: Mapping[str, object]) -> TraceContext | None:
    """The context in *headers*, with names in lower case; None if they have no valid one."""
    parent, state = headers.get(TRACEPARENT), headers.get(TRACESTATE)
    if not isinstance(parent, str) or len(parent) > _MAX_TRACEPARENT_CHARS:
        return None
    if _TRACEPARENT.match(parent) is None:
        return None
    is_kept = isinstance(state, str) and 0 < len(state) <= _MAX_TRACESTATE_CHARS
    return TraceContext(traceparent=parent, tracestate=str(state) if is_kept else None)


def context_of(request: QueuedRequest) -> TraceContext | None:
    """Trace context of a request; None if it is not traced."""
    if request.traceparent is None:
        return None
    return TraceContext(traceparent=request.traceparent, tracestate=request.tracestate)
