"""vLLM's API application of one model."""

from collections.abc import Iterable
from typing import Any

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.tasks import SupportedTask
from vllm.utils.argparse_utils import FlexibleArgumentParser

from services.gateway.vllm.engine_client import MeshEngineClient
from shared.contracts.models import ModelEntry
from shared.producer.producer import Producer

GENERATE: tuple[SupportedTask, ...] = ("generate",)


async def model_application(
    entry: ModelEntry, names: Iterable[str], producer: Producer
) -> tuple[Any, MeshEngineClient]:
    """
    VLLM's ASGI application of a model, and the engine client behind it.

    Args:
        entry: The model; its directory has the tokenizer, the configuration and the chat template.
        names: Names of the model that requests may use.
        producer: Connection to the mesh.
    """
    arguments = make_arg_parser(FlexibleArgumentParser()).parse_args(serve_arguments(entry, names))
    validate_parsed_serve_args(arguments)
    config = AsyncEngineArgs.from_cli_args(arguments).create_engine_config()
    client = MeshEngineClient(config, producer, tasks=GENERATE)
    application = build_app(arguments, GENERATE, client.model_config)
    await init_app_state(client, application.state, arguments, GENERATE)
    return application, client


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
    if entry.tool_parser is not None:
        arguments += ["--enable-auto-tool-choice", "--tool-call-parser", entry.tool_parser]
    if entry.reasoning_parser is not None:
        arguments += ["--reasoning-parser", entry.reasoning_parser]
    return arguments
