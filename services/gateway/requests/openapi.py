"""Stored requests in the gateway's OpenAPI document."""

from services.gateway.headers import IDEMPOTENCY_KEY, MAX_KEY_CHARS, PREFER, RESPOND_ASYNC
from services.gateway.openapi import SCHEMAS, Document, answer, path_id, schemas_of
from services.gateway.requests.objects import RequestDeleted, RequestObject
from shared.api.calls import ENDPOINTS

_ID = path_id("request_id")
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
    (found, deleted), schemas = schemas_of((RequestObject, RequestDeleted))
    paths = {
        "/v1/requests/{request_id}": {
            "get": {
                "summary": "Retrieve the status and the answer of a request",
                "parameters": [_ID],
                "responses": {"200": answer(found, "The request")},
            },
            "delete": {
                "summary": "Cancel a request in progress, or delete one that has ended",
                "parameters": [_ID],
                "responses": {
                    "200": answer(deleted, "The request is deleted"),
                    "202": answer(found, "The request is being cancelled"),
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
        accepted = answer({"$ref": f"{SCHEMAS}RequestObject"}, "The request is accepted")
        responses = {**responses, "202": accepted}
    parameters = [*post.get("parameters", []), *headers]
    return {**operations, "post": {**post, "parameters": parameters, "responses": responses}}
