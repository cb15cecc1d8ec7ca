"""Statuses and first tokens that routing groupers receive."""

from typing import Any

from shared.contracts.base import InstanceId, RequestId, TenantId
from shared.contracts.requests import QueuedRequest
from shared.contracts.routing import Prefill, PrefillsObserved
from shared.contracts.telemetry import InstanceStatus
from tests.clocks import NOW
from tests.queued import MODEL

ONE, TWO = InstanceId("gpu-1"), InstanceId("gpu-2")


def status(instance_id: InstanceId = ONE, **fields: Any) -> InstanceStatus:
    values: dict[str, Any] = {
        "instance_id": instance_id,
        "incarnation": "first",
        "seq": 1,
        "at": NOW,
        "engine": "e",
        "device": "d",
        "model": MODEL,
        "kv_capacity_tokens": 10_000,
    }
    return InstanceStatus(**(values | fields))


def prefill_of(request: QueuedRequest, prefill_s: float = 0.1, cached: int = 0) -> Prefill:
    return Prefill(
        request_id=request.request_id,
        tenant=request.tenant,
        prompt_tokens=request.prompt_tokens,
        cached_tokens=cached,
        prefill_s=prefill_s,
        at=NOW,
        prefix=request.prefix,
    )


def observed(*prefills: Prefill, instance_id: InstanceId = ONE) -> PrefillsObserved:
    return PrefillsObserved(
        instance_id=instance_id, incarnation="first", model=MODEL, at=NOW, prefills=prefills
    )


def a_prefill(number: int) -> Prefill:
    """First token of a request that another grouper routed."""
    return Prefill(
        request_id=RequestId(f"other-{number}"),
        tenant=TenantId("acme"),
        prompt_tokens=100,
        cached_tokens=0,
        prefill_s=0.1,
        at=NOW,
    )
