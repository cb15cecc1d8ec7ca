"""Entries of the model registry."""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from shared.contracts.base import ModelName

ModelTask = Literal["generate", "embed", "classify", "token_embed", "token_classify"]
"""
What a model makes of its input: text, or in vLLM's words one vector for each input (`embed`) or
token (`token_embed`), or the scores of classes for each input (`classify`) or token
(`token_classify`).
"""


class ModelEntry(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One base model in the registry."""

    name: ModelName
    path: str
    """
    Directory with the model's `config.json`, `tokenizer.json` and weights; relative to the registry
    file.
    """
    architecture: str
    task: ModelTask = "generate"
    """Task of the model; a model with any other task than `generate` is a pooling model."""
    max_model_len: Annotated[int, Meta(ge=16)]
    """
    Maximum number of prompt tokens plus output tokens of a request; of tokens of each input if the
    model pools.
    """
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

    allowed_media_hosts: tuple[str, ...] = ()
    """Hosts whose http and https URLs of images are read for this model."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names by which requests may select the model, without those of its adapters."""
        return (self.name, *self.aliases)

    @property
    def pools(self) -> bool:
        """True if the model makes vectors or scores of its inputs, and no text."""
        return self.task != "generate"
