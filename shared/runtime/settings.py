"""
Settings: one frozen struct per service. Flags override the environment, which overrides a file.

Environment variables are named `HEADWAY_<SERVICE>_<FIELD>`, with `__` between nested fields. Some
fields that all services share are also read from `HEADWAY_<FIELD>`, and the settings of the store
from `HEADWAY_STORE_<FIELD>`. No other code reads the environment.
"""

import math
import re
from codecs import BOM_UTF8
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from shared.contracts.base import NonEmpty
from shared.contracts.errors import SettingsError
from shared.contracts.lanes import LaneLayout

SHARED_FIELDS = ("amqp_url", "registry", "log_level", "layout", "tenants", "stories")
SHARED_GROUPS = ("store",)
"""
Groups of nested fields that the services which have them also read from `HEADWAY_<GROUP>_<FIELD>`.
"""
FieldPath = tuple[str, ...]
"""Names of nested fields, from the outermost one."""
_PLACE = re.compile(r"`\$\.([\w.]+)")
_UNKNOWN = re.compile(r"unknown field `([^`]+)`")
"""Place and name of a field in msgspec's errors."""
_BETWEEN_URLS = re.compile(r"\s*,\s*(?=\w+://)")
DEFAULT_AMQP_URL = "amqp://guest:guest@127.0.0.1:5672/"


class ServiceSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Fields common to all services."""

    amqp_url: NonEmpty = DEFAULT_AMQP_URL
    """
    Broker URL, or the URLs of several nodes of a broker, separated by commas; users and passwords
    are masked when settings are printed.
    """
    registry: NonEmpty = "models.json"
    """Path of the model registry file."""
    layout: LaneLayout = LaneLayout()
    """Division of requests into lanes; all services of a mesh must have the same division."""
    tenants: NonEmpty | None = None
    """
    Path of the file with the policies of tenants, which gateways and planners follow; None: tenants
    have no policies. All services of a mesh must have the same file.
    """
    stories: bool = True
    """
    True: agents and groupers publish a record of each finished request, which estimators keep for
    operators; it has no prompt and no answer.
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


_EMPTY = re.compile(r"Expected `str` of length >= 1 - at `\$\.(.+)`")
S = TypeVar("S", bound=ServiceSettings)
T = TypeVar("T")
G = TypeVar("G", bound=msgspec.Struct)
_NO_VALUES: Mapping[str, object] = {}


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
        SettingsError: A field is unknown, has the wrong type or is out of range, or a number is not
            finite; the message names the source.
    """
    values = {} if file is None else _read_file(file)
    return converted(
        settings_type, service=service, environ=environ, values=values, overrides=overrides
    )


def converted(
    settings_type: type[S],
    *,
    service: str,
    environ: Mapping[str, str],
    values: Mapping[str, Any],
    overrides: Mapping[str, str] | None = None,
) -> S:
    """
    Return the effective settings of the service as `load` does, with *values* for a file's content.

    Raises:
        SettingsError: As for `load`.
    """
    prefix = f"HEADWAY_{service.upper()}_"
    variables: dict[str, FieldPath] = {
        f"HEADWAY_{field.upper()}": (field,)
        for field in SHARED_FIELDS
        if f"HEADWAY_{field.upper()}" in environ
    }
    for group in SHARED_GROUPS:
        if group in settings_type.__struct_fields__:
            variables |= _variables(f"HEADWAY_{group.upper()}_", environ, below=(group,))
    variables |= _variables(prefix, environ)
    given = deepcopy(dict(values))
    for variable, path in variables.items():
        _put(given, path, environ[variable])
    flags: dict[str, FieldPath] = {}
    for key, text in (overrides or {}).items():
        path = flags[f"--set {key}"] = tuple(key.split("."))
        _put(given, path, text)
    place = (
        f"settings of {service}: file, {prefix}* and --set; `headway-{service} check-config` shows "
        "them all"
    )
    return _converted(given, settings_type, place, variables | flags)


def load_group(
    settings_type: type[G],
    *,
    group: str,
    environ: Mapping[str, str],
    overrides: Mapping[str, object] = _NO_VALUES,
) -> G:
    """
    Load the settings of one group that several services share, without those of a service.

    Args:
        settings_type: Type of the group.
        group: Its name; with `store`, the environment prefix is `HEADWAY_STORE_`.
        environ: The process environment.
        overrides: Field -> value.

    Raises:
        SettingsError: A field is unknown, has the wrong type or is out of range, or a number is not
            finite.
    """
    values: dict[str, Any] = {}
    variables = _variables(f"HEADWAY_{group.upper()}_", environ)
    for variable, path in variables.items():
        _put(values, path, environ[variable])
    values |= overrides
    return _converted(values, settings_type, f"settings {group}.*", variables)


def _converted(
    values: Mapping[str, object],
    settings_type: type[T],
    place: str,
    sources: Mapping[str, FieldPath],
) -> T:
    """
    Settings with *values*.

    Args:
        place: Where the values come from.
        sources: Variables and flags -> their fields, for errors.

    Raises:
        SettingsError: A value does not fit its field, or a number is not finite.
    """
    try:
        settings = msgspec.convert(values, settings_type, strict=False)
    except msgspec.ValidationError as error:
        text = str(error)
        names = (found[1] for pattern in (_PLACE, _UNKNOWN) if (found := pattern.search(text)))
        source = _source_of(".".join(names), sources)
        empty = _EMPTY.fullmatch(text)
        problem = text if empty is None else f"{empty[1]} is empty"
        raise SettingsError(f"{source}{problem} ({place})") from error
    for name, value in _leaves(settings):
        if isinstance(value, float) and not math.isfinite(value):
            source = _source_of(name, sources)
            raise SettingsError(f"{source}{name} is {value}: it must be a finite number ({place})")
    return settings


def _leaves(value: object, name: str = "") -> Iterator[tuple[str, object]]:
    """The values in *value* that have no fields, with their dotted names."""
    fields: Iterable[tuple[object, object]]
    if isinstance(value, msgspec.Struct):
        fields = msgspec.structs.asdict(value).items()
    elif isinstance(value, Mapping):
        fields = value.items()
    elif isinstance(value, list | tuple):
        fields = enumerate(value)
    else:
        yield name, value
        return
    for key, each in fields:
        yield from _leaves(each, f"{name}.{key}" if name else str(key))


def masked(settings: msgspec.Struct) -> dict[str, Any]:
    """Return the effective settings as plain data; passwords and other secrets are masked."""
    values: dict[str, Any] = msgspec.to_builtins(settings)
    masked_values: dict[str, Any] = _mask("", values)
    return masked_values


def masked_url(text: str) -> str:
    """Return *text*; if it is a URL, or a list of URLs, without users and passwords."""
    return ",".join(_masked_url(each) for each in _BETWEEN_URLS.split(text))


def _masked_url(text: str) -> str:
    scheme, separator, rest = text.partition("://")
    if not separator or "@" not in rest:
        return text
    return f"{scheme}://***@{rest.rpartition('@')[2]}"


def _mask(key: str, value: Any) -> Any:
    if isinstance(value, dict) and not _is_secret(key):
        return {name: _mask(name, each) for name, each in value.items()}
    if isinstance(value, list | tuple) and not _is_secret(key):
        return [_mask(key, each) for each in value]
    if isinstance(value, str) and "://" in value and "@" in value:
        return masked_url(value)
    return "***" if _is_secret(key) and value else value


def _is_secret(key: str) -> bool:
    return key.endswith(("_key", "_keys", "password", "secret"))


def _read_file(file: Path) -> dict[str, Any]:
    try:
        return msgspec.json.decode(file.read_bytes().removeprefix(BOM_UTF8), type=dict[str, Any])
    except OSError as error:
        raise SettingsError(f"cannot read settings file {file}: {error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"settings file {file}: {error}") from error


def _variables(
    prefix: str, environ: Mapping[str, str], below: FieldPath = ()
) -> dict[str, FieldPath]:
    """The variables with the prefix -> their fields, in the group *below*."""
    return {
        key: (*below, *key.removeprefix(prefix).lower().split("__"))
        for key in sorted(environ)
        if key.startswith(prefix)
    }


def _source_of(field: str, sources: Mapping[str, FieldPath]) -> str:
    """
    The name of the variable or flag with the value of *field*, before an error; empty if it comes
    from a file.
    """
    given = [name for name, path in sources.items() if f"{field}.".startswith(f"{'.'.join(path)}.")]
    return f"{given[-1]}: " if given else ""


def _put(values: dict[str, Any], path: Sequence[str], text: str) -> None:
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
