"""Stored responses in the gateway's OpenAPI document."""

from typing import Any

import msgspec

from services.gateway.responses.objects import (
    DEFAULT_LIMIT,
    MAX_LIMIT,
    InputItems,
    ResponseDeleted,
)

Document = dict[str, Any]
_PREFIX = "#/components/schemas/"
_ID: Document = {
    "name": "response_id",
    "in": "path",
    "required": True,
    "schema": {"type": "string"},
}
_OBJECT: Document = {"type": "object", "description": "The response, as `POST` answers it."}


def response_paths() -> tuple[Document, Document]:
    """Paths of stored responses, and the schemas that they use by name."""
    shapes = (InputItems, ResponseDeleted)
    references, schemas = msgspec.json.schema_components(shapes, ref_template=_PREFIX + "{name}")
    items, deleted = references
    stream: Document = {
        "stream": {"type": "boolean", "default": False},
        "starting_after": {"type": "integer", "minimum": -1},
    }
    page: Document = {
        "limit": {
            "type": "integer",
            "minimum": 1,
            "maximum": MAX_LIMIT,
            "default": DEFAULT_LIMIT,
        },
        "order": {"type": "string", "enum": ["asc", "desc"], "default": "desc"},
        "after": {"type": "string"},
    }
    found = _operation("Retrieve a response, or its events", _OBJECT, stream)
    found["responses"]["200"]["content"]["text/event-stream"] = {"schema": {"type": "string"}}
    paths = {
        "/v1/responses/{response_id}": {
            "get": found,
            "delete": _operation("Delete a response", deleted, {}),
        },
        "/v1/responses/{response_id}/cancel": {
            "post": _operation("Cancel a response that runs in the background", _OBJECT, {})
        },
        "/v1/responses/{response_id}/input_items": {
            "get": _operation("List the input of a response", items, page)
        },
    }
    return paths, schemas


def _operation(summary: str, answer: Document, query: Document) -> Document:
    parameters = [{"name": name, "in": "query", "schema": each} for name, each in query.items()]
    content: Document = {"application/json": {"schema": answer}}
    return {
        "summary": summary,
        "parameters": [_ID, *parameters],
        "responses": {"200": {"description": "The answer", "content": content}},
    }
