"""
What installed packages add to Headway: named objects in four groups of entry points.

Names of Headway's own are looked up first, so that no package replaces them.
"""

from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar

from shared.contracts.errors import SettingsError

T = TypeVar("T")
ENGINES = "headway.engines"
"""Functions `(entries, options, clock) -> EngineBackend`."""
POLICIES = "headway.policies"
"""Functions `(latency) -> SchedulingPolicy`."""
OPERATIONS = "headway.operations"
"""Objects of the type `AddedOperation`."""
ROUTES = "headway.routes"
"""Functions `(gateway) -> Resource`."""


def names(group: str) -> tuple[str, ...]:
    """Names that installed packages have in *group*, sorted."""
    return tuple(sorted({each.name for each in entry_points(group=group)}))


def load(group: str, name: str) -> Any:
    """
    Import the object that a package has under *name*, which is one of `names(group)`.

    Raises:
        SettingsError: Two packages have the name, or the object cannot be imported.
    """
    found = {each.value: each for each in entry_points(group=group, name=name)}
    if len(found) > 1:
        packages = " and ".join(sorted(map(_package, found.values())))
        raise SettingsError(f"{group}: {packages} both have {name!r}; uninstall one of them")
    (entry,) = found.values()
    try:
        return entry.load()
    except Exception as error:  # the code of a package may raise anything
        raise SettingsError(f"{where(group, name)} cannot be imported: {error!r}") from error


def make(group: str, name: str, protocol: type, *arguments: Any) -> Any:
    """
    Call the function that a package has under *name*, and check what it returns.

    Args:
        group: Group of entry points.
        name: One of `names(group)`.
        protocol: The result has all public members of this protocol.
        arguments: Arguments of the function.

    Raises:
        SettingsError: As for `load`; or the object is not a function, or a member is missing.
    """
    function: Callable[..., Any] = load(group, name)
    if not callable(function):
        raise SettingsError(f"{where(group, name)} is not callable: {function!r}")
    made = function(*arguments)
    members = [each for each in vars(protocol) if not each.startswith("_")]
    missing = [each for each in members if not hasattr(made, each)]
    if missing:
        raise SettingsError(
            f"{where(group, name)} returns {type(made).__name__}, which does not fit "
            f"{protocol.__name__}: it lacks {', '.join(missing)}"
        )
    return made


def load_all(group: str, kind: type[T]) -> dict[str, T]:
    """
    Import the objects of all packages in *group*, by their names.

    Raises:
        SettingsError: As for `load`; or an object is not of type *kind*.
    """
    found = {name: load(group, name) for name in names(group)}
    for name, each in found.items():
        if not isinstance(each, kind):
            raise SettingsError(f"{where(group, name)} must be of type {kind.__name__}: {each!r}")
    return found


def where(group: str, name: str) -> str:
    """The entry point of *name* in words, for messages."""
    entry = next(iter(entry_points(group=group, name=name)))
    return f"{group} {name!r} ({entry.value}, of {_package(entry)})"


def _package(entry: EntryPoint) -> str:
    return "an unknown package" if entry.dist is None else str(entry.dist.name)
