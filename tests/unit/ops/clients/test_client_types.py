"""The generated part of the npm package agrees with the AsyncAPI document."""

import json

import pytest

from ops.clients.npm import HERE
from ops.generate.asyncapi import document
from ops.generate.typescript import files, types


@pytest.mark.parametrize("name", ["messages.d.ts", "contract.js"])
def test_the_generated_file_is_up_to_date(name: str):
    """To update the files: python -m ops.generate.typescript"""
    assert (HERE / name).read_text() == files(document())[name]


def test_schemas_become_types():
    schemas = {
        "Mode": {"enum": ["a", "b"]},
        "Pair": {
            "type": "array",
            "prefixItems": [{"type": "integer"}, {"type": "array", "items": {"type": "string"}}],
        },
        "Thing": {
            "type": "object",
            "description": "A thing.",
            "required": ["id", "kind"],
            "properties": {
                "id": {"type": "string"},
                "kind": {"enum": ["thing.made.v1"]},
                "mode": {"anyOf": [{"$ref": "#/components/schemas/Mode"}, {"type": "null"}]},
                "body": {},
            },
        },
    }
    found = types({"components": {"schemas": schemas}, "channels": {}})

    assert 'export type Mode = "a" | "b";' in found
    assert "export type Pair = [number, Array<string>];" in found
    assert (
        "/**\n * A thing.\n */\nexport type Thing = {\n  id: string;\n"
        '  kind: "thing.made.v1";\n  mode?: Mode | null;\n  body?: unknown;\n};' in found
    )


def test_the_package_has_a_single_dependency():
    described = json.loads((HERE / "package.json").read_text())

    assert list(described["dependencies"]) == ["amqplib"]
    assert (HERE / "index.d.ts").exists()
