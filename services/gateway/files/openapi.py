"""The Files API in the gateway's OpenAPI document."""

from services.gateway.files.objects import (
    MAX_EXPIRES_S,
    MAX_LIMIT,
    MIN_EXPIRES_S,
    PURPOSES,
    FileDeleted,
    FileList,
    FileObject,
)
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

_FORM: Document = {
    "type": "object",
    "required": ["file", "purpose"],
    "properties": {
        "file": {"type": "string", "format": "binary"},
        "purpose": {"type": "string", "enum": list(PURPOSES)},
        "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
        "expires_after[seconds]": {
            "type": "integer",
            "minimum": MIN_EXPIRES_S,
            "maximum": MAX_EXPIRES_S,
        },
    },
}
_ID = path_id("file_id")


def file_paths() -> tuple[Document, Document]:
    """Paths of the Files API, and the schemas that they use by name."""
    shapes = (FileObject, FileList, FileDeleted)
    (file, page, deleted), schemas = schemas_of(shapes)
    content = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
    form = {"required": True, "content": {"multipart/form-data": {"schema": _FORM}}}
    limits = {"limit": limit_of(MAX_LIMIT, MAX_LIMIT), "order": ORDER, "after": AFTER}
    parameters = query({**limits, "purpose": {"type": "string"}})
    paths = {
        "/v1/files": {
            "get": operation("List files", page, parameters=parameters),
            "post": operation("Upload a file", file, requestBody=form),
        },
        "/v1/files/{file_id}": {
            "get": operation("Retrieve a file", file, parameters=[_ID]),
            "delete": operation("Delete a file", deleted, parameters=[_ID]),
        },
        "/v1/files/{file_id}/content": {
            "get": {
                "summary": "Retrieve the content of a file",
                "parameters": [_ID],
                "responses": {"200": {"description": "The content", "content": content}},
            }
        },
    }
    return paths, schemas
