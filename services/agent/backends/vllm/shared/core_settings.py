"""Settings of Headway's scheduler in the engine core, passed in vLLM's `additional_config`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from services.agent.backends.policies import PolicyName, SchedulingSettings
from shared.contracts.estimates import LatencyCoefficients

CONFIG_KEY = "headway"
"""Key of Headway's part of `additional_config`."""


class CoreSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of one engine core."""

    stats_path: str
    """File of the `StatsWriter`."""
    policy: PolicyName
    """Ignored by vLLM's own policy."""
    scheduling: SchedulingSettings
    latency: LatencyCoefficients
    """Prior of the latency model."""
    safepoint_layers: int = 0
    """Layers between safepoints; 0 for an engine without safepoints."""
    safepoints_required: bool = False
    """Refuse a configuration that cannot have safepoints, instead of serving without them."""


def core_settings(additional_config: Mapping[str, Any]) -> CoreSettings:
    """Headway's part of *additional_config*."""
    return msgspec.convert(additional_config[CONFIG_KEY], CoreSettings)


def refusal(additional_config: Mapping[str, Any], reason: str) -> ValueError:
    """
    Error to raise in the engine core if it cannot do what the settings require.

    vLLM reports to the host only that the core has ended, so the reason is written to a file.
    """
    refusal_path(_stats_path(additional_config)).write_text(reason)
    return ValueError(reason)


def refusal_reason(additional_config: Mapping[str, Any]) -> str | None:
    """Why the engine core refused to start; None if it did not."""
    path = refusal_path(_stats_path(additional_config))
    return path.read_text() if path.exists() else None


def refusal_path(stats_path: Path) -> Path:
    """
    Path of the refusal, next to the engine's shared files; it exists only if the core refused to
    start.
    """
    return stats_path.with_suffix(".refusal")


def _stats_path(additional_config: Mapping[str, Any]) -> Path:
    return Path(core_settings(additional_config).stats_path)
