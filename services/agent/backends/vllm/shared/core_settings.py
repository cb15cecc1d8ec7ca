"""Settings of Headway's scheduler in the engine core, passed in vLLM's `additional_config`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from services.agent.backends.policies import PolicyName, SchedulingSettings
from shared.contracts.base import Seconds
from shared.contracts.estimates import LatencyCoefficients

CONFIG_KEY = "headway"
"""Key of Headway's part of `additional_config`."""


class CoreSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of one engine core."""

    stats_path: str
    """File of the engine's `StatsWriter`."""
    policy: PolicyName
    """Name of the policy; vLLM's own policy ignores it."""
    scheduling: SchedulingSettings
    latency: LatencyCoefficients
    """Prior of the latency model."""
    grammar_timeout_s: Seconds
    """Time limit for compiling one grammar."""
    safepoint_layers: int = 0
    """Layers between safepoints; 0 for an engine without safepoints."""
    safepoints_required: bool = False
    """True if a configuration without support for safepoints is refused."""


def core_settings(additional_config: Mapping[str, Any]) -> CoreSettings:
    """Headway's part of *additional_config*."""
    return msgspec.convert(additional_config[CONFIG_KEY], CoreSettings)


def refusal(additional_config: Mapping[str, Any], reason: str) -> ValueError:
    """
    Write why the engine core refuses to start, and return the error to raise.

    vLLM reports to the host only that the core has ended, so the reason is in a file.
    """
    refusal_path(_stats_path(additional_config)).write_text(reason)
    return ValueError(reason)


def refusal_reason(additional_config: Mapping[str, Any]) -> str | None:
    """Reason for which the engine core refused to start; None if it did not refuse."""
    path = refusal_path(_stats_path(additional_config))
    return path.read_text() if path.exists() else None


def refusal_path(stats_path: Path) -> Path:
    """
    Path of the file with the reason of a refusal, next to the engine's shared files.

    The file exists only if the core refused to start.
    """
    return stats_path.with_suffix(".refusal")


def _stats_path(additional_config: Mapping[str, Any]) -> Path:
    return Path(core_settings(additional_config).stats_path)
