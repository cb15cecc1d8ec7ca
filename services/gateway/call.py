"""One HTTP request, as it passes through the gateway to the mesh and back."""

from dataclasses import dataclass, field

from shared.contracts.base import TenantId, UnixTime
from shared.contracts.ends import Ends
from shared.contracts.qos import Clamp, Importance, Slo
from shared.contracts.requests import ErrorInfo, RequestCompleted
from shared.tracing.context import TraceContext


@dataclass(slots=True, kw_only=True)
class Call:
    """One HTTP request for a model: what the mesh gets beside the body, and the mesh's result."""

    call_id: str
    """Id of the request in the mesh."""
    model: str
    """Model name that the client sent; of a split, the name of the target or fallback."""
    tenant: TenantId
    arrived_at: UnixTime
    slo: Slo
    importance: Importance
    stream: bool
    ends: Ends = field(default_factory=Ends)
    priority: int = 0
    """Priority of the request; higher values are served first."""
    clamped: tuple[Clamp, ...] = ()
    """What the call asks for and its tenant's policy does not grant."""
    application: str | None = None
    session: str | None = None
    trace: TraceContext | None = None
    digest: str | None = None
    """Digest of the HTTP request, if it may be repeated under its id; None: it may not."""
    final: RequestCompleted | None = None
    failure: ErrorInfo | None = None
    """Error of the mesh, which replaces the answer."""
