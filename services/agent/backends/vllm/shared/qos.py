"""Encoding of a request's quality of service for the engine core."""

from typing import Any

import msgspec

from services.agent.backends.base import EngineRequest
from shared.contracts.base import TenantId, UnixTime
from shared.contracts.qos import Importance, QosClass, Slo

QOS_KEY = "headway"
"""Key of Headway's part of `SamplingParams.extra_args` and of `PoolingParams.extra_kwargs`."""
_CLASS_PRIORITY = {
    QosClass.INTERACTIVE: 2,
    QosClass.NON_INTERACTIVE: 1,
    QosClass.BEST_EFFORT: 0,
}
"""Priorities for vLLM's own `priority` policy, if the operator selects it; higher first."""


class RequestQos(msgspec.Struct, frozen=True, kw_only=True):
    """Data of a request, besides its tokens, that code in the engine core needs."""

    slo: Slo = Slo()
    arrived_at: UnixTime = 0.0
    importance: Importance = Importance.HIGH
    tenant: TenantId | None = None
    application: str = "*"
    checkpointed: bool = False
    """True if the KV connector copies the request's KV; policies do not read it."""
    origin: str = ""
    """Id of the request that this run belongs to; read by the KV connector, not by policies."""
    progress_tokens: int = 0
    """Number of progress tokens, which end the prompt that vLLM receives; read by the worker."""
    expires_at: UnixTime | None = None
    """Time from which no token of the run is computed."""
    first_token_by: UnixTime | None = None
    """Time from which no token of the run is computed if it has none."""


def vllm_priority(request: EngineRequest) -> int:
    """Priority of *request* for vLLM, where lower is first; in Headway higher is first."""
    priority = request.priority
    return -(_CLASS_PRIORITY[request.slo.qos_class] if priority is None else priority)


def qos_of(request: EngineRequest) -> RequestQos:
    """The data of *request* that the engine core reads."""
    return RequestQos(
        slo=request.slo,
        arrived_at=request.arrived_at,
        importance=request.importance,
        tenant=request.tenant,
        application=request.application,
        checkpointed=request.checkpointed,
        origin=request.origin or "",
        progress_tokens=len(request.progress),
        expires_at=request.expires_at,
        first_token_by=request.first_token_by,
    )


def read_qos(extra_args: dict[str, object] | None) -> RequestQos:
    """Quality of service of a vLLM request; best effort if the request carries none."""
    return msgspec.convert((extra_args or {}).get(QOS_KEY, {}), RequestQos)


def qos_in_core(request: Any) -> RequestQos:
    """
    Quality of service of a vLLM request in the engine core, for both sampling and pooling requests.
    """
    if request.sampling_params is not None:
        return read_qos(request.sampling_params.extra_args)
    return read_qos(request.pooling_params.extra_kwargs)
