"""A file whose last valid content is in effect while a process runs."""

from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

import structlog

from shared.contracts.errors import SettingsError
from shared.models.registry import digest_of

log = structlog.get_logger()
T = TypeVar("T")


class WatchedFile(Generic[T]):
    """
    Reads a file again when its content has changed; an invalid version has no effect.

    The content is compared, since a file that is replaced by a link may keep its time.

    Args:
        path: The file.
        decode: Reads the content.

    Raises:
        SettingsError: The file cannot be read, or is invalid.
    """

    def __init__(self, path: Path, decode: Callable[[Path, bytes], T]) -> None:
        self._path = path
        self._decode = decode
        content = read_file(path)
        self.value = decode(path, content)
        """The last valid content."""
        self.digest = self._seen = digest_of(content)
        """Digest of the content in effect."""
        self.refused = ""
        """Error of a newer version, which has no effect."""

    async def apply(self) -> None:
        """Read the file if its content has changed."""
        try:
            content = read_file(self._path)
            if (digest := digest_of(content)) == self._seen:
                if digest == self.digest:
                    self.refused = ""
                return
            self._seen = digest
            self.value = self._decode(self._path, content)
        except SettingsError as error:
            if self.refused != str(error):
                log.warning("file.refused", path=str(self._path), error=str(error))
            self.refused = str(error)
            return
        self.digest, self.refused = digest, ""
        log.info("file.changed", path=str(self._path), digest=digest)


def read_file(path: Path) -> bytes:
    """
    Content of *path*.

    Raises:
        SettingsError: The file cannot be read.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise SettingsError(f"cannot read {path}: {error}") from error
