"""What the front tells our scheduler in the engine core, by way of vLLM's `additional_config`."""

from collections.abc import Mapping
from pathlib import Path
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
    safepoint_layers: int = 0
    """Layers from one safepoint to the next; 0 for an engine without."""
    safepoints_required: bool = False
    """Refuse what cannot have them, instead of serving without."""


def core_settings(additional_config: Mapping[str, Any]) -> CoreSettings:
    """Our part of *additional_config*."""
    return msgspec.convert(additional_config[CONFIG_KEY], CoreSettings)


def refusal(additional_config: Mapping[str, Any], reason: str) -> ValueError:
    """
    To be raised in the engine core where it cannot do what the settings ask for.

    vLLM tells the host no more than that the core has ended, so the reason goes there in a file.
    """
    refusal_path(_stats_path(additional_config)).write_text(reason)
    return ValueError(reason)


def refusal_reason(additional_config: Mapping[str, Any]) -> str | None:
    """Why the engine core refused to start, if it did."""
    path = refusal_path(_stats_path(additional_config))
    return path.read_text() if path.exists() else None


def refusal_path(stats_path: Path) -> Path:
    """Beside the engine's shared files; there only if its core refused to start."""
    return stats_path.with_suffix(".refusal")


def _stats_path(additional_config: Mapping[str, Any]) -> Path:
    return Path(core_settings(additional_config).stats_path)
