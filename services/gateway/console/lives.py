"""Finished requests in the console: those that were late, and the life of one."""

from collections.abc import Callable

import msgspec

from shared.broker.protocol import Broker
from shared.broker.stories import ask_stories
from shared.contracts.base import RequestId, Seconds, UnixTime
from shared.contracts.errors import ContractError, TransientError
from shared.contracts.stories.questions import StoriesReported, StoriesRequested
from solver.stories.view import StoryView, view_of

LATE_SPAN_S: Seconds = 600.0
MOST_LATE = 100


class LateRequests(msgspec.Struct, frozen=True, kw_only=True):
    """Requests that were late recently, newest first."""

    kept_since: UnixTime
    """Records of requests that ended earlier are not kept."""
    requests: tuple[StoryView, ...]
    command: str = "headway requests --late --since 10m"


async def late_requests(broker: Broker, now: UnixTime) -> LateRequests:
    """
    Requests of all tenants that were late in the last ten minutes.

    Raises:
        TransientError: No process keeps records of requests.
    """
    found = await _asked(
        broker,
        lambda reply_to: StoriesRequested(
            reply_to=reply_to, only_late=True, since=now - LATE_SPAN_S, limit=MOST_LATE
        ),
    )
    return LateRequests(
        kept_since=found.heard_since, requests=tuple(view_of(each) for each in found.stories)
    )


async def life(broker: Broker, request_id: str) -> StoryView:
    """
    The life of one finished request.

    Raises:
        ContractError: There is no record of it (status 404).
        TransientError: No process keeps records of requests.
    """
    found = await _asked(
        broker,
        lambda reply_to: StoriesRequested(
            reply_to=reply_to, request_id=RequestId(request_id), limit=1
        ),
    )
    if not found.stories:
        where = f": {found.held[0].instance_id} has it" if found.held else ""
        raise ContractError(
            f"there is no record of request {request_id[:128]!r}: it has not ended{where}, or it "
            "ended earlier than the records that are kept",
            code="story_not_found",
            status=404,
        )
    return view_of(found.stories[0])


async def _asked(broker: Broker, question: Callable[[str], StoriesRequested]) -> StoriesReported:
    found = await ask_stories(broker, question)
    if found is None:
        raise TransientError("no process keeps records of requests: is an estimator running?")
    return found
