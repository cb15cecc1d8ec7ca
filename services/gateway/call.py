"""One HTTP request, as it passes through vLLM's application to the mesh and back."""

import asyncio
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field

from shared.contracts.base import RequestId, TenantId, UnixTime
from shared.contracts.ends import Ends
from shared.contracts.qos import Clamp, Importance, Slo
from shared.contracts.requests import ErrorInfo, RequestCompleted
from shared.producer.generation import Generation
from shared.tracing.context import TraceContext


@dataclass(slots=True, kw_only=True)
class Call:
    """
    One HTTP request to vLLM's application: the fields that the application does not pass on, and
    the results from the mesh.

    One call makes several requests of the mesh if it has several prompts or asks for several
    answers.
    """

    call_id: str
    """Id of the call; the ids of the call's requests begin with this id."""
    model: str
    """Model name that the client sent; of a split, the name of the target or fallback."""
    tenant: TenantId
    arrived_at: UnixTime
    slo: Slo
    importance: Importance
    stream: bool
    ends: Ends = field(default_factory=Ends)
    priority: int = 0
    """Priority of the call's requests; higher values are served first."""
    clamped: tuple[Clamp, ...] = ()
    """What the call asks for and its tenant's policy does not grant."""
    application: str | None = None
    session: str | None = None
    trace: TraceContext | None = None
    digest: str | None = None
    """Digest of the HTTP request, if it may be repeated under its id; None: it may not."""
    generations: list[Generation] = field(default_factory=list)
    """Requests of the call in the mesh, also those that have ended."""
    finals: list[RequestCompleted] = field(default_factory=list)
    failure: ErrorInfo | None = None
    """Error of the first request that failed in the mesh."""
    stopping: set[asyncio.Task[None]] = field(default_factory=set)
    """Tasks that wait for the finals of requests that vLLM has ended, e.g. at a stop string."""
    rendered: Callable[[], None] = lambda: None
    """Called when vLLM has rendered the prompt, at the first request of the call."""
    _requests: int = 0

    def new_request_id(self) -> RequestId:
        """Id for the next request of this call."""
        self._requests += 1
        number = self._requests
        return RequestId(self.call_id if number == 1 else f"{self.call_id}-{number}")

    async def end(self) -> None:
        """
        Cancel the requests that have not ended, since the call has: its client has left, its time
        limit has passed, or another of its requests has failed.

        VLLM ends its requests only when Python collects the generators of a stream that was left,
        which can take as long as the answer.
        """
        await asyncio.gather(*(generation.cancel() for generation in self.generations))


current: ContextVar[Call] = ContextVar("call")
"""The call in whose context vLLM's application runs."""
