"""Random bodies from an OpenAPI document: a valid body with some random fields."""

import math
import os
from collections.abc import Callable, Iterator, Mapping
from random import Random
from typing import Any

from services.engine_core.serve_arguments import serve_arguments
from shared.contracts.models import ModelEntry

Schema = Mapping[str, Any]
Body = dict[str, Any]
_PREFIX = "#/components/schemas/"
_DEPTH = 4
"""Depth of values that follow the schema."""
_MOST_TOKENS = 24
"""Maximum of limits of answers, so that accepted bodies end soon."""
_LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
_KEPT = ("model", "n")
"""Fields that keep the value of the valid body, since random ones would refuse most bodies."""
_TEXTS = ("queue", "a", "日本", "{", ".")
_ODD: tuple[Any, ...] = (
    None,
    -1,
    0,
    1,
    2**31,
    2**63,
    1e308,
    -0.5,
    "",
    "x" * 300,
    "\x00",
    "é",
    [],
    {},
    True,
    [[]],
)


class Bodies:
    """
    Generator of bodies.

    Args:
        document: The OpenAPI document.
        valid: A valid body for each route.
        seed: Selects routes, fields and values.
    """

    def __init__(self, document: Schema, valid: Mapping[str, Body], seed: int) -> None:
        self._schemas: Mapping[str, Schema] = document["components"]["schemas"]
        self._paths: Mapping[str, Schema] = document["paths"]
        self._valid = valid
        self._random = random = Random(seed)
        self._makers: dict[str, Callable[[Schema, int], Any]] = {
            "boolean": lambda _schema, _depth: random.random() < 0.5,
            "integer": lambda schema, _depth: random.randint(*_bounds(schema)),
            "number": lambda schema, _depth: random.uniform(*_bounds(schema)),
            "string": lambda _schema, _depth: " ".join(random.choices(_TEXTS, k=3)),
            "array": self._array,
            "object": self._object,
        }

    def __iter__(self) -> Iterator[tuple[str, Body]]:
        """Endless pairs of a route and a body."""
        while True:
            route = self._random.choice(list(self._valid))
            yield route, self._body(route)

    def _body(self, route: str) -> Body:
        content = self._paths[route]["post"]["requestBody"]["content"]["application/json"]
        fields = self._fields(content["schema"])
        body = dict(self._valid[route])
        number = min(len(fields), math.floor(self._random.expovariate(0.7)))
        for name in self._random.sample(sorted(fields), number):
            if name not in _KEPT:
                body[name] = self._value(fields[name], _DEPTH)
        for name in _LIMITS:
            if isinstance(body.get(name), int) and body[name] > _MOST_TOKENS:
                body[name] = _MOST_TOKENS
        return body

    def _fields(self, schema: Schema) -> Mapping[str, Schema]:
        """Properties of an object, or of all alternatives of a union."""
        schema = self._resolved(schema)
        found = dict(schema.get("properties", {}))
        for part in (*schema.get("anyOf", ()), *schema.get("oneOf", ())):
            found |= self._fields(part)
        return found

    def _resolved(self, schema: Schema) -> Schema:
        reference = schema.get("$ref")
        return self._schemas[reference.removeprefix(_PREFIX)] if reference else schema

    def _value(self, schema: Schema, depth: int) -> Any:
        """A value that mostly follows *schema*."""
        schema = self._resolved(schema)
        options = [*schema.get("anyOf", ()), *schema.get("oneOf", ())]
        make = self._makers.get(schema.get("type", ""))
        if depth == 0 or self._random.random() < 0.15:
            return self._random.choice(_ODD)
        if options:
            return self._value(self._random.choice(options), depth)
        if "enum" in schema or "const" in schema:
            return self._random.choice(schema.get("enum") or [schema["const"]])
        return make(schema, depth) if make else self._random.choice(_ODD)

    def _array(self, schema: Schema, depth: int) -> list[Any]:
        size = self._random.randint(schema.get("minItems", 0), 3)
        return [self._value(schema.get("items", {}), depth - 1) for _ in range(size)]

    def _object(self, schema: Schema, depth: int) -> Body:
        required = set(schema.get("required", ()))
        return {
            name: self._value(part, depth - 1)
            for name, part in schema.get("properties", {}).items()
            if name in required or self._random.random() < 0.3
        }


def _bounds(schema: Schema) -> tuple[int, int]:
    low = schema.get("minimum", schema.get("exclusiveMinimum", 0))
    high = schema.get("maximum", schema.get("exclusiveMaximum", low + 2))
    return math.ceil(max(low, -(2**31))), math.floor(min(high, 2**31))


def vllm_document(entry: ModelEntry) -> dict[str, Any]:
    """The document of `vllm serve` for a model; imports vLLM into this process."""
    os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
    from vllm.engine.arg_utils import AsyncEngineArgs  # noqa: PLC0415 - after the variable is set
    from vllm.entrypoints.launchers.app import build_app  # noqa: PLC0415
    from vllm.entrypoints.launchers.cli_args import make_arg_parser  # noqa: PLC0415
    from vllm.utils.argparse_utils import FlexibleArgumentParser  # noqa: PLC0415

    parser = make_arg_parser(FlexibleArgumentParser())
    parsed = parser.parse_args(serve_arguments(entry, entry.names))
    config = AsyncEngineArgs.from_cli_args(parsed).create_engine_config()
    document: dict[str, Any] = build_app(parsed, ("generate",), config.model_config).openapi()
    return document
