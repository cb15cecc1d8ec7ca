"""The committed AsyncAPI document matches the code."""

import json
from pathlib import Path
from typing import Any

from ops.generate import asyncapi

COMMITTED = Path(__file__).parents[3] / "ops" / "docs" / "asyncapi.json"


def test_committed_document_is_current():
    """To update the document: python -m ops.generate.asyncapi > ops/docs/asyncapi.json"""
    assert asyncapi.render(asyncapi.document()) == COMMITTED.read_text()


def test_every_reference_resolves():
    document = json.loads(COMMITTED.read_text())
    references: list[str] = []

    def walk(node: Any) -> None:
        if isinstance(node, dict):
            if isinstance(node.get("$ref"), str):
                references.append(node["$ref"])
            for each in node.values():
                walk(each)
        elif isinstance(node, list):
            for each in node:
                walk(each)

    walk(document)
    assert references
    for reference in references:
        target = document
        for part in reference.removeprefix("#/").split("/"):
            assert part in target, reference
            target = target[part]


def test_replies_carry_their_kind():
    schemas = json.loads(COMMITTED.read_text())["components"]["schemas"]

    assert schemas["RequestCompleted"]["properties"]["kind"] == {"enum": ["request.completed.v1"]}
