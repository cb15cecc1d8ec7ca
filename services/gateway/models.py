"""OpenAI's list of models."""

import msgspec

from services.gateway.instances import Instances
from services.gateway.results import SIMULATED, SIMULATED_ENGINE

OWNER = "headway"


class ModelObject(msgspec.Struct, frozen=True, kw_only=True):
    """OpenAI's `model` object."""

    id: str
    object: str = "model"
    created: int = 0
    owned_by: str = OWNER
    """`headway-simulated` if only simulated engines serve the model."""
    root: str
    parent: str | None = None
    """Base model of an adapter."""
    max_model_len: int


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    """OpenAI's list of models."""

    object: str = "list"
    data: list[ModelObject]


def model_object(instances: Instances, name: str) -> ModelObject:
    """
    Description of the model that requests call *name*.

    Raises:
        ContractError: The name is unknown.
    """
    registry = instances.registry
    if (split := registry.split(name)) is not None:
        parts = [model_object(instances, target) for target in split.weights]
        owners = {each.owned_by for each in parts}
        return ModelObject(
            id=name,
            owned_by=owners.pop() if len(owners) == 1 else OWNER,
            root=name,
            max_model_len=min(each.max_model_len for each in parts),
        )
    ref = registry.resolve(name)
    return ModelObject(
        id=name,
        owned_by=SIMULATED if instances.engines(ref.base) == {SIMULATED_ENGINE} else OWNER,
        root=ref.base,
        parent=None if ref.adapter is None else ref.base,
        max_model_len=registry.entry(ref.base).max_model_len,
    )


def model_list(instances: Instances) -> ModelList:
    """All models of the registry, by every name."""
    return ModelList(data=[model_object(instances, name) for name in instances.registry.names])
