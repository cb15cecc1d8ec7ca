"""Policies of tenants, from a file `tenants.json` or from the store."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import msgspec

from shared.contracts.base import Seconds, TenantId
from shared.contracts.errors import SettingsError
from shared.contracts.tenants.policies import TenantPolicy, TenantsState
from shared.models.watch import PERIOD_S
from shared.runtime.tasks import every
from shared.store.documents import TENANTS
from shared.store.store import Store
from shared.tenants.watched import STORE, Watched, WatchedFile, watched_document

MAX_TENANT_CHARS = 128


class PolicySource(Protocol):
    """Where the policies of tenants come from."""

    def policy(self, tenant: TenantId) -> TenantPolicy:
        """The policy of a tenant, which may be unknown."""
        ...

    @property
    def state(self) -> TenantsState:
        """Version of the policies."""
        ...


@dataclass(frozen=True, slots=True)
class Policies:
    """Policies by tenant."""

    default: TenantPolicy = field(default_factory=TenantPolicy)
    """Policy of tenants that are not listed."""
    tenants: Mapping[TenantId, TenantPolicy] = field(default_factory=dict)

    def policy(self, tenant: TenantId) -> TenantPolicy:
        """The policy of a tenant."""
        return self.tenants.get(tenant, self.default)

    @property
    def state(self) -> TenantsState:
        """The state of policies that come from no file."""
        return TenantsState(digest="")


class _File(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Content of the file; policies are decoded one by one, so that errors name the tenant."""

    default: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    tenants: dict[str, msgspec.Raw] = {}


def decode_policies(path: Path, content: bytes) -> Policies:
    """
    The policies in the *content* of the file *path*.

    Raises:
        SettingsError: The content is not valid JSON, has an unknown field, or a limit is out of
            range; the message names tenant and field.
    """
    try:
        file = msgspec.json.decode(content, type=_File)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"tenants file {path}: {error}") from error
    default = TenantPolicy()
    if file.default is not msgspec.UNSET:
        default = _policy(path, "default", file.default)
    tenants: dict[TenantId, TenantPolicy] = {}
    for name, raw in file.tenants.items():
        if not 1 <= len(name) <= MAX_TENANT_CHARS:
            raise SettingsError(
                f"tenants file {path}: tenant {name[:MAX_TENANT_CHARS]!r}: a name must have 1 to "
                f"{MAX_TENANT_CHARS} characters"
            )
        tenants[TenantId(name)] = _policy(path, f"tenant {name!r}", raw)
    return Policies(default, tenants)


def _policy(path: Path, whose: str, raw: msgspec.Raw) -> TenantPolicy:
    try:
        policy = msgspec.json.decode(raw, type=TenantPolicy)
    except msgspec.DecodeError as error:
        raise SettingsError(f"tenants file {path}: {whose}: {error}") from error
    if policy.min_priority > policy.max_priority:
        raise SettingsError(
            f"tenants file {path}: {whose}: min_priority is {policy.min_priority}, more than "
            f"max_priority, which is {policy.max_priority}"
        )
    return policy


class WatchedPolicies:
    """
    Policies that are followed while the process runs.

    Args:
        source: The file or document.
    """

    def __init__(self, source: Watched[Policies]) -> None:
        self._source = source

    def policy(self, tenant: TenantId) -> TenantPolicy:
        """The policy of a tenant, by the last valid version."""
        return self._source.value.policy(tenant)

    @property
    def state(self) -> TenantsState:
        """Version that is in effect, and the error of a newer one."""
        return TenantsState(digest=self._source.digest, refused=self._source.refused)

    async def follow(self, stop: asyncio.Event) -> None:
        """Follow changes until *stop*."""
        await every(PERIOD_S, self._source.apply, stop=stop)


def check_policies(place: str | None) -> None:
    """
    Check the file of policies, if *place* is one.

    Raises:
        SettingsError: The file cannot be read, or is invalid.
    """
    if place not in {None, STORE}:
        WatchedFile(Path(str(place)), decode_policies)


async def open_policies(
    place: str | None, store: Store | None = None, *, kept_s: Seconds = 0.0
) -> WatchedPolicies | Policies:
    """
    The policies at *place*; without one, everything is allowed to all tenants.

    Args:
        place: A file, or `store:`.
        store: The store of the process.
        kept_s: See `WatchedDocument`.

    Raises:
        SettingsError: The policies cannot be read or are invalid, or *place* is `store:` and
            *store* is None.
        StoreUnavailableError: The database does not answer.
    """
    if place is None:
        return Policies()
    if place != STORE:
        return WatchedPolicies(WatchedFile(Path(place), decode_policies))
    return WatchedPolicies(await watched_document(store, TENANTS, decode_policies, kept_s=kept_s))


async def follow_policies(policies: WatchedPolicies | Policies, stop: asyncio.Event) -> None:
    """Follow the place of the policies, if they have one, until *stop*."""
    if isinstance(policies, WatchedPolicies):
        await policies.follow(stop)
