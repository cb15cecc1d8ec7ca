"""Parts of OpenAPI documents that the routes of stored objects share."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

Document = dict[str, Any]
SCHEMAS = "#/components/schemas/"
"""Prefix of references to schemas."""


def schemas_of(shapes: Sequence[type]) -> tuple[Sequence[Document], Document]:
    """References to the schemas of *shapes*, in order, and the schemas by name."""
    references, schemas = msgspec.json.schema_components(shapes, ref_template=SCHEMAS + "{name}")
    return references, schemas


def path_id(name: str) -> Document:
    """The parameter *name* of a path."""
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}


def query(schemas: Mapping[str, Document]) -> list[Document]:
    """The parameters of a query, each with its schema."""
    return [{"name": name, "in": "query", "schema": schema} for name, schema in schemas.items()]


def limit_of(default: int, most: int) -> Document:
    """Schema of the number of objects on a page."""
    return {"type": "integer", "minimum": 1, "maximum": most, "default": default}


ORDER: Document = {"type": "string", "enum": ["asc", "desc"], "default": "desc"}
AFTER: Document = {"type": "string"}


def answer(schema: Document, description: str = "The answer") -> Document:
    """An answer in JSON."""
    return {"description": description, "content": {"application/json": {"schema": schema}}}


def operation(summary: str, found: Document, **fields: Any) -> Document:
    """
    An operation of a path.

    Args:
        summary: What it does.
        found: Schema of its answer.
        fields: Other fields of the operation, e.g. `parameters`.
    """
    return {"summary": summary, **fields, "responses": {"200": answer(found)}}
