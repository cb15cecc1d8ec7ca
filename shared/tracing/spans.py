"""Interface between services and tracing. Without tracing there is no `Tracer`, and no span."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from shared.contracts.base import UnixTime
from shared.contracts.requests import QueuedRequest
from shared.tracing.attributes import Attributes
from shared.tracing.context import TraceContext, context_of


class Kind(Enum):
    """Role of a span's process."""

    SERVER = "server"
    CONSUMER = "consumer"
    INTERNAL = "internal"


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened during a span."""

    name: str
    at: UnixTime
    attributes: Attributes = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedSpan:
    """A span that has ended."""

    name: str
    """Few different ones."""
    kind: Kind
    """Role of this process."""
    began_at: UnixTime
    ended_at: UnixTime
    """Not before `began_at`."""
    attributes: Attributes
    events: Sequence[Event] = ()
    """In order."""
    error: str | None = None
    """Type of the error if the span failed."""


class Span(Protocol):
    """A span in progress."""

    @property
    def context(self) -> TraceContext:
        """Context to send with what the span causes."""
        ...

    def add(self, attributes: Attributes) -> None:
        """Set attributes."""
        ...

    def fail(self, code: str) -> None:
        """Mark the span as failed; *code* is the type of the error."""
        ...


class Tracer(Protocol):
    """Makes the spans of one service."""

    def span(
        self, name: str, headers: Mapping[str, object], kind: Kind
    ) -> AbstractContextManager[Span]:
        """
        Context of a new span, which is `current_span()` inside.

        Args:
            name: Name of the span; few different ones.
            headers: Headers with the context of the parent. Without one, the span begins a trace,
                and the sampler decides whether the trace is exported.
            kind: Role of this process.
        """
        ...

    def record(self, span: EndedSpan, parent: TraceContext) -> None:
        """Export *span*, whose *parent* is sampled."""
        ...


current: ContextVar[Span] = ContextVar("span")
"""The span of the code that runs; only tracers set it."""


def current_span() -> Span | None:
    """The exported span of the code that runs; None if there is none."""
    return current.get(None)


def sampled_trace(request: QueuedRequest) -> TraceContext | None:
    """Trace context of a request whose spans are to be exported; None if they are not."""
    trace = context_of(request)
    return trace if trace is not None and trace.is_sampled else None
