"""Policies of tenants, from a file `tenants.json`."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import msgspec

from shared.contracts.base import TenantId
from shared.contracts.errors import SettingsError
from shared.contracts.tenants.policies import TenantPolicy, TenantsState
from shared.models.watch import PERIOD_S
from shared.runtime.tasks import every
from shared.tenants.watched_file import WatchedFile

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


class PolicyFile:
    """
    The policies of a file, which are followed while the process runs.

    Args:
        path: The file.

    Raises:
        SettingsError: The file cannot be read, or is invalid.
    """

    def __init__(self, path: Path) -> None:
        self._file = WatchedFile(path, decode_policies)

    def policy(self, tenant: TenantId) -> TenantPolicy:
        """The policy of a tenant, by the last valid version of the file."""
        return self._file.value.policy(tenant)

    @property
    def state(self) -> TenantsState:
        """Version of the file that is in effect, and the error of a newer one."""
        return TenantsState(digest=self._file.digest, refused=self._file.refused)

    async def follow(self, stop: asyncio.Event) -> None:
        """Follow changes of the file until *stop*."""
        await every(PERIOD_S, self._file.apply, stop=stop)


def open_policies(path: str | None) -> PolicyFile | Policies:
    """
    The policies of a file; without one, everything is allowed to all tenants.

    Raises:
        SettingsError: The file cannot be read, or is invalid.
    """
    return Policies() if path is None else PolicyFile(Path(path))


async def follow_policies(policies: PolicyFile | Policies, stop: asyncio.Event) -> None:
    """Follow the file of the policies, if they have one, until *stop*."""
    if isinstance(policies, PolicyFile):
        await policies.follow(stop)
