"""Models and devices of the simulated mesh, with each model's speed and swap times."""

from dataclasses import dataclass
from functools import cache

from ops.sim.profiles import load
from shared.contracts.base import ModelName, Seconds
from solver.scheduling.engine.latency import LatencyTable

_BASE_KV_BYTES = 128 * 1024
"""KV bytes per token of the model whose latency profile is used."""
_MEMORY_USED = 0.9
_PROFILE = "28"
GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelKind:
    """
    A model size.

    Source: QLM §8 names three models, but gives neither speeds nor swap times.
    Decided: the time of an iteration is proportional to the weights, and the time to read the
    context to the KV bytes per token. Llama-70B has 4-bit weights, so that it fits an A100.
    """

    name: str
    slowdown: float
    """Ratio of an iteration's time to its time with the model of the latency profile."""
    weight_bytes: int
    kv_bytes_per_token: int
    cold_s: Seconds
    """Time to load the weights from storage to the device."""
    warm_s: Seconds
    """Time to load the weights from host memory to the device."""


MISTRAL_7B = ModelKind(
    name="mistral-7b", slowdown=0.9, weight_bytes=int(13.5 * GIB),
    kv_bytes_per_token=128 * 1024, cold_s=5.0, warm_s=1.0,
)  # fmt: skip
VICUNA_13B = ModelKind(
    name="vicuna-13b", slowdown=1.6, weight_bytes=int(24.2 * GIB),
    kv_bytes_per_token=800 * 1024, cold_s=9.0, warm_s=1.8,
)  # fmt: skip
LLAMA_70B = ModelKind(
    name="llama-70b", slowdown=4.0, weight_bytes=36 * GIB,
    kv_bytes_per_token=320 * 1024, cold_s=30.0, warm_s=6.0,
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceKind:
    """
    One kind of GPU.

    Decided: an A10 has three times an A100's iteration times, and 24 GiB (QLM §8.3: about a third
    of the throughput, a third of the memory); swap times are equal on the two devices.
    """

    name: str
    slowdown: float
    memory_bytes: int
    host_link_bytes_per_s: float = 25e9
    """Bandwidth in bytes per second of restoring KV from host memory."""


A100 = DeviceKind(name="a100", slowdown=1.0, memory_bytes=80 * GIB)
A10 = DeviceKind(name="a10", slowdown=3.0, memory_bytes=24 * GIB)


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """Parameters of one kind of model on one kind of device."""

    latency: LatencyTable
    kv_capacity_tokens: int


@cache
def served(model: ModelKind, device: DeviceKind) -> Served | None:
    """Parameters of *model* on *device*; None if the model does not fit."""
    kv_bytes = _MEMORY_USED * device.memory_bytes - model.weight_bytes
    if kv_bytes <= 0:
        return None
    base = load(_PROFILE).latency
    slowdown = model.slowdown * device.slowdown
    kv_slowdown = device.slowdown * model.kv_bytes_per_token / _BASE_KV_BYTES
    return Served(
        latency=LatencyTable(
            tokens_s=tuple(slowdown * time_s for time_s in base.tokens_s),
            pair_s=slowdown * base.pair_s,
            context_s=kv_slowdown * base.context_s,
        ),
        kv_capacity_tokens=int(kv_bytes / model.kv_bytes_per_token),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """Instances and models; every instance may serve every model that fits its device."""

    devices: tuple[DeviceKind, ...]
    """Device of each instance."""
    models: dict[ModelName, ModelKind]
    swap_scale: float = 1.0
    """Factor by which all swap times are multiplied."""

    def served(self, device: DeviceKind, model: ModelName) -> Served | None:
        return served(self.models[model], device)

    def fitting(self, device: DeviceKind) -> tuple[ModelName, ...]:
        """Models that the device *device* can serve."""
        return tuple(name for name in self.models if self.served(device, name) is not None)
