"""OpenAI's list of models."""

import msgspec

from shared.models.registry import ModelRegistry


class ModelObject(msgspec.Struct, frozen=True, kw_only=True):
    """OpenAI's `model` object."""

    id: str
    object: str = "model"
    created: int = 0
    owned_by: str = "headway"
    root: str
    parent: str | None = None
    """Base model of an adapter."""
    max_model_len: int


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    """OpenAI's list of models."""

    object: str = "list"
    data: list[ModelObject]


def model_object(registry: ModelRegistry, name: str) -> ModelObject:
    """
    Description of the model that requests call *name*.

    Raises:
        ContractError: The name is unknown.
    """
    if (split := registry.split(name)) is not None:
        lengths = [model_object(registry, target).max_model_len for target in split.weights]
        return ModelObject(id=name, root=name, max_model_len=min(lengths))
    ref = registry.resolve(name)
    entry = registry.entry(ref.base)
    parent = None if ref.adapter is None else ref.base
    return ModelObject(id=name, root=ref.base, parent=parent, max_model_len=entry.max_model_len)


def model_list(registry: ModelRegistry) -> ModelList:
    """All models of *registry*, by every name."""
    return ModelList(data=[model_object(registry, name) for name in registry.names])
