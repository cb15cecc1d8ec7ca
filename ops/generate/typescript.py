"""
Types and names of the npm package, from the AsyncAPI document: `python -m ops.generate.typescript`
writes them.
"""

import json
import sys
from pathlib import Path
from typing import Any

from ops.generate.asyncapi import document

FOLDER = Path(__file__).resolve().parents[1] / "clients" / "javascript"
_HEADER = "// Made by `python -m ops.generate.typescript` from the AsyncAPI document.\n"
_PRIMITIVES = {
    "string": "string",
    "integer": "number",
    "number": "number",
    "boolean": "boolean",
    "null": "null",
    "object": "Record<string, unknown>",
}
Schema = dict[str, Any]


def files(api: dict[str, Any]) -> dict[str, str]:
    """Name of each generated file -> its content."""
    return {"messages.d.ts": types(api), "contract.js": names(api)}


def types(api: dict[str, Any]) -> str:
    """Declarations of all schemas, and of the messages of each channel."""
    schemas = api["components"]["schemas"]
    declared = [_declaration(name, schemas[name]) for name in sorted(schemas)]
    declared += [
        f"export type {_channel_type(name)} =\n  | " + "\n  | ".join(sorted(channel["messages"]))
        for name, channel in sorted(api["channels"].items())
    ]
    return _HEADER + "\n" + ";\n\n".join(declared) + ";\n"


def names(api: dict[str, Any]) -> str:
    """Exchanges of the channels, and tags of the messages."""
    exchanges = {
        name: channel["bindings"]["amqp"]["exchange"]["name"]
        for name, channel in sorted(api["channels"].items())
    }
    kinds = {
        name: schema["properties"]["kind"]["enum"][0]
        for name, schema in sorted(api["components"]["schemas"].items())
        if "kind" in schema.get("properties", {})
    }
    return (
        f"{_HEADER}\nexport const EXCHANGES = {json.dumps(exchanges, indent=2)};\n\n"
        f"export const KINDS = {json.dumps(kinds, indent=2)};\n"
    )


def _channel_type(name: str) -> str:
    return {"requests": "Request", "replies": "Reply", "control": "Control"}[name]


def _declaration(name: str, schema: Schema) -> str:
    comment = _comment(schema.get("description", ""), "")
    if "properties" not in schema:
        return f"{comment}export type {name} = {_type(schema)}"
    required = schema.get("required", ())
    fields = "".join(
        f"{_comment(field.get('description', ''), '  ')}"
        f"  {key}{'' if key in required else '?'}: {_type(field)};\n"
        for key, field in schema["properties"].items()
    )
    return f"{comment}export type {name} = {{\n{fields}}}"


def _comment(text: str, indent: str) -> str:
    if not text:
        return ""
    lines = "".join(f"{indent} * {line}".rstrip() + "\n" for line in text.splitlines())
    return f"{indent}/**\n{lines}{indent} */\n"


def _type(schema: Schema) -> str:
    """TypeScript of one schema; only what msgspec writes is known."""
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    if "anyOf" in schema:
        return " | ".join(_type(each) for each in schema["anyOf"])
    if "enum" in schema:
        return " | ".join(json.dumps(each) for each in schema["enum"])
    if "prefixItems" in schema:
        return f"[{', '.join(_type(each) for each in schema['prefixItems'])}]"
    if schema.get("type") == "array":
        return f"Array<{_type(schema['items'])}>"
    return _PRIMITIVES[schema["type"]] if "type" in schema else "unknown"


def main() -> int:
    for name, content in files(document()).items():
        (FOLDER / name).write_text(content)
    return 0


if __name__ == "__main__":
    sys.exit(main())
