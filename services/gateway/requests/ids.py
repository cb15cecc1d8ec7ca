"""Ids of calls, which a client may repeat."""

import hashlib
from uuid import uuid4

from shared.contracts.base import RequestId, TenantId

_DIGITS = 40


def call_id_of(tenant: TenantId, key: str | None) -> RequestId:
    """
    Id of a call: made from the tenant's `Idempotency-Key`, so that all gateways agree on it, else
    random.
    """
    if key is None:
        return RequestId(f"req-{uuid4().hex}")
    digest = hashlib.sha256(f"{tenant}\0{key}".encode()).hexdigest()
    return RequestId(f"idem-{digest[:_DIGITS]}")
