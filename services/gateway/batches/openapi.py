"""The Batch API in the gateway's OpenAPI document."""

from services.gateway.batches.objects import (
    DEFAULT_LIMIT,
    MAX_LIMIT,
    BatchList,
    BatchObject,
    BatchRequest,
)
from services.gateway.openapi import (
    AFTER,
    Document,
    limit_of,
    operation,
    path_id,
    query,
    schemas_of,
)

_ID = path_id("batch_id")


def batch_paths() -> tuple[Document, Document]:
    """Paths of the Batch API, and the schemas that they use by name."""
    shapes = (BatchRequest, BatchObject, BatchList)
    (asked, batch, page), schemas = schemas_of(shapes)
    parameters = query({"limit": limit_of(DEFAULT_LIMIT, MAX_LIMIT), "after": AFTER})
    body = {"required": True, "content": {"application/json": {"schema": asked}}}
    paths = {
        "/v1/batches": {
            "get": operation("List batches", page, parameters=parameters),
            "post": operation("Create a batch", batch, requestBody=body),
        },
        "/v1/batches/{batch_id}": {
            "get": operation("Retrieve a batch", batch, parameters=[_ID]),
        },
        "/v1/batches/{batch_id}/cancel": {
            "post": operation("Cancel a batch", batch, parameters=[_ID]),
        },
    }
    return paths, schemas
