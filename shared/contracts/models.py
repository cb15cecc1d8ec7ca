"""Entries of the model registry."""

from typing import Annotated, Any

from msgspec import Meta, Struct

from shared.contracts.base import ModelName


class ModelEntry(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One base model in the registry."""

    name: ModelName
    path: str
    """
    Directory with the model's `config.json`, `tokenizer.json` and weights; relative to the registry
    file.
    """
    architecture: str
    max_model_len: Annotated[int, Meta(ge=16)]
    """Maximum number of prompt tokens plus output tokens of a request."""
    eos_token_ids: tuple[int, ...] = ()
    aliases: tuple[str, ...] = ()
    """Other names by which requests may select the model."""
    adapters: dict[str, str] = {}
    """Name by which requests select a LoRA adapter -> directory of the adapter."""
    revision: str | None = None
    weight_bytes: int = 0
    bytes_per_token: Annotated[float, Meta(gt=0)] = 4.0
    """Prompt bytes per token; used for prompts that were not tokenized at ingress."""
    tool_parser: str | None = None
    """vLLM's parser of tool calls; None: answers have no tool calls."""
    reasoning_parser: str | None = None
    """vLLM's parser of reasoning; None: reasoning is part of the answer's text."""
    engine_args: dict[str, Any] = {}
    """Arguments for the engine, passed unchanged; they override the agent's settings."""
