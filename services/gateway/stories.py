"""`/v1/stories`: finished requests of the caller's tenant, and why they were late."""

from collections.abc import Mapping
from typing import Literal

import msgspec

from services.gateway.openapi import Document, answer, path_id, schemas_of
from services.gateway.parameters import whole_number
from services.gateway.state import Gateway
from services.gateway.usage import named_tenant, time_of
from shared.broker.stories import ask_stories
from shared.contracts.base import RequestId, Seconds, TenantId, UnixTime
from shared.contracts.errors import ContractError, TransientError
from shared.contracts.stories.questions import MAX_STORIES, StoriesReported, StoriesRequested
from solver.stories.view import StoryView, view_of

STORIES = "/v1/stories"
DEFAULT_SPAN_S: Seconds = 600.0
DEFAULT_LIMIT = 50
_LATE = {"true": True, "false": False}


class StoryList(msgspec.Struct, frozen=True, kw_only=True):
    """Finished requests, newest first."""

    object: Literal["list"] = "list"
    kept_since: UnixTime
    """Records of requests that ended earlier are not kept."""
    data: list[StoryView]


async def stories(
    gateway: Gateway,
    headers: Mapping[str, str],
    peer: str | None,
    query: Mapping[str, str],
) -> bytes:
    """
    JSON of the requests of the caller's tenant that ended recently; a key with the scope `operator`
    may name another one, or `*` for all.

    Args:
        gateway: Components of the gateway.
        headers: Headers of the request, with names in lower case.
        peer: Address of the other end.
        query: `late` (`true` or `false`), `since` (Unix seconds, a date, or a duration such as
            `10m`), `limit`, `tenant`.

    Raises:
        ContractError: The key or a parameter is not valid.
        TransientError: No process keeps records.
    """
    tenant = named_tenant(gateway, headers, peer, query)
    now = gateway.clock.now()
    since = time_of(query, "since", now)
    found = await _ask(
        gateway,
        tenant=tenant,
        only_late=_late(query.get("late", "false")),
        since=now - DEFAULT_SPAN_S if since is None else since,
        limit=whole_number(
            "limit", query.get("limit", str(DEFAULT_LIMIT)), low=1, high=MAX_STORIES
        ),
    )
    listed = StoryList(kept_since=found.heard_since, data=[view_of(each) for each in found.stories])
    return msgspec.json.encode(listed)


async def story(
    gateway: Gateway,
    headers: Mapping[str, str],
    peer: str | None,
    query: Mapping[str, str],
    request_id: str,
) -> bytes:
    """
    JSON of one finished request of the caller's tenant, or of the tenant that an operator names.

    Args:
        gateway: Components of the gateway.
        headers: Headers of the request, with names in lower case.
        peer: Address of the other end.
        query: `tenant`.
        request_id: Id of the request.

    Raises:
        ContractError: The key is not valid; or the request has not ended, or its record is not kept
            (status 404), which the message says.
        TransientError: No process keeps records.
    """
    tenant = named_tenant(gateway, headers, peer, query)
    found = await _ask(gateway, tenant=tenant, request_id=RequestId(request_id))
    if not found.stories:
        raise ContractError(
            f"there is no record of request {request_id[:128]!r}: "
            + (
                f"it has not ended, and {found.held[0].instance_id} has it"
                if found.held
                else "it has not ended, or it ended earlier than the records that are kept"
            ),
            code="story_not_found",
            param="request_id",
            status=404,
        )
    return msgspec.json.encode(view_of(found.stories[0]))


async def _ask(
    gateway: Gateway,
    *,
    tenant: TenantId | None,
    request_id: RequestId | None = None,
    only_late: bool = False,
    since: UnixTime = 0.0,
    limit: int = 1,
) -> StoriesReported:
    if gateway.broker is None:
        raise TransientError("records of requests are not available")
    found = await ask_stories(
        gateway.broker,
        lambda reply_to: StoriesRequested(
            reply_to=reply_to,
            tenant=tenant,
            request_id=request_id,
            only_late=only_late,
            since=since,
            limit=limit,
        ),
    )
    if found is None:
        raise TransientError("no process keeps records of requests")
    return found


def _late(text: str) -> bool:
    if text not in _LATE:
        raise ContractError(f"late is {text[:40]!r}; it must be true or false", param="late")
    return _LATE[text]


def story_paths() -> tuple[Document, Document]:
    """Paths of the OpenAPI document about finished requests, and the schemas that they use."""
    (many, one), schemas = schemas_of((StoryList, StoryView))
    tenant = _parameter("tenant", "Another tenant, or `*`: for keys with the scope `operator`.")
    paths = {
        STORIES: {
            "get": {
                "summary": "List requests that ended recently",
                "parameters": [
                    _parameter("late", "`true`: only requests that were late."),
                    _parameter("since", "Unix seconds, a date, or a duration such as `10m`."),
                    _parameter("limit", "Maximum number of requests; the newest are listed."),
                    tenant,
                ],
                "responses": {"200": answer(many, "Finished requests")},
            }
        },
        f"{STORIES}/{{request_id}}": {
            "get": {
                "summary": "Retrieve the life of a finished request, and why it was late",
                "parameters": [
                    path_id("request_id"),
                    tenant,
                ],
                "responses": {"200": answer(one, "The finished request")},
            }
        },
    }
    return paths, schemas


def _parameter(name: str, description: str) -> Document:
    return {"name": name, "in": "query", "description": description, "schema": {"type": "string"}}
