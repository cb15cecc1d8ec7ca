"""API keys, as they are stored: without the key itself."""

from enum import Enum
from typing import Annotated

from msgspec import Meta, Struct

from shared.contracts.base import TenantId, UnixTime


class Scope(Enum):
    """What a key may be used for."""

    INFERENCE = "inference"
    FILES = "files"
    BATCHES = "batches"
    OPERATOR = "operator"
    """Views of the whole mesh, read only: the console, and usage of all tenants."""
    PROMPTS = "prompts"
    """Prompts of dead letters in the console."""


class ApiKey(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """
    One key. Only its digest is stored: keys that Headway makes are 256 random bits, which
    cannot be guessed from a digest, so that a slow hash would only slow down requests.
    """

    id: Annotated[str, Meta(min_length=1, max_length=64)]
    """Name of the key in commands, logs and lists; not secret."""
    sha256: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
    last: Annotated[str, Meta(max_length=8)] = ""
    """Last characters of the key, to recognize it."""
    tenant: Annotated[TenantId, Meta(min_length=1, max_length=128)]
    scopes: tuple[Scope, ...] = (Scope.INFERENCE, Scope.FILES, Scope.BATCHES)
    created_at: UnixTime = 0.0
    expires_at: UnixTime | None = None
    revoked_at: UnixTime | None = None

    def is_valid(self, now: UnixTime) -> bool:
        """Return whether the key may be used at *now*."""
        expired = self.expires_at is not None and now >= self.expires_at
        return not expired and self.revoked_at is None


class KeyFile(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Content of a file of keys."""

    keys: tuple[ApiKey, ...] = ()
