"""OpenAPI document of a gateway: routes of engines with the mesh's fields, and stored objects."""

from collections.abc import Iterable
from importlib.metadata import version

from services.gateway.batches.openapi import batch_paths
from services.gateway.files.openapi import file_paths
from services.gateway.openapi import Document, answer, schemas_of
from services.gateway.requests.openapi import request_paths, with_repeats
from services.gateway.responses.openapi import response_paths
from services.gateway.stories import story_paths
from shared.api.calls import CallBody


def openapi_document(routes: Iterable[str]) -> Document:
    """
    OpenAPI document of the *routes* that engines answer, and of stored objects.

    Bodies have the fields that the mesh reads; engines define the other ones.
    """
    (body,), schemas = schemas_of((CallBody,))
    schemas["CallBody"]["additionalProperties"] = True
    posted = {
        "summary": "Answered by an engine of the model",
        "requestBody": {"required": True, "content": {"application/json": {"schema": body}}},
        "responses": {"200": answer({"type": "object"}, "The engine's answer")},
    }
    paths = {path: with_repeats(path, {"post": posted}) for path in routes}
    stored = (file_paths(), request_paths(), batch_paths(), response_paths(), story_paths())
    for paths_of_kind, schemas_of_kind in stored:
        paths |= paths_of_kind
        schemas |= schemas_of_kind
    return {
        "openapi": "3.1.0",
        "info": {"title": "Headway", "version": version("headway")},
        "paths": paths,
        "components": {"schemas": {name: schemas[name] for name in sorted(schemas)}},
    }
