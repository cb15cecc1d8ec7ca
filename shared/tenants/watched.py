"""Content of operators whose last valid version is in effect while a process runs."""

from codecs import BOM_UTF8
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

import structlog

from shared.contracts.base import Seconds
from shared.contracts.errors import SettingsError, StoreUnavailableError
from shared.models.registry import digest_of
from shared.runtime.clock import Clock, SystemClock
from shared.store.store import Store

log = structlog.get_logger()
T = TypeVar("T")
STORE = "store:"
"""Stands for the store's document in settings that otherwise name a file."""


class Watched(Generic[T]):
    """
    The last valid version of some content; an invalid one has no effect.

    The content is compared, since a file that is replaced by a link may keep its time.

    Args:
        place: Where the content comes from, for errors.
        decode: Reads the content.
        content: The first version.

    Raises:
        SettingsError: The first version is invalid.
    """

    def __init__(self, place: Path, decode: Callable[[Path, bytes], T], content: bytes) -> None:
        self.place = place
        self._decode = decode
        self.value = decode(place, content)
        """The last valid content."""
        self.digest = self._seen = digest_of(content)
        """Digest of the content in effect."""
        self.refused = ""
        """Error of a newer version, which has no effect."""

    async def apply(self) -> None:
        """Read the content again, and use it if it has changed and is valid."""
        try:
            content = await self._read()
            if (digest := digest_of(content)) == self._seen:
                if digest == self.digest:
                    self.refused = ""
                return
            self._seen = digest
            self.value = self._decode(self.place, content)
        except SettingsError as error:
            if self.refused != str(error):
                log.warning("file.refused", path=str(self.place), error=str(error))
            self.refused = str(error)
            return
        self.digest, self.refused = digest, ""
        log.info("file.changed", path=str(self.place), digest=digest)

    def require(self) -> None:
        """
        Check that the content may still be used.

        Raises:
            StoreUnavailableError: It is too old, and its place cannot be read.
        """

    async def _read(self) -> bytes:
        """
        The content of now.

        Raises:
            SettingsError: It cannot be read.
        """
        raise NotImplementedError


class WatchedFile(Watched[T]):
    """
    The content of a file.

    Args:
        path: The file.
        decode: Reads the content.

    Raises:
        SettingsError: The file cannot be read, or is invalid.
    """

    def __init__(self, path: Path, decode: Callable[[Path, bytes], T]) -> None:
        super().__init__(path, decode, read_file(path))

    async def _read(self) -> bytes:
        return read_file(self.place)


class WatchedDocument(Watched[T]):
    """
    A document of the store; while the database is away, its last version is used for a time.

    Args:
        store: The store.
        name: Name of the document.
        decode: Reads the content.
        content: The first version.
        kept_s: Time for which a version is used without another look at the database.
        clock: Wall time.

    Raises:
        SettingsError: The document is invalid.
    """

    def __init__(
        self,
        store: Store,
        name: str,
        decode: Callable[[Path, bytes], T],
        content: bytes,
        *,
        kept_s: Seconds,
        clock: Clock | None = None,
    ) -> None:
        super().__init__(Path(f"{STORE}{name}"), decode, content)
        self._store = store
        self._name = name
        self._kept_s = kept_s
        self._clock = clock or SystemClock()
        self._read_at = self._clock.now()

    def require(self) -> None:
        age_s = self._clock.now() - self._read_at
        if age_s > self._kept_s:
            raise StoreUnavailableError(
                f"the document {self._name!r} of the store was read {age_s:.0f} s ago, and may be "
                f"used for {self._kept_s:g} s (store.documents_kept_s) without the database"
            )

    async def apply(self) -> None:
        """Read the document again; while the database is away, nothing changes."""
        try:
            self._store.require()
            await super().apply()
        except StoreUnavailableError as error:
            log.debug("document.not_read", name=self._name, error=str(error))

    async def _read(self) -> bytes:
        content = await read_document(self._store, self._name)
        self._read_at = self._clock.now()
        return content


def read_file(path: Path) -> bytes:
    """
    Content of *path*.

    Raises:
        SettingsError: The file cannot be read.
    """
    try:
        return path.read_bytes().removeprefix(BOM_UTF8)
    except OSError as error:
        raise SettingsError(f"cannot read {path}: {error}") from error


async def read_document(store: Store, name: str) -> bytes:
    """
    Content of the store's document *name*; a document that does not exist is an empty object.

    Raises:
        StoreUnavailableError: The database does not answer.
    """
    found = await store.documents.get(name)
    return b"{}" if found is None else found.content


async def watched_document(
    store: Store | None, name: str, decode: Callable[[Path, bytes], T], *, kept_s: Seconds
) -> WatchedDocument[T]:
    """
    The store's document *name*, as it is now.

    Raises:
        SettingsError: There is no store, or the document is invalid.
        StoreUnavailableError: The database does not answer.
    """
    if store is None:
        raise SettingsError(f"{STORE} needs a store: set store.data_dir or store.url")
    store.require()
    content = await read_document(store, name)
    return WatchedDocument(store, name, decode, content, kept_s=kept_s)
