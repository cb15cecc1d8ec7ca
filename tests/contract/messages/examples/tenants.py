"""Examples of messages about tenants."""

from shared.contracts.base import Message
from shared.contracts.qos import QosClass
from shared.contracts.tenants.policies import (
    LimitKind,
    MeterDemand,
    MeterGrant,
    TenantDemand,
    TenantGrants,
)
from shared.contracts.tenants.usage import (
    RequestMetered,
    UsageReported,
    UsageRequested,
    UsageRow,
    UsageToday,
)

EXAMPLES: tuple[Message, ...] = (
    TenantDemand(
        source="planner-1/a1",
        seq=7,
        at=1000.5,
        term=990.25,
        applied=6,
        meters={
            "acme": {
                LimitKind.REQUESTS: MeterDemand(balance=2, used=40, in_window=30, wanted=5, unit=1),
                LimitKind.OUTSTANDING: MeterDemand(balance=10, open=300, wanted=50, unit=25),
            }
        },
    ),
    TenantGrants(
        to="planner-1/a1",
        term=990.25,
        answers=7,
        answers_at=1000.5,
        meters={
            "acme": {
                LimitKind.REQUESTS: MeterGrant(
                    limit=60, granted=3, free=20, remaining=28, next_s=4.5, reset_s=59.0
                )
            }
        },
    ),
    RequestMetered(
        request_id="r1",
        tenant="acme",
        model="tiny",
        qos_class=QosClass.INTERACTIVE,
        outcome="completed",
        prompt_tokens=5,
        completion_tokens=4,
        cached_tokens=2,
        finished_at=1002.5,
        instance_id="i1",
    ),
    UsageToday(day=20000, tokens={"acme": 9}),
    UsageRequested(reply_to="answer.1", tenant="acme", since=3600.0, by=("hour", "model")),
    UsageReported(
        rows=(
            UsageRow(
                tenant="acme",
                hour=3600,
                model="tiny",
                qos_class="interactive",
                requests={"completed": 1},
                prompt_tokens=5,
                completion_tokens=4,
                cached_tokens=2,
            ),
        ),
        counts_since=1002.5,
    ),
)
