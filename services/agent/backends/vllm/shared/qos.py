"""Encoding of a request's quality of service on its way into the engine core."""

import msgspec

from services.agent.backends.base import EngineRequest
from shared.contracts.base import TenantId, UnixTime
from shared.contracts.qos import Importance, QosClass, Slo

QOS_KEY = "headway"
"""Key of Headway's part of vLLM's `SamplingParams.extra_args`."""
_CLASS_PRIORITY = {
    QosClass.INTERACTIVE: 2,
    QosClass.NON_INTERACTIVE: 1,
    QosClass.BEST_EFFORT: 0,
}
"""Priorities for vLLM's own `priority` policy, if an operator selects that; higher first."""


class RequestQos(msgspec.Struct, frozen=True, kw_only=True):
    """Data that a policy in the engine core needs besides tokens."""

    slo: Slo = Slo()
    arrived_at: UnixTime = 0.0
    importance: Importance = Importance.HIGH
    tenant: TenantId | None = None
    application: str = "*"
    checkpointed: bool = False
    """Used by the KV connector, not by policies."""
    origin: str = ""
    """Request that this run belongs to; used by the KV connector, not by policies."""
    progress_tokens: int = 0
    """Number of tokens at the end of vLLM's prompt that are progress; used by the worker."""


def vllm_priority(request: EngineRequest) -> int:
    """Priority of *request* for vLLM, which serves lower numbers first, Headway higher ones."""
    priority = request.priority
    return -(_CLASS_PRIORITY[request.slo.qos_class] if priority is None else priority)


def qos_of(request: EngineRequest) -> RequestQos:
    """The part of *request* that the engine core reads."""
    return RequestQos(
        slo=request.slo,
        arrived_at=request.arrived_at,
        importance=request.importance,
        tenant=request.tenant,
        application=request.application,
        checkpointed=request.checkpointed,
        origin=request.origin or "",
        progress_tokens=len(request.progress),
    )


def read_qos(extra_args: dict[str, object] | None) -> RequestQos:
    """Quality of service of a request; best effort if it was submitted without."""
    return msgspec.convert((extra_args or {}).get(QOS_KEY, {}), RequestQos)
