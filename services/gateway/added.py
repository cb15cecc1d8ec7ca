"""Endpoints that installed packages add to the gateway."""

from collections.abc import Iterable

from services.gateway.application import OWN_PATHS
from services.gateway.door import ROUTES
from services.gateway.resources import Resource
from services.gateway.state import Gateway
from shared.contracts.errors import SettingsError
from shared.contracts.tenants.keys import Scope
from shared.runtime import extensions


def added_resources(gateway: Gateway, own: Iterable[Resource]) -> tuple[Resource, ...]:
    """
    The resources of all packages with an entry point in the group `headway.routes`.

    Args:
        gateway: Components that all requests share; each function of a package is called with it.
        own: The gateway's resources, whose paths no other may have.

    Raises:
        SettingsError: A function cannot be imported or returns no resource, or a path is taken.
    """
    taken = dict.fromkeys((*ROUTES, *OWN_PATHS), "the gateway")
    taken |= {each.root: "the gateway" for each in own}
    added: list[Resource] = []
    for name in extensions.names(extensions.ROUTES):
        resource: Resource = extensions.make(extensions.ROUTES, name, Resource, gateway)
        place = extensions.where(extensions.ROUTES, name)
        _check(resource, place, taken)
        taken[resource.root] = place
        added.append(resource)
    return tuple(added)


def _check(resource: Resource, place: str, taken: dict[str, str]) -> None:
    root = resource.root
    if not root.startswith("/") or root.endswith("/"):
        raise SettingsError(f"{place}: root {root!r} must begin with a slash, and end without one")
    if resource.scope not in tuple(Scope):
        known = ", ".join(f"Scope.{each.name}" for each in Scope)
        raise SettingsError(f"{place}: scope {resource.scope!r} must be one of {known}")
    for path, holder in taken.items():
        if path == root or path.startswith(f"{root}/") or root.startswith(f"{path}/"):
            raise SettingsError(f"{place}: root {root!r} overlaps {path}, which {holder} serves")
