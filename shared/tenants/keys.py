"""API keys: made, kept in a file, and found by their digest."""

import fcntl
import os
import secrets
import stat
from codecs import BOM_UTF8
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Protocol

import msgspec

from shared.contracts.base import Seconds, TenantId, UnixTime
from shared.contracts.errors import SettingsError
from shared.contracts.tenants.keys import ApiKey, KeyFile, Scope
from shared.store.documents import KEYS
from shared.store.store import Store
from shared.tenants.watched import STORE, Watched, WatchedFile, watched_document

PREFIX = "sk-hw-"
KEY_BYTES = 32
NUM_LAST = 4
SHORT_KEY_CHARS = 24
"""Length below which an imported key is probably weak."""


class KeySource(Protocol):
    """Where API keys come from."""

    def find(self, key: str) -> ApiKey | None:
        """The entry of a key; None if it is unknown. Expired and revoked keys are also found."""
        ...


def digest_of_key(key: str) -> str:
    """The stored form of a key."""
    return sha256(key.encode()).hexdigest()


def decode_keys(path: Path, content: bytes) -> Mapping[str, ApiKey]:
    """
    Digest -> key, of the *content* of the file *path*.

    Raises:
        SettingsError: The content is not valid, or two keys have one id or one digest.
    """
    try:
        file = msgspec.json.decode(content, type=KeyFile)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"keys file {path}: {error}") from error
    found: dict[str, ApiKey] = {}
    ids: set[str] = set()
    for key in file.keys:
        if key.id in ids:
            raise SettingsError(f"keys file {path}: two keys have the id {key.id!r}")
        if key.sha256 in found:
            raise SettingsError(
                f"keys file {path}: {found[key.sha256].id!r} and {key.id!r} are the same key"
            )
        ids.add(key.id)
        found[key.sha256] = key
    return found


def check_mode(path: Path) -> None:
    """
    Check that only the owner can read a file of keys.

    Raises:
        SettingsError: Others have rights on it, or it does not exist.
    """
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
    except OSError as error:
        raise SettingsError(f"cannot read {path}: {error}") from error
    if mode & 0o007:
        raise SettingsError(f"keys file {path} has the mode {mode:o}; others must have no rights")


class KeyWatch:
    """
    Keys that are followed while the process runs.

    Args:
        source: The file or document.
    """

    def __init__(self, source: Watched[Mapping[str, ApiKey]]) -> None:
        self._source = source
        self.apply = source.apply

    def find(self, key: str) -> ApiKey | None:
        """
        The entry of a key.

        Raises:
            StoreUnavailableError: The keys are too old, and the database is away.
        """
        self._source.require()
        # Looked up by digest, so that the time reveals nothing about a key.
        return self._source.value.get(digest_of_key(key))

    @property
    def refused(self) -> str:
        """Error of a newer version, which has no effect."""
        return self._source.refused


def key_file(path: Path) -> KeyWatch:
    """
    The keys of a file.

    Raises:
        SettingsError: The file cannot be read, is invalid, or is readable by all.
    """
    check_mode(path)
    return KeyWatch(WatchedFile(path, decode_keys))


def check_keys(place: str | None) -> None:
    """
    Check the file of keys, if *place* is one.

    Raises:
        SettingsError: As for `key_file`.
    """
    if place not in {None, STORE}:
        key_file(Path(str(place)))


async def open_keys(place: str | None, store: Store | None, *, kept_s: Seconds) -> KeyWatch | None:
    """
    The keys at *place*, a file or `store:`; None without one.

    Raises:
        SettingsError: The keys cannot be read or are invalid, or *place* is `store:` and *store*
            is None.
        StoreUnavailableError: The database does not answer.
    """
    if place is None:
        return None
    if place != STORE:
        return key_file(Path(place))
    return KeyWatch(await watched_document(store, KEYS, decode_keys, kept_s=kept_s))


class SettingsKeys:
    """
    The keys of the setting `api_keys`: they never expire, and may be used for everything but views
    of the whole mesh.

    Args:
        api_keys: Key -> tenant.
    """

    def __init__(self, api_keys: Mapping[str, str]) -> None:
        self._keys = {
            digest: ApiKey(id=f"settings-{number}", sha256=digest, tenant=TenantId(tenant))
            for number, (key, tenant) in enumerate(api_keys.items())
            if (digest := digest_of_key(key))
        }

    def find(self, key: str) -> ApiKey | None:
        """The entry of a key."""
        return self._keys.get(digest_of_key(key))


@dataclass(slots=True)
class KeyEdit:
    """Changes of a file of keys, which are written when the context ends without an error."""

    keys: list[ApiKey] = field(default_factory=list)

    def create(
        self,
        *,
        tenant: TenantId,
        scopes: tuple[Scope, ...],
        now: UnixTime,
        lifetime_s: Seconds | None = None,
    ) -> tuple[ApiKey, str]:
        """Make a key; return its entry and the key, which is stored nowhere."""
        key = PREFIX + secrets.token_urlsafe(KEY_BYTES)
        entry = ApiKey(
            id=f"key-{secrets.token_hex(4)}",
            sha256=digest_of_key(key),
            last=key[-NUM_LAST:],
            tenant=tenant,
            scopes=scopes,
            created_at=now,
            expires_at=None if lifetime_s is None else now + lifetime_s,
        )
        self.keys.append(entry)
        return entry, key

    def add(self, key: str, tenant: TenantId, now: UnixTime) -> ApiKey | None:
        """Import a key that others made; None if the file has it."""
        digest = digest_of_key(key)
        if any(each.sha256 == digest for each in self.keys):
            return None
        # The last characters of a key that a person chose would say too much about it.
        entry = ApiKey(
            id=f"key-{secrets.token_hex(4)}", sha256=digest, tenant=tenant, created_at=now
        )
        self.keys.append(entry)
        return entry

    def rotate(self, key_id: str, *, overlap_s: Seconds, now: UnixTime) -> tuple[ApiKey, str]:
        """
        Make a key that replaces another one, which ends after *overlap_s*.

        Raises:
            SettingsError: The id is unknown, or the key is not valid any more.
        """
        old = self._valid(key_id, now)
        ends_at = now + overlap_s
        if old.expires_at is not None:
            ends_at = min(ends_at, old.expires_at)
        lifetime_s = None if old.expires_at is None else old.expires_at - old.created_at
        self._replace(msgspec.structs.replace(old, expires_at=ends_at))
        return self.create(tenant=old.tenant, scopes=old.scopes, now=now, lifetime_s=lifetime_s)

    def revoke(self, key_id: str, now: UnixTime) -> ApiKey:
        """
        End a key now.

        Raises:
            SettingsError: The id is unknown, or the key is not valid any more.
        """
        revoked = msgspec.structs.replace(self._valid(key_id, now), revoked_at=now)
        self._replace(revoked)
        return revoked

    def _valid(self, key_id: str, now: UnixTime) -> ApiKey:
        found = next((each for each in self.keys if each.id == key_id), None)
        if found is None:
            raise SettingsError(f"no key has the id {key_id!r}")
        if not found.is_valid(now):
            raise SettingsError(f"key {key_id} is expired or revoked")
        return found

    def _replace(self, key: ApiKey) -> None:
        self.keys[[each.id for each in self.keys].index(key.id)] = key


def encode_keys(keys: Sequence[ApiKey]) -> bytes:
    """The content of a file or document with *keys*."""
    return msgspec.json.format(msgspec.json.encode(KeyFile(keys=tuple(keys))))


def read_keys(path: Path) -> tuple[ApiKey, ...]:
    """
    The keys of a file, in its order.

    Raises:
        SettingsError: The file cannot be read, or is invalid.
    """
    try:
        content = path.read_bytes().removeprefix(BOM_UTF8)
    except OSError as error:
        raise SettingsError(f"cannot read {path}: {error}") from error
    return tuple(decode_keys(path, content).values())


@contextmanager
def key_edit(path: Path) -> Iterator[KeyEdit]:
    """
    Context in which the file of keys *path* is edited by this process alone. A missing file is
    made. It is replaced at once as a whole, and only its owner can read it.

    Raises:
        SettingsError: The file cannot be read or written, or is invalid.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(path.with_name(f".{path.name}.lock"), os.O_CREAT | os.O_RDWR, 0o600)
    except OSError as error:
        raise SettingsError(f"cannot write {path}: {error}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        edit = KeyEdit(list(read_keys(path)) if path.exists() else [])
        yield edit
        _write(path, encode_keys(edit.keys))
    finally:
        os.close(lock)


def _write(path: Path, content: bytes) -> None:
    made = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with os.fdopen(os.open(made, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        made.replace(path)
    except OSError as error:
        raise SettingsError(f"cannot write {path}: {error}") from error
