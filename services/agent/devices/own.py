"""The devices that the settings of an agent give it."""

import os
from collections.abc import Iterable, Sequence

import msgspec

from services.agent.backends.settings import EngineSettings
from services.agent.backends.vllm.front.parallel import num_devices
from services.agent.devices.found import (
    Device,
    Provider,
    cuda_variables,
    named_devices,
    nvidia_devices,
    visible_devices,
)
from services.agent.settings import Settings
from shared.contracts.errors import SettingsError
from shared.contracts.models import ModelEntry


def has_devices(settings: Settings, entry: ModelEntry) -> bool:
    """True if an agent has the devices over which vLLM spreads a model, or all that it sees."""
    return not settings.devices or num_devices(entry) <= len(settings.devices.split(","))


def own_devices(
    settings: Settings, entries: Iterable[ModelEntry], provider: Provider = nvidia_devices
) -> tuple[Device, ...]:
    """
    The devices of an agent that serves *entries*; none if the setting is empty.

    Raises:
        SettingsError: A device does not exist, or a model needs more devices.
    """
    if not settings.devices:
        return ()
    visible = visible_devices(provider, os.environ)
    if not visible:
        raise SettingsError(
            f"devices {settings.devices!r}: this process sees no NVIDIA GPU; leave the setting out "
            "to serve on the CPU"
        )
    devices = named_devices(settings.devices, visible, source="devices")
    for entry in entries:
        if (needed := num_devices(entry)) > len(devices):
            raise SettingsError(
                f"devices {settings.devices!r}: model {entry.name} needs {needed} devices "
                "(parallel sizes in its engine_args): give more, or leave it out of `models`"
            )
    return devices


def engine_settings(settings: Settings, devices: Sequence[Device]) -> EngineSettings:
    """Settings of the engines of an agent, which use its *devices* only."""
    engine = settings.engine
    environment = engine.vllm.environment | cuda_variables(devices)
    vllm = msgspec.structs.replace(engine.vllm, environment=environment)
    return msgspec.structs.replace(engine, vllm=vllm)
