"""
Settings: one frozen struct per service. Flags override the environment, which overrides a file.

Environment variables are named `HEADWAY_<SERVICE>_<FIELD>`, with `__` between nested fields. Some
fields that all services share are also read from `HEADWAY_<FIELD>`. No other code reads the
environment.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from shared.contracts.errors import SettingsError
from shared.contracts.lanes import LaneLayout

SHARED_FIELDS = ("amqp_url", "registry", "log_level", "layout", "tenants")
DEFAULT_AMQP_URL = "amqp://guest:guest@127.0.0.1:5672/"


class ServiceSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Fields common to all services."""

    amqp_url: str = DEFAULT_AMQP_URL
    """Broker URL; its user and password are masked when settings are printed."""
    registry: str = "models.json"
    """Path of the model registry file."""
    layout: LaneLayout = LaneLayout()
    """Division of requests into lanes; all services of a mesh must have the same division."""
    tenants: str | None = None
    """
    Path of the file with the policies of tenants, which gateways and planners follow; None: tenants
    have no policies. All services of a mesh must have the same file.
    """
    log_level: Annotated[str, Meta(pattern="^(debug|info|warning|error)$")] = "info"
    health_host: str = "127.0.0.1"
    health_port: Annotated[int, Meta(ge=0, le=65535)] = 0
    """HTTP port of /health, /ready and /metrics; 0 disables the server."""
    drain_timeout_s: Annotated[float, Meta(ge=0)] = 20.0
    """Time limit for requests in progress after the first stop signal to the service."""

    @property
    def health_address(self) -> tuple[str, int]:
        """Host and port of /health and /ready; if the server is disabled, the port is 0."""
        return self.health_host, self.health_port


S = TypeVar("S", bound=ServiceSettings)


def load(
    settings_type: type[S],
    *,
    service: str,
    environ: Mapping[str, str],
    file: Path | None = None,
    overrides: Mapping[str, str] | None = None,
) -> S:
    """
    Load the service's effective settings.

    Args:
        settings_type: Type of the settings.
        service: Name of the service; with `agent`, the environment prefix is `HEADWAY_AGENT_`.
        environ: The process environment.
        file: JSON file with the same field names.
        overrides: Values of `--set`, by dotted field names.

    Raises:
        SettingsError: A field is unknown, has the wrong type or is out of range; the message names
            the source.
    """
    values: dict[str, Any] = {} if file is None else _read_file(file)
    prefix = f"HEADWAY_{service.upper()}_"
    for field in SHARED_FIELDS:
        if (text := environ.get(f"HEADWAY_{field.upper()}")) is not None:
            values[field] = text
    for key, text in sorted(environ.items()):
        if key.startswith(prefix):
            _put(values, key.removeprefix(prefix).lower().split("__"), text)
    for key, text in (overrides or {}).items():
        _put(values, key.split("."), text)
    try:
        return msgspec.convert(values, settings_type, strict=False)
    except msgspec.ValidationError as error:
        raise SettingsError(
            f"{error} (settings of {service}: file, {prefix}* and --set; "
            f"`headway-{service} check-config` shows them all)"
        ) from error


def masked(settings: msgspec.Struct) -> dict[str, Any]:
    """Return the effective settings as plain data; passwords and other secrets are masked."""
    values: dict[str, Any] = msgspec.to_builtins(settings)
    masked_values: dict[str, Any] = _mask("", values)
    return masked_values


def masked_url(text: str) -> str:
    """Return *text*; if it is a URL, without its user and password."""
    scheme, separator, rest = text.partition("://")
    if not separator or "@" not in rest:
        return text
    return f"{scheme}://***@{rest.rpartition('@')[2]}"


def _mask(key: str, value: Any) -> Any:
    if isinstance(value, dict) and not _is_secret(key):
        return {name: _mask(name, each) for name, each in value.items()}
    if isinstance(value, str) and "://" in value and "@" in value:
        return masked_url(value)
    return "***" if _is_secret(key) and value else value


def _is_secret(key: str) -> bool:
    return key.endswith(("_key", "_keys", "password"))


def _read_file(file: Path) -> dict[str, Any]:
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
    except OSError as error:
        raise SettingsError(f"cannot read settings file {file}: {error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"settings file {file}: {error}") from error


def _put(values: dict[str, Any], path: list[str], text: str) -> None:
    for name in path[:-1]:
        values = values.setdefault(name, {})
        if not isinstance(values, dict):
            raise SettingsError(f"{'.'.join(path)}: {name} has no fields; it is set to {values!r}")
    values[path[-1]] = _parsed(text)


def _parsed(text: str) -> Any:
    # Lists and objects are given as JSON; other values stay text for lenient conversion.
    if text[:1] in ("[", "{"):
        try:
            return msgspec.json.decode(text)
        except msgspec.DecodeError:
            return text
    return text
