"""The committed AsyncAPI document says what the code does."""

import json
from pathlib import Path
from typing import Any

from shared.broker import asyncapi

COMMITTED = Path(__file__).parents[2] / "ops" / "docs" / "asyncapi.json"


def test_committed_document_is_fresh():
    """Else: python -m shared.broker.asyncapi > ops/docs/asyncapi.json"""
    assert asyncapi.render(asyncapi.document()) == COMMITTED.read_text()


def test_every_reference_leads_somewhere():
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
