"""Tool calls of simulated answers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from shared.contracts.errors import ContractError

_VALUES: Mapping[str, object] = {
    "integer": 0,
    "number": 0,
    "boolean": False,
    "array": [],
    "object": {},
    "null": None,
}


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the client offers."""

    name: str
    parameters: Mapping[str, Any]
    """JSON schema of the arguments."""

    @property
    def frame(self) -> tuple[str, str]:
        """
        Begin and end of the arguments. The text of the answer, escaped, is the value between them,
        of the first required property that is a text; without one, the begin has all arguments.
        """
        properties = self.parameters.get("properties")
        properties = properties if isinstance(properties, dict) else {}
        required = self.parameters.get("required")
        names = required if isinstance(required, list) else []
        schemas = {name: properties.get(name) for name in names if isinstance(name, str)}
        texts = [name for name, schema in schemas.items() if _is_text(schema)]
        others = {n: _value(schema) for n, schema in schemas.items() if n not in texts[:1]}
        begin = msgspec.json.encode(others).decode()
        if not texts:
            return begin, ""
        comma = "," if others else ""
        return f'{begin[:-1]}{comma}{msgspec.json.encode(texts[0]).decode()}:"', '"}'


def escaped(text: str) -> str:
    """*text* as it stands within a JSON string."""
    return msgspec.json.encode(text).decode()[1:-1]


def chosen(tools: Sequence[Tool], *, name: str | None, param: str) -> Tool:
    """
    The tool that the client demands: the one called *name*, or the first.

    Raises:
        ContractError: There is no such tool.
    """
    found = next((tool for tool in tools if name in (None, tool.name)), None)
    if found is None:
        wanted = "a tool" if name is None else f"the tool {name[:80]!r}"
        raise ContractError(f"{param} demands {wanted}, which tools does not have", param=param)
    return found


def _is_text(schema: object) -> bool:
    return isinstance(schema, dict) and schema.get("type") == "string" and "enum" not in schema


def _value(schema: object) -> object:
    """A value of the schema's type."""
    if not isinstance(schema, dict):
        return ""
    if isinstance(choices := schema.get("enum"), list) and choices:
        return choices[0]
    kind = schema.get("type")
    return _VALUES.get(kind, "") if isinstance(kind, str) else ""
