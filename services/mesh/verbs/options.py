"""Types of options that several verbs of `headway` have."""

import os
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

from cyclopts import Parameter

from shared.contracts.errors import ContractError, SettingsError
from shared.runtime.options import path_or_url, read_by
from shared.tenants.usage_questions import parse_duration, parse_time

AMQP_VARIABLE = "HEADWAY_AMQP_URL"
# The help shows neither the default nor the variable's value: a URL may contain a password.
_BROKER: dict[str, Any] = {
    "env_var": AMQP_VARIABLE,
    "show_env_var": False,
    "show_default": False,
    "metavar": "URL",
    "help": "URL of the mesh's broker, or of each of its nodes, separated by commas; default: "
    f"{AMQP_VARIABLE}, else the local broker.",
}
AmqpUrl = Annotated[str, path_or_url(str, **_BROKER)]
UncheckedAmqpUrl = Annotated[str, Parameter(**_BROKER)]
"""The same, also empty: for a verb with another option that takes precedence."""
DEFAULT_GATEWAY = "http://127.0.0.1:8000"
DATA_DIR = ".headway/data"
"""Directory of the store without another one."""
Tenant = Annotated[str, Parameter(metavar="NAME", help="Only this tenant; default: all.")]


def _time(text: str) -> str:
    try:
        parse_time(text, 0.0, param="the value")
    except ContractError as error:
        raise ValueError(str(error)) from error
    return text


def _duration(text: str) -> str:
    try:
        parse_duration(text, param="the value")
    except ContractError as error:
        raise ValueError(str(error)) from error
    return text


TimeText = Annotated[str, read_by(_time, metavar="TIME")]
"""A date, Unix seconds, or a duration before now."""
DurationText = Annotated[str, read_by(_duration, metavar="DURATION")]
"""A duration such as `90d`."""


def file_of(variable: str) -> Path | None:
    """The file that an environment variable names, as for single services."""
    text = os.environ.get(variable)
    return Path(text) if text else None


def gateway_address(text: str) -> str:
    """
    Address of the gateway in *text*, which may end with `/v1` as addresses of OpenAI's API do.

    Raises:
        SettingsError: The text is not an HTTP address.
    """
    try:
        parts = urlsplit(text)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname)
        is_address = is_address and parts.port != 0
    except ValueError:
        is_address = False
    if not is_address:
        raise SettingsError(f"--url is {text!r}; it must be an address such as {DEFAULT_GATEWAY}")
    return text.rstrip("/").removesuffix("/v1") + "/"
