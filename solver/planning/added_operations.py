"""LLM serving operations that installed packages add; operators order them by name."""

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, fields
from typing import Any

import msgspec

from solver.planning.lso.operations import Lso
from solver.planning.lso.results import LsoRefusedError, LsoResult


@dataclass(frozen=True, slots=True, kw_only=True)
class AddedOperation:
    """
    An operation of a package.

    Raises:
        TypeError: `lso` is not a kind of operation, or `steps` is not callable.
    """

    lso: type[Lso]
    """Kind of the operation; its own fields are the arguments of an order."""
    steps: Callable[[Any, Any], Generator[Any, Any, LsoResult]]
    """
    Steps on the state of an instance, as in `solver.instance.operations.STEPS`: they yield commands
    and conditions, and have no IO and no clock.
    """

    def __post_init__(self) -> None:
        if not (isinstance(self.lso, type) and issubclass(self.lso, Lso)):
            raise TypeError(f"lso must be a subclass of Lso, not {self.lso!r}")
        if not callable(self.steps):
            raise TypeError(f"steps must be a function, not {self.steps!r}")

    def ordered(self, arguments: Mapping[str, str]) -> Lso:
        """
        The operation with the arguments of an order.

        Raises:
            LsoRefusedError: An argument is unknown, missing or invalid; the message names it.
        """
        kind = self.lso.kind
        own = {each.name for each in fields(self.lso)} - {each.name for each in fields(Lso)}
        if unknown := sorted(arguments.keys() - own):
            known = f"its arguments are {', '.join(sorted(own))}" if own else "it has none"
            raise LsoRefusedError(f"{kind} has no argument {unknown[0]!r}; {known}")
        try:
            return msgspec.convert(dict(arguments), self.lso, strict=False)
        except msgspec.ValidationError as error:
            raise LsoRefusedError(f"{kind}: {error}") from error


def added_operation(operations: Mapping[str, AddedOperation], name: str) -> AddedOperation:
    """
    The operation called *name*.

    Raises:
        LsoRefusedError: There is none; the message lists all.
    """
    found = operations.get(name)
    if found is None:
        known = f"it has {', '.join(sorted(operations))}" if operations else "it has none"
        raise LsoRefusedError(
            f"no package of this agent adds an operation {name!r}; {known}. Packages add them by "
            "entry points in the group headway.operations"
        )
    return found
