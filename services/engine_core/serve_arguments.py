"""Arguments of vLLM's API server for a model of the registry; does not import vLLM."""

from collections.abc import Iterable

import msgspec

from shared.contracts.models import ModelEntry

GRAMMARS = "xgrammar"
"""
Backend of grammars, in engines and in applications, unless the entry names another: an engine core
has one for all requests.
"""
_POOLING_ARGUMENTS = {"convert", "pooler_config"}
"""Arguments of a pooling model's engine that its application also needs."""


def serve_arguments(entry: ModelEntry, names: Iterable[str]) -> list[str]:
    """Arguments of `vllm serve` for the application of a model."""
    arguments = [
        *("--model", entry.path),
        *("--served-model-name", *names),
        *("--max-model-len", str(entry.max_model_len)),
        *("--dtype", "float32"),
        "--enforce-eager",
        "--disable-uvicorn-access-log",
        "--disable-log-stats",
        *("--mm-processor-cache-gb", "0"),
    ]
    if not entry.pools:
        grammars = {"backend": GRAMMARS} | (
            entry.engine_args.get("structured_outputs_config") or {}
        )
        arguments += ["--structured-outputs-config", msgspec.json.encode(grammars).decode()]
    if entry.adapters:
        # Requests that name an adapter are answered in its name; engines load the adapters.
        modules = [
            msgspec.json.encode({"name": name, "path": path}).decode()
            for name, path in entry.adapters.items()
        ]
        arguments += ["--enable-lora", "--lora-modules", *modules]
    if entry.pools:
        # A comparison inside an engine would need a query and its documents on the same engine.
        arguments += ["--runner", "pooling", "--no-enable-flash-late-interaction"]
        for name in _POOLING_ARGUMENTS & entry.engine_args.keys():
            value = entry.engine_args[name]
            text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
            arguments += [f"--{name.replace('_', '-')}", text]
    if entry.tool_parser is not None:
        arguments += ["--enable-auto-tool-choice", "--tool-call-parser", entry.tool_parser]
    if entry.reasoning_parser is not None:
        arguments += ["--reasoning-parser", entry.reasoning_parser]
    return arguments
