"""Headers about the tenant's policy, which every answer to an accepted request has."""

from services.gateway.state import Gateway
from shared.contracts.base import TenantId
from shared.contracts.qos import Clamp

CLAMPED = "x-headway-clamped"


def answer_headers(
    gateway: Gateway, tenant: TenantId, clamped: tuple[Clamp, ...]
) -> dict[str, str]:
    """The limits of *tenant*, and what its policy did not grant."""
    headers = gateway.limits.headers(tenant, gateway.tenants.policy(tenant))
    if clamped:
        headers[CLAMPED] = ", ".join(str(each) for each in clamped)
    return headers
