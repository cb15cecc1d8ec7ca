"""What the mesh knows about a model: the registry's entries."""

from typing import Annotated

from msgspec import Meta, Struct

from shared.contracts.base import ModelName


class ModelEntry(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One base model on disk."""

    name: ModelName
    path: str
    """Directory with `config.json`, `tokenizer.json` and weights; relative to the registry file."""
    architecture: str
    max_model_len: Annotated[int, Meta(ge=16)]
    """Prompt plus output tokens at most."""
    eos_token_ids: tuple[int, ...] = ()
    aliases: tuple[str, ...] = ()
    """Other wire names for it."""
    adapters: dict[str, str] = {}
    """Wire name -> LoRA adapter directory."""
    revision: str | None = None
    weight_bytes: int = 0
    bytes_per_token: Annotated[float, Meta(gt=0)] = 4.0
    """Prompt bytes per token, for prompts that were not tokenized at ingress."""
    engine_args: dict[str, str | int | float | bool] = {}
    """Passed to the engine as they are, over the agent's own."""
