"""What a request over HTTP asks for, before the policy of its tenant applies."""

from services.gateway.headers import Hints
from services.gateway.slo import Targeted, sets_slo
from shared.contracts.base import UnixTime
from shared.contracts.checks import IngressLimits, effective_importance, effective_slo
from shared.contracts.ingress import InferenceRequest
from solver.tenants.claims import Claim


def claim_of(
    request: InferenceRequest,
    body: Targeted,
    hints: Hints,
    *,
    limits: IngressLimits,
    arrived_at: UnixTime,
) -> Claim:
    """
    The targets, the importance and the priority that a request asks for.

    Args:
        request: What body and headers ask for together.
        body: The body that the client sent.
        hints: Its headers.
        limits: Smallest targets.
        arrived_at: Time of its arrival.

    Raises:
        ContractError: A target or the service tier is invalid.
    """
    return Claim(
        slo=effective_slo(request, now=arrived_at, limits=limits),
        importance=effective_importance(request),
        priority=request.priority,
        arrived_at=arrived_at,
        sets_slo=sets_slo(body, hints),
        sets_importance=request.importance is not None or request.service_tier == "priority",
    )
