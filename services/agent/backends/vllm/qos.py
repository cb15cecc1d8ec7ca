"""What a request's quality of service looks like on its way into the engine core."""

import msgspec

from services.agent.backends.base import EngineRequest
from services.agent.backends.vllm.wire import Submit
from shared.contracts.base import TenantId, UnixTime
from shared.contracts.qos import Importance, QosClass, Slo
from shared.contracts.requests import Tokens

QOS_KEY = "headway"
"""Our part of vLLM's `SamplingParams.extra_args`."""
_CLASS_PRIORITY = {
    QosClass.INTERACTIVE: 0,
    QosClass.NON_INTERACTIVE: 1,
    QosClass.BEST_EFFORT: 2,
}
"""For vLLM's own `priority` policy, where an operator wants that one."""


class RequestQos(msgspec.Struct, frozen=True, kw_only=True):
    """What a policy in the engine core needs beyond tokens."""

    slo: Slo = Slo()
    arrived_at: UnixTime = 0.0
    importance: Importance = Importance.HIGH
    tenant: TenantId | None = None
    application: str = "*"
    checkpointed: bool = False
    """Not a policy's matter, but the KV connector's."""
    origin: str = ""
    """Likewise: the request of which this is a run."""
    progress_tokens: int = 0
    """At the end of what vLLM has as the prompt; the worker's matter."""


def submission(request: EngineRequest, stop_token_ids: Tokens) -> Submit:
    """What the host is told of *request*."""
    return Submit(
        request.model,
        request.request_id,
        request.prompt,
        request.progress,
        stop_token_ids,
        request.sampling,
        request.slo,
        request.arrived_at,
        request.importance,
        request.tenant,
        request.application,
        _CLASS_PRIORITY[request.slo.qos_class] if request.priority is None else request.priority,
        request.checkpointed,
        request.origin or "",
    )


def qos_of(command: Submit) -> RequestQos:
    """The part of a submission that policies look at."""
    return RequestQos(
        slo=command.slo,
        arrived_at=command.arrived_at,
        importance=command.importance,
        tenant=command.tenant,
        application=command.application,
        checkpointed=command.checkpointed,
        origin=command.origin,
        progress_tokens=len(command.progress),
    )


def read_qos(extra_args: dict[str, object] | None) -> RequestQos:
    """The request's quality of service; best effort if it was submitted without."""
    return msgspec.convert((extra_args or {}).get(QOS_KEY, {}), RequestQos)
