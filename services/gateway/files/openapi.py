"""The Files API in the gateway's OpenAPI document."""

from typing import Any

import msgspec

from services.gateway.files.objects import (
    MAX_EXPIRES_S,
    MAX_LIMIT,
    MIN_EXPIRES_S,
    PURPOSES,
    FileDeleted,
    FileList,
    FileObject,
)

Document = dict[str, Any]
_PREFIX = "#/components/schemas/"
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
_ID: Document = {
    "name": "file_id",
    "in": "path",
    "required": True,
    "schema": {"type": "string"},
}


def file_paths() -> tuple[Document, Document]:
    """Paths of the Files API, and the schemas that they use by name."""
    shapes = (FileObject, FileList, FileDeleted)
    references, schemas = msgspec.json.schema_components(shapes, ref_template=_PREFIX + "{name}")
    file, page, deleted = references
    content = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
    form = {"required": True, "content": {"multipart/form-data": {"schema": _FORM}}}
    paths = {
        "/v1/files": {
            "get": _operation("List files", page, parameters=_list_parameters()),
            "post": _operation("Upload a file", file, requestBody=form),
        },
        "/v1/files/{file_id}": {
            "get": _operation("Retrieve a file", file, parameters=[_ID]),
            "delete": _operation("Delete a file", deleted, parameters=[_ID]),
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


def _operation(summary: str, answer: Document, **fields: Any) -> Document:
    content = {"application/json": {"schema": answer}}
    return {
        "summary": summary,
        **fields,
        "responses": {"200": {"description": "The answer", "content": content}},
    }


def _list_parameters() -> list[Document]:
    schemas: Document = {
        "limit": {"type": "integer", "minimum": 1, "maximum": MAX_LIMIT, "default": MAX_LIMIT},
        "order": {"type": "string", "enum": ["asc", "desc"], "default": "desc"},
        "after": {"type": "string"},
        "purpose": {"type": "string"},
    }
    return [{"name": name, "in": "query", "schema": each} for name, each in schemas.items()]
