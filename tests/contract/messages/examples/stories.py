"""One example of every message of `shared.contracts.stories`."""

from shared.contracts.base import InstanceId, Message, RequestId, TenantId
from shared.contracts.qos import Slo
from shared.contracts.requests import Attempts, HistoryEntry, WaitForecast
from shared.contracts.stories.questions import HeldRequest, StoriesReported, StoriesRequested
from shared.contracts.stories.story import (
    PulledRequest,
    RequeuedRequest,
    StoriesObserved,
    Story,
)

STORY = Story(
    request_id=RequestId("r1"),
    tenant=TenantId("acme"),
    model="tiny",
    lane="lane.2.tiny.high.3.w0",
    queue="resume.tiny.2.3",
    slo=Slo(ttft_s=0.5, tbt_s=0.1),
    prompt_tokens=5,
    output_tokens=4,
    arrived_at=1000.5,
    grouped_at=1000.75,
    pulled_at=1004.5,
    submitted_at=1004.5,
    first_token_at=1002.5,
    finished_at=1005.5,
    prefill_s=0.25,
    predicted_wait=WaitForecast(mean_s=0.5, sd_s=0.25),
    instance_id=InstanceId("i2"),
    attempts=Attempts(hop=1, evictions=1),
    late_tokens=2,
    max_tbt_s=2.5,
    history=(
        HistoryEntry(
            at=1003.5,
            instance_id=InstanceId("i1"),
            what="evicted",
            why="an operator ordered the operation",
            pulled_at=1001.5,
            begun_at=1002.0,
        ),
    ),
)

EXAMPLES: tuple[Message, ...] = (
    StoriesObserved(
        sender="i2",
        requeued=(
            RequeuedRequest(
                tenant=TenantId("acme"),
                request_id=RequestId("r4"),
                step=HistoryEntry(
                    at=1005.0, instance_id=InstanceId("i2"), what="relegated", pulled_at=1005.0
                ),
            ),
        ),
        pulled=(PulledRequest(tenant=TenantId("acme"), request_id=RequestId("r2"), at=1005.25),),
        ended=(
            STORY,
            Story(
                request_id=RequestId("r3"),
                tenant=TenantId("other"),
                outcome="model_not_found",
                finished_at=1005.5,
            ),
        ),
    ),
    StoriesRequested(
        reply_to="answer.1",
        tenant=TenantId("acme"),
        request_id=RequestId("r1"),
        only_late=True,
        since=900.5,
        limit=10,
    ),
    StoriesReported(
        stories=(STORY,),
        held=(HeldRequest(tenant=TenantId("acme"), instance_id=InstanceId("i1"), at=1001.5),),
        heard_since=900.5,
        kept_s=3600.0,
    ),
)
