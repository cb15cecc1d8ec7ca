"""The Batch API in the gateway's OpenAPI document."""

from typing import Any

import msgspec

from services.gateway.batches.objects import (
    DEFAULT_LIMIT,
    MAX_LIMIT,
    BatchList,
    BatchObject,
    BatchRequest,
)

Document = dict[str, Any]
_PREFIX = "#/components/schemas/"
_ID: Document = {
    "name": "batch_id",
    "in": "path",
    "required": True,
    "schema": {"type": "string"},
}
_PAGE: list[Document] = [
    {
        "name": "limit",
        "in": "query",
        "schema": {"type": "integer", "minimum": 1, "maximum": MAX_LIMIT, "default": DEFAULT_LIMIT},
    },
    {"name": "after", "in": "query", "schema": {"type": "string"}},
]


def batch_paths() -> tuple[Document, Document]:
    """Paths of the Batch API, and the schemas that they use by name."""
    shapes = (BatchRequest, BatchObject, BatchList)
    references, schemas = msgspec.json.schema_components(shapes, ref_template=_PREFIX + "{name}")
    asked, batch, page = references
    body = {"required": True, "content": {"application/json": {"schema": asked}}}
    paths = {
        "/v1/batches": {
            "get": _operation("List batches", page, parameters=_PAGE),
            "post": _operation("Create a batch", batch, requestBody=body),
        },
        "/v1/batches/{batch_id}": {
            "get": _operation("Retrieve a batch", batch, parameters=[_ID]),
        },
        "/v1/batches/{batch_id}/cancel": {
            "post": _operation("Cancel a batch", batch, parameters=[_ID]),
        },
    }
    return paths, schemas


def _operation(summary: str, answer: Document, **fields: Any) -> Document:
    content = {"application/json": {"schema": answer}}
    return {
        "summary": summary,
        **fields,
        "responses": {"200": {"description": "The answer", "content": content}},
    }
