"""Settings of Headway's scheduler in the engine core, passed in vLLM's `additional_config`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import msgspec

from services.agent.backends.policies import SchedulingSettings
from shared.contracts.base import Seconds
from shared.contracts.estimates import LatencyCoefficients

CONFIG_KEY = "headway"
"""Key of Headway's part of `additional_config`."""


class CoreSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of one engine core."""

    stats_path: str
    """File of the engine's `StatsWriter`."""
    policy: str
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


class Uncompiled:
    """
    vLLM's `additional_config` with content that does not change the compiled model.

    vLLM hashes an `additional_config` into the key of its cache of compiled models, a dict with its
    content. The content has a path of each engine, so that no engine would find the compiled model
    of an earlier one.
    """

    def __init__(self, content: Mapping[str, Any]) -> None:
        self._content = dict(content)

    def __getitem__(self, key: str) -> Any:
        return self._content[key]

    def compute_hash(self) -> str:
        """Key of the content for vLLM; the same for all engines."""
        return CONFIG_KEY


class AdditionalConfig(Protocol):
    """What vLLM accepts as `additional_config`: a dict, or `Uncompiled`."""

    def __getitem__(self, key: str, /) -> Any: ...


def core_settings(additional_config: AdditionalConfig) -> CoreSettings:
    """Headway's part of *additional_config*."""
    return msgspec.convert(additional_config[CONFIG_KEY], CoreSettings)


def refusal(additional_config: AdditionalConfig, reason: str) -> ValueError:
    """
    Write why the engine core refuses to start, and return the error to raise.

    vLLM reports to the host only that the core has ended, so the reason is in a file.
    """
    refusal_path(_stats_path(additional_config)).write_text(reason)
    return ValueError(reason)


def refusal_reason(additional_config: AdditionalConfig) -> str | None:
    """Reason for which the engine core refused to start; None if it did not refuse."""
    path = refusal_path(_stats_path(additional_config))
    return path.read_text() if path.exists() else None


def refusal_path(stats_path: Path) -> Path:
    """
    Path of the file with the reason of a refusal, next to the engine's shared files.

    The file exists only if the core refused to start.
    """
    return stats_path.with_suffix(".refusal")


def _stats_path(additional_config: AdditionalConfig) -> Path:
    return Path(core_settings(additional_config).stats_path)
