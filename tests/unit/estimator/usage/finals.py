"""Finals of requests as the queue of usage has them."""

from typing import Any

from shared.contracts.base import InstanceId, ModelName, RequestId, TenantId
from shared.contracts.qos import QosClass
from shared.contracts.tenants.usage import HOUR_S, RequestMetered

ACME = TenantId("acme")


def final(name: str, **fields: Any) -> RequestMetered:
    """The final of a completed request of `ACME`, with other values for *fields*."""
    values: dict[str, Any] = {
        "tenant": ACME,
        "model": ModelName("m"),
        "qos_class": QosClass.INTERACTIVE,
        "outcome": "completed",
        "prompt_tokens": 10,
        "completion_tokens": 5,
        "cached_tokens": 4,
        "finished_at": 2.5 * HOUR_S,
        "instance_id": InstanceId("a1"),
    }
    return RequestMetered(request_id=RequestId(name), **(values | fields))
