"""One example of every message of `shared.contracts.stored`."""

from msgspec import Raw

from shared.contracts.base import InstanceId, Message, RequestId, TenantId
from shared.contracts.stored import (
    RequestAsked,
    RequestState,
    RequestStatus,
    RunsStarted,
    StoredStart,
)

EXAMPLES: tuple[Message, ...] = (
    RequestAsked(request_id=RequestId("r1"), reply_to="reply.p1", tenant=TenantId("acme")),
    RequestStatus(
        request_id=RequestId("r1"),
        state=RequestState.FAILED,
        model="tiny",
        endpoint="/v1/completions",
        created_at=1000.5,
        grouped_at=1001.5,
        lane="lane.2.tiny.high.3.2",
        expected_at=1002.5,
        started_at=1003.5,
        instance_id=InstanceId("i1"),
        runs=2,
        ended_at=1004.5,
        expires_at=87404.5,
        final=Raw(
            b'{"kind":"request.failed.v1","request_id":"r1",'
            b'"error":{"message":"no","code":"poison_request","status":500},"at":1004.5}'
        ),
    ),
    RunsStarted(
        instance_id=InstanceId("i1"),
        starts=(
            StoredStart(tenant=TenantId("acme"), request_id=RequestId("r1"), at=1000.5),
            StoredStart(tenant=TenantId("other"), request_id=RequestId("r1"), at=1001.5),
        ),
    ),
)
