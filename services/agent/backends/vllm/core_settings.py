"""What the front tells our scheduler in the engine core, by way of vLLM's `additional_config`."""

from collections.abc import Mapping
from typing import Any

import msgspec

from services.agent.backends.policies import PolicyName, SchedulingSettings
from shared.contracts.estimates import LatencyCoefficients

CONFIG_KEY = "headway"
"""Our part of `additional_config`."""


class CoreSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of one engine."""

    stats_path: str
    """File of the `StatsWriter`."""
    policy: PolicyName
    """Not looked at by vLLM's own policy."""
    scheduling: SchedulingSettings
    latency: LatencyCoefficients
    """Prior of the latency model."""


def core_settings(additional_config: Mapping[str, Any]) -> CoreSettings:
    """Our part of *additional_config*."""
    return msgspec.convert(additional_config[CONFIG_KEY], CoreSettings)
