"""Stored requests in the gateway's OpenAPI document."""

from typing import Any

import msgspec

from services.gateway.headers import IDEMPOTENCY_KEY, MAX_KEY_CHARS, PREFER, RESPOND_ASYNC
from services.gateway.requests.objects import RequestDeleted, RequestObject
from shared.api.calls import ENDPOINTS

Document = dict[str, Any]
_PREFIX = "#/components/schemas/"
_ID: Document = {
    "name": "request_id",
    "in": "path",
    "required": True,
    "schema": {"type": "string"},
}
_KEY: Document = {
    "name": IDEMPOTENCY_KEY,
    "in": "header",
    "description": "A repeat with the same key and body gets the answer of the first request.",
    "schema": {"type": "string", "minLength": 1, "maxLength": MAX_KEY_CHARS},
}
_PREFER: Document = {
    "name": PREFER,
    "in": "header",
    "description": f"`{RESPOND_ASYNC}`: the answer is collected at the `location` later.",
    "schema": {"type": "string"},
}


def request_paths() -> tuple[Document, Document]:
    """Paths of stored requests, and the schemas that they use by name."""
    shapes = (RequestObject, RequestDeleted)
    references, schemas = msgspec.json.schema_components(shapes, ref_template=_PREFIX + "{name}")
    found, deleted = references
    paths = {
        "/v1/requests/{request_id}": {
            "get": {
                "summary": "Retrieve the status and the answer of a request",
                "parameters": [_ID],
                "responses": {"200": _answer("The request", found)},
            },
            "delete": {
                "summary": "Cancel a request in progress, or delete one that has ended",
                "parameters": [_ID],
                "responses": {
                    "200": _answer("The request is deleted", deleted),
                    "202": _answer("The request is being cancelled", found),
                },
            },
        },
    }
    return paths, schemas


def with_repeats(path: str, operations: Document) -> Document:
    """The operations of a route that makes requests, with the headers for repeats."""
    post = operations["post"]
    headers = [_KEY, *([_PREFER] if path in ENDPOINTS else [])]
    responses = post.get("responses", {})
    if path in ENDPOINTS:
        accepted = _answer("The request is accepted", {"$ref": f"{_PREFIX}RequestObject"})
        responses = {**responses, "202": accepted}
    parameters = [*post.get("parameters", []), *headers]
    return {**operations, "post": {**post, "parameters": parameters, "responses": responses}}


def _answer(description: str, schema: Document) -> Document:
    return {"description": description, "content": {"application/json": {"schema": schema}}}
