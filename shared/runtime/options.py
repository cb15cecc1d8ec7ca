"""Types of options that several programs have."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

from cyclopts import CoercionError, CycloptsError, Parameter, Token

T = TypeVar("T")

LOADED = Parameter(parse=False)
"""Marks a parameter of a service's verb that gets the settings, not a part of the command line."""
AsJson = Annotated[bool, LOADED]
"""True if a service's verb prints JSON; the option belongs to all verbs of services."""
JsonOption = Annotated[bool, Parameter(name="--json", help="Machine-readable output.")]


def read_by(read: Callable[[str], T], **options: Any) -> Parameter:
    """
    Option whose value *read* makes from the text; if the option is repeated, from the last one.

    Args:
        read: Raises ValueError if the text does not fit; the message of the option has its text.
        options: Further properties of the option.
    """

    def convert(_type: Any, tokens: Sequence[Token]) -> T:
        token = tokens[-1]
        try:
            return read(token.value)
        except ValueError as error:
            raise CoercionError(msg=str(error), token=token) from error

    return Parameter(converter=convert, n_tokens=1, accepts_keys=False, **options)


def path_or_url(read: Callable[[str], T], **options: Any) -> Parameter:
    """Option with a path or URL, as `read_by`; an empty one would be the current directory."""

    def convert(_type: Any, tokens: Sequence[Token]) -> T:
        token = tokens[-1]
        if not token.value.strip():
            raise CycloptsError(msg=f"{token.keyword or 'an argument'} is empty")
        return read(token.value)

    return Parameter(converter=convert, n_tokens=1, accepts_keys=False, **options)


def whole(*, least: int | None = None, most: int | None = None) -> Parameter:
    """Option with an integer within bounds."""

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise ValueError(f"{text!r} is not an integer") from None
        if least is not None and value < least:
            raise ValueError(f"{value} is below {least}")
        if most is not None and value > most:
            raise ValueError(f"{value} is above {most}")
        return value

    return read_by(read, metavar="N")


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a number of seconds") from None
    if not 0 <= value < math.inf:
        raise ValueError(f"{value} is not a duration: must be finite and not negative")
    return value


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a number") from None
    if not math.isfinite(value):
        raise ValueError(f"{value} is not a finite number")
    return value


IntegerOption = Annotated[int, whole()]
"""Integer; unlike cyclopts' own, a number with a point is refused and not rounded."""
NumberOption = Annotated[float, read_by(_number, metavar="NUMBER")]
"""Finite number."""
SecondsOption = Annotated[float, read_by(_seconds, metavar="SECONDS")]
"""Finite duration in seconds that is not negative."""
Positive = Annotated[int, whole(least=1)]
"""Integer of at least 1."""
LAST_PORT = 65535
Port = Annotated[int, whole(least=1, most=LAST_PORT)]
File = Annotated[Path, path_or_url(Path, metavar="FILE")]
Folder = Annotated[Path, path_or_url(Path, metavar="DIR")]
Name = Annotated[str, Parameter(metavar="NAME")]
