"""OpenAPI document of the front: vLLM's own, for the open routes and with the mesh's fields."""

from collections.abc import Iterable, Iterator
from typing import Any

from services.gateway.batches.openapi import batch_paths
from services.gateway.files.openapi import file_paths
from services.gateway.openapi import SCHEMAS, Document, schemas_of
from services.gateway.requests.openapi import request_paths, with_repeats
from services.gateway.responses.openapi import response_paths
from services.gateway.stories import story_paths
from shared.api.calls import OWN_FIELDS, REFUSED_FIELDS, CallBody


def openapi_document(applications: Iterable[Any], routes: Iterable[str]) -> Document:
    """
    OpenAPI document of the open *routes* of vLLM's *applications*, at least one, and of stored
    objects.

    Bodies have the mesh's own fields, and lack those that the front refuses.
    """
    full = _merged(applications)
    paths = {path: full["paths"][path] for path in routes if path in full["paths"]}
    (body,), own = schemas_of((CallBody,))
    fields = own.pop(body["$ref"].removeprefix(SCHEMAS))["properties"]
    schemas: Document = full["components"]["schemas"] | own
    stored = (file_paths(), request_paths(), batch_paths(), response_paths(), story_paths())
    for name in filter(None, {_body_schema(path) for path in paths.values()}):
        schemas[name] = _with_own_fields(schemas[name], {key: fields[key] for key in OWN_FIELDS})
    paths = {path: with_repeats(path, operations) for path, operations in paths.items()}
    for paths_of_kind, schemas_of_kind in stored:
        paths |= paths_of_kind
        schemas |= schemas_of_kind
    used = _referenced(paths, schemas)
    return {
        "openapi": full["openapi"],
        "info": {"title": "Headway", "version": full["info"]["version"]},
        "paths": paths,
        "components": {"schemas": {name: schemas[name] for name in sorted(used)}},
    }


def _merged(applications: Iterable[Any]) -> Document:
    """The documents of all *applications* in one; those with equal routes have equal documents."""
    different = {frozenset(route.path for route in each.routes): each for each in applications}
    documents: list[Document] = [each.openapi() for each in different.values()]
    merged = documents[0]
    for document in documents[1:]:
        merged["paths"] |= document["paths"]
        merged["components"]["schemas"] |= document["components"]["schemas"]
    return merged


def _body_schema(path: Document) -> str | None:
    """Name of the schema of a route's body; None for bodies that have no name."""
    content = path.get("post", {}).get("requestBody", {}).get("content", {})
    reference = content.get("application/json", {}).get("schema", {}).get("$ref", "")
    return reference.removeprefix(SCHEMAS) or None


def _with_own_fields(schema: Document, fields: Document) -> Document:
    kept = {k: v for k, v in schema.get("properties", {}).items() if k not in REFUSED_FIELDS}
    return {**schema, "properties": kept | fields}


def _referenced(part: Any, schemas: Document) -> set[str]:
    """Names of the *schemas* that *part* uses, directly or through other schemas."""
    found: set[str] = set()
    waiting = list(_references(part))
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += _references(schemas[name])
    return found


def _references(part: Any) -> Iterator[str]:
    if isinstance(part, dict):
        reference = part.get("$ref")
        if isinstance(reference, str):
            yield reference.removeprefix(SCHEMAS)
        for each in part.values():
            yield from _references(each)
    elif isinstance(part, list):
        for each in part:
            yield from _references(each)
