"""Host memory of an agent for models that are warm."""

import os

from services.agent.backends.settings import VllmSettings
from services.agent.devices.found import VISIBLE, Provider, nvidia_devices
from shared.models.host_memory import available_host_bytes

HOST_SHARE = 0.5
"""Share of the available host memory for models that are warm."""


def warm_bytes_of(settings: VllmSettings, provider: Provider = nvidia_devices) -> int:
    """
    Host memory for warm models: the setting, or half of what is available, divided by the GPUs of
    the host; an agent has the part of its own GPUs.

    Raises:
        SettingsError: The memory cannot be read, and the setting is empty.
    """
    if settings.warm_bytes is not None:
        return settings.warm_bytes
    available = available_host_bytes(instead="set engine.vllm.warm_bytes")
    num_all = max(1, len(provider()))
    visible = settings.environment.get(VISIBLE) or os.environ.get(VISIBLE)
    num_own = len(visible.split(",")) if visible else num_all
    return int(HOST_SHARE * available * min(1.0, num_own / num_all))
