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

Form = Literal["tokens", "bodies"]
"""
Form in which the instances of a model take requests.

`tokens`: prompts in tokens, which agents render with the model's files.
`bodies`: bodies of HTTP requests, which servers that others run read; the mesh needs no files of
the model.
"""


class ImageLimits(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits on the images of one request."""

    max_images: Annotated[int, Meta(ge=0)] = 8
    """Maximum number of images of a request; 0 refuses all images."""
    max_bytes: Annotated[int, Meta(ge=1)] = 4 << 20
    """Maximum size of the file of one image."""
    max_pixels: Annotated[int, Meta(ge=1)] = 16_000_000
    """Maximum width times height of one image."""


ADAPTER_HEADROOM = 4
"""Number of adapters that can be added to a model with adapters while its engines run."""


class ModelEntry(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One base model in the registry."""

    name: ModelName
    path: str = ""
    """
    Directory with the model's `config.json`, `tokenizer.json` and weights; relative to the registry
    file. Models that take bodies have none.
    """
    architecture: str = ""
    """Name of the model's class; models that take bodies have none."""
    takes: Form = "tokens"
    """Form in which the model's instances take requests."""
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
    max_adapters: Annotated[int, Meta(ge=0)] = 0
    """
    Number of adapters for which an engine has room, if the entry has fewer. An engine that is
    started without adapters and without this room cannot load adapters that are added later.
    """
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

    images: ImageLimits = ImageLimits()
    """Limits on the images of a request."""
    allowed_media_hosts: tuple[str, ...] = ()
    """
    Hosts whose http and https URLs of images are read for this model. Redirects are not followed.
    """

    @property
    def names(self) -> tuple[str, ...]:
        """Names by which requests may select the model, without those of its adapters."""
        return (self.name, *self.aliases)

    @property
    def takes_bodies(self) -> bool:
        """True if servers that others run read the bodies of requests."""
        return self.takes == "bodies"

    @property
    def adapter_slots(self) -> int:
        """Number of adapters that an engine loads at once, with room for some that come later."""
        if not self.adapters and not self.max_adapters:
            return 0
        return max(self.max_adapters, len(self.adapters) + ADAPTER_HEADROOM)

    @property
    def pools(self) -> bool:
        """True if the model makes vectors or scores of its inputs, and no text."""
        return self.task != "generate"


class TrafficSplit(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A name whose requests are divided among several models, e.g. to try a new model."""

    name: ModelName
    weights: dict[str, Annotated[float, Meta(gt=0)]]
    """
    Name of a model, an alias or an adapter -> weight. A target's share of the requests is its part
    of the sum of the weights.
    """
    fallback: str | None = None
    """
    Name of the model for requests that would be late on their target; None: such requests wait for
    their target.
    """
