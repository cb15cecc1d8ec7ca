"""Stored responses in the gateway's OpenAPI document."""

from services.gateway.openapi import (
    AFTER,
    ORDER,
    Document,
    limit_of,
    operation,
    path_id,
    query,
    schemas_of,
)
from services.gateway.responses.objects import (
    DEFAULT_LIMIT,
    MAX_LIMIT,
    InputItems,
    ResponseDeleted,
)

_ID = path_id("response_id")
_OBJECT: Document = {"type": "object", "description": "The response, as `POST` answers it."}


def response_paths() -> tuple[Document, Document]:
    """Paths of stored responses, and the schemas that they use by name."""
    (items, deleted), schemas = schemas_of((InputItems, ResponseDeleted))
    stream = query(
        {
            "stream": {"type": "boolean", "default": False},
            "starting_after": {"type": "integer", "minimum": -1},
        }
    )
    limit = limit_of(DEFAULT_LIMIT, MAX_LIMIT)
    page = query({"limit": limit, "order": ORDER, "after": AFTER})
    found = operation("Retrieve a response, or its events", _OBJECT, parameters=[_ID, *stream])
    found["responses"]["200"]["content"]["text/event-stream"] = {"schema": {"type": "string"}}
    paths = {
        "/v1/responses/{response_id}": {
            "get": found,
            "delete": operation("Delete a response", deleted, parameters=[_ID]),
        },
        "/v1/responses/{response_id}/cancel": {
            "post": operation(
                "Cancel a response that runs in the background", _OBJECT, parameters=[_ID]
            )
        },
        "/v1/responses/{response_id}/input_items": {
            "get": operation("List the input of a response", items, parameters=[_ID, *page])
        },
    }
    return paths, schemas
