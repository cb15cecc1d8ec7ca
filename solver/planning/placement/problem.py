"""Devices and models that are to be placed, and the memory that a model needs."""

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from math import ceil

from shared.contracts.base import ModelName

WEIGHT_FACTOR = Fraction(11, 10)
"""Memory of loaded weights as a multiple of the size of their files."""
GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePlace:
    """One device of the machine."""

    name: str
    """Name in messages, e.g. `GPU 2`."""
    kind: str
    """Adjacent devices of one kind can serve one model together."""
    memory_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelNeed:
    """What the engine of one model needs."""

    name: ModelName
    num_devices: int = 1
    """Devices over which the engine spreads the model."""
    weight_bytes: int
    """Size of the weight files."""
    context_bytes: int = 0
    """KV of one request of maximum length."""
    memory_share: float = 1.0
    """Share of each device that the engine may take: vLLM's `gpu_memory_utilization`."""

    @property
    def loaded_bytes(self) -> int:
        """Memory of the loaded weights, on devices or in the host."""
        return ceil(self.weight_bytes * WEIGHT_FACTOR)

    @property
    def need_bytes(self) -> int:
        """Memory that the engine needs at least, summed over its devices."""
        return self.loaded_bytes + self.context_bytes

    def room_bytes(self, memory_bytes: int) -> int:
        """Memory that the engine gets of devices with *memory_bytes* each."""
        return self.num_devices * int(memory_bytes * Fraction(str(self.memory_share)))


@dataclass(frozen=True, slots=True)
class Group:
    """Adjacent devices of one kind, which one agent takes."""

    start: int
    """Position of the first device."""
    size: int
    memory_bytes: int
    """Memory of the smallest of them."""

    @property
    def positions(self) -> range:
        return range(self.start, self.start + self.size)

    def fits(self, model: ModelNeed) -> bool:
        """True if the engine of *model* could run on these devices."""
        has_devices = model.num_devices <= self.size
        return has_devices and model.need_bytes <= model.room_bytes(self.memory_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """Models that are to be placed on the devices of a machine."""

    devices: tuple[DevicePlace, ...]
    models: tuple[ModelNeed, ...]
    host_bytes: int
    """Host memory for models that are warm while others are active."""
    num_agents: int | None = None
    """Number of agents; None: as many as use most devices."""

    def host_part_bytes(self, group: Group) -> int:
        """The part of host memory that an agent on *group* gets."""
        return self.host_bytes * group.size // len(self.devices)


def groups_of(fleet: Fleet) -> tuple[Group, ...]:
    """All groups of the sizes that models need, in the order of their devices."""
    sizes = sorted({model.num_devices for model in fleet.models})
    return tuple(
        group
        for start in range(len(fleet.devices))
        for size in sizes
        if (group := _group(fleet.devices, start, size)) is not None
    )


def _group(devices: tuple[DevicePlace, ...], start: int, size: int) -> Group | None:
    members = devices[start : start + size]
    if len(members) < size or len({each.kind for each in members}) > 1:
        return None
    return Group(start, size, min(each.memory_bytes for each in members))


def misfits(fleet: Fleet, groups: tuple[Group, ...]) -> Iterator[str]:
    """Messages about each model that fits no group of devices."""
    for model in fleet.models:
        large = [each for each in groups if each.size >= model.num_devices]
        if not large:
            yield (
                f"model {model.name} needs {model.num_devices} adjacent devices of one kind "
                "(tensor_parallel_size x pipeline_parallel_size in its engine_args), and this "
                f"mesh has {_most_of_one_kind(fleet.devices)}: lower them, or give more devices"
            )
        elif not any(group.fits(model) for group in large):
            yield _too_large(fleet, model, max(large, key=lambda each: each.memory_bytes))


def _too_large(fleet: Fleet, model: ModelNeed, best: Group) -> str:
    """By how much a model exceeds the largest devices that it could have."""
    room = model.room_bytes(best.memory_bytes)
    names = " and ".join(fleet.devices[at].name for at in best.positions[: model.num_devices])
    verb = "gives" if model.num_devices == 1 else "give"
    return (
        f"model {model.name} needs {_gib(model.need_bytes)} of device memory "
        f"({_gib(model.loaded_bytes)} for weights, which are their files x "
        f"{float(WEIGHT_FACTOR):g}, and {_gib(model.context_bytes)} for the KV of one full "
        f"context), and {names} {verb} {_gib(room)} ({model.memory_share:g} of "
        f"{_gib(model.num_devices * best.memory_bytes)}): {_gib(model.need_bytes - room)} too "
        "little. Lower its max_model_len, or raise tensor_parallel_size or "
        "gpu_memory_utilization in its engine_args"
    )


def _most_of_one_kind(devices: tuple[DevicePlace, ...]) -> int:
    most = run = 0
    for at, device in enumerate(devices):
        run = run + 1 if at and devices[at - 1].kind == device.kind else 1
        most = max(most, run)
    return most


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f} GiB"
