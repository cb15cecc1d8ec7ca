"""vLLM's API application of one model."""

from collections.abc import Callable
from typing import Any

from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.tasks import SupportedTask
from vllm.utils.argparse_utils import FlexibleArgumentParser

from services.engine_core.engine_client import CoreClient, EngineClient, Fail
from services.engine_core.media import limit_media
from shared.contracts.models import ModelTask

TASKS: dict[ModelTask, tuple[SupportedTask, ...]] = {
    "generate": ("generate",),
    "embed": ("embed", "token_embed"),
    "classify": ("classify", "token_classify"),
    "token_embed": ("token_embed",),
    "token_classify": ("token_classify",),
}
"""
Task of the registry -> tasks that vLLM's engine of such a model reports, on which the routes of its
application depend.
"""


async def model_application(
    arguments: list[str],
    tasks: tuple[SupportedTask, ...],
    core: Callable[[VllmConfig, Fail], CoreClient],
) -> tuple[Any, EngineClient]:
    """
    VLLM's ASGI application of a model, and the engine client behind it.

    Args:
        arguments: Those of `vllm serve`; the model's directory has the tokenizer, the configuration
            and the chat template.
        tasks: Tasks of the model.
        core: Makes the client of the engine core; it may end requests with an error.
    """
    limit_media()
    parsed = make_arg_parser(FlexibleArgumentParser()).parse_args(arguments)
    validate_parsed_serve_args(parsed)
    config = AsyncEngineArgs.from_cli_args(parsed).create_engine_config()
    client = EngineClient(config, core)
    application = build_app(parsed, tasks, client.model_config)
    await init_app_state(client, application.state, parsed, tasks)
    return application, client
