"""Types of options that several verbs of `headway` have."""

import os
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from shared.contracts.errors import ContractError
from shared.runtime.options import read_by
from shared.tenants.usage_questions import parse_duration, parse_time

AmqpUrl = Annotated[
    str,
    # The help shows neither the default nor the variable's value: a URL may contain a password.
    Parameter(
        env_var="HEADWAY_AMQP_URL",
        show_env_var=False,
        show_default=False,
        metavar="URL",
        help="URL of the mesh's broker, or of each of its nodes, separated by commas; default: "
        "HEADWAY_AMQP_URL, else the local broker.",
    ),
]
File = Annotated[Path, Parameter(metavar="FILE")]
Folder = Annotated[Path, Parameter(metavar="DIR")]
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
