"""Questions about finished requests, and their answers."""

from typing import Annotated

from msgspec import Meta

from shared.contracts.base import InstanceId, Message, RequestId, Seconds, TenantId, UnixTime, Value
from shared.contracts.stories.story import Story

MAX_STORIES = 1000
"""Maximum number of records in one answer."""


class StoriesRequested(
    Message, frozen=True, kw_only=True, omit_defaults=True, tag="stories.requested.v1"
):
    """Question about finished requests; an estimator answers with `StoriesReported`."""

    reply_to: str
    """Routing key of the answer on `headway.replies`."""
    tenant: TenantId | None = None
    """None: all tenants."""
    request_id: RequestId | None = None
    """None: all requests."""
    only_late: bool = False
    since: UnixTime = 0.0
    """Requests that ended earlier are left out."""
    limit: Annotated[int, Meta(ge=1, le=MAX_STORIES)] = 100
    """Maximum number of records; the newest are reported."""


class HeldRequest(Value, frozen=True, kw_only=True):
    """A request without an end so far, and the instance that pulled it last."""

    tenant: TenantId
    instance_id: InstanceId
    at: UnixTime


class StoriesReported(
    Message, frozen=True, kw_only=True, omit_defaults=True, tag="stories.reported.v1"
):
    """Answer to `StoriesRequested`."""

    stories: tuple[Story, ...] = ()
    """Newest first."""
    held: tuple[HeldRequest, ...] = ()
    """Requests with the id of the question that have no end so far."""
    heard_since: UnixTime = 0.0
    """Records of requests that ended earlier are not kept."""
    kept_s: Seconds = 0.0
    """Age from which records are dropped; earlier if there are too many."""
