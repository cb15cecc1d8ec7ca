"""
Bodies of files in a folder of any fsspec file system: `bodies/<folder>/<id>` when complete,
`uploads/<id>` while they are written.

fsspec blocks, so every call runs in one of the threads of this module, which share no pool with
the rest of the process.
"""

import asyncio
import contextlib
import hashlib
import os
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import fsspec
from fsspec.implementations.local import LocalFileSystem

from shared.contracts.base import Seconds
from shared.contracts.errors import SettingsError, StoreFullError, StoreUnavailableError
from shared.store.database import FULL_DISK
from shared.store.ids import folder_of, is_file_id, is_folder
from shared.store.location import PRIVATE

BODIES, UPLOADS, MARKER = "bodies", "uploads", "headway-store"
BLOCK_BYTES = 2**20
"""Size of one write and one read."""
NUM_THREADS = 8

T = TypeVar("T")


class MissingBodyError(StoreUnavailableError):
    """The body of a file is not in its place."""


class Bodies:
    """
    Bodies of files.

    Args:
        url: fsspec URL of the folder.
        timeout_s: Time limit of one call of the file system.

    Raises:
        SettingsError: fsspec does not know the URL, or its package is not installed.
    """

    def __init__(self, url: str, *, timeout_s: Seconds) -> None:
        try:
            self._fs, self._root = fsspec.core.url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise SettingsError(f"store.files: {error}") from error
        self._timeout_s = timeout_s
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="store-bodies")
        self._is_local = isinstance(self._fs, LocalFileSystem)

    def close(self) -> None:
        """End the threads after their calls."""
        self._threads.shutdown(wait=False, cancel_futures=False)

    def body_of(self, file_id: str) -> str:
        """Path of the file's body in the folder of this store."""
        return f"{BODIES}/{folder_of(file_id)}/{file_id}"

    @asynccontextmanager
    async def upload(self, file_id: str) -> AsyncIterator["BodyWriter"]:
        """
        Context that writes the body of a new file. Without `commit`, nothing of it remains.

        Raises:
            StoreFullError: The disk is full.
            StoreUnavailableError: The file system fails or does not answer.
        """
        writer = BodyWriter(self, f"{UPLOADS}/{file_id}", self.body_of(file_id))
        try:
            yield writer
        finally:
            with contextlib.suppress(StoreUnavailableError):  # the sweep finds what remains
                await writer.discard()

    async def read(self, body: str) -> AsyncIterator[bytes]:
        """
        The blocks of a body.

        Raises:
            MissingBodyError: There is no such body.
            StoreUnavailableError: The file system fails or does not answer.
        """
        stream = await self.call(self._fs.open, self.path(body), "rb")
        try:
            while block := await self.call(stream.read, BLOCK_BYTES):
                yield block
        finally:
            self._threads.submit(stream.close)

    async def part(self, body: str, start: int, end: int) -> bytes:
        """
        The bytes of a body from *start* up to *end*; fewer if the body is shorter.

        Raises:
            MissingBodyError: There is no such body.
            StoreUnavailableError: The file system fails or does not answer.
        """
        return bytes(await self.call(self._fs.cat_file, self.path(body), start=start, end=end))

    async def remove(self, body: str) -> None:
        """Remove a body; no effect if there is none."""
        with contextlib.suppress(MissingBodyError):
            await self.call(self._fs.rm_file, self.path(body))

    async def exists(self, body: str) -> bool:
        """True if there is such a body."""
        return bool(await self.call(self._fs.exists, self.path(body)))

    async def folders(self) -> set[str]:
        """Names of the folders with bodies."""
        return {name for name in await self._names(BODIES) if is_folder(name)}

    async def in_folder(self, folder: str) -> set[str]:
        """Ids of the files whose bodies are in *folder*."""
        return {name for name in await self._names(f"{BODIES}/{folder}") if is_file_id(name)}

    async def uploads(self) -> set[str]:
        """Ids of the files whose bodies are being written, or were broken off."""
        return {name for name in await self._names(UPLOADS) if is_file_id(name)}

    async def remove_upload(self, file_id: str) -> None:
        """Remove the body of an upload that was broken off."""
        await self.remove(f"{UPLOADS}/{file_id}")

    async def remove_folder(self, folder: str) -> None:
        """Remove an empty folder, where the file system has folders."""
        with contextlib.suppress(StoreUnavailableError):
            await self.call(self._fs.rmdir, self.path(f"{BODIES}/{folder}"))

    async def marker(self) -> str | None:
        """Text of the marker that names the store of this folder; None without one."""
        try:
            text = await self.call(self._fs.cat_file, self.path(MARKER))
        except MissingBodyError:
            return None
        return bytes(text).decode()

    async def set_marker(self, text: str) -> None:
        """Write the marker into the folder, which is made if necessary."""
        await self.call(self._make_root)
        await self.call(self._fs.pipe_file, self.path(MARKER), text.encode())

    async def _names(self, folder: str) -> set[str]:
        # Other processes write here, and some file systems cache what they list.
        self._fs.invalidate_cache()
        try:
            paths = await self.call(self._fs.ls, self.path(folder), detail=False)
        except MissingBodyError:
            return set()
        return {str(path).rstrip("/").rpartition("/")[2] for path in paths}

    def path(self, name: str) -> str:
        """Path in the file system of a *name* in the folder of this store."""
        return f"{self._root}/{name}"

    async def call(self, function: Callable[..., T], *arguments: Any, **options: Any) -> T:
        """
        Result of a blocking call, which runs in a thread.

        Raises:
            MissingBodyError: A file does not exist.
            StoreFullError: The disk is full.
            StoreUnavailableError: The file system fails or does not answer.
        """
        loop = asyncio.get_running_loop()
        work = loop.run_in_executor(self._threads, lambda: function(*arguments, **options))
        try:
            # Shielded, since a thread cannot be cancelled: its error would have no reader.
            return await asyncio.wait_for(asyncio.shield(work), self._timeout_s)
        except FileNotFoundError as error:
            raise MissingBodyError(f"a file body is missing: {error}") from error
        except TimeoutError as error:
            raise StoreUnavailableError(
                f"the file system of bodies did not answer in {self._timeout_s:g} s"
            ) from error
        except OSError as error:
            if error.errno in FULL_DISK:
                raise StoreFullError("the disk of file bodies is full") from error
            raise StoreUnavailableError(f"the file system of bodies failed: {error}") from error
        finally:
            work.add_done_callback(_read_error)

    def _make_root(self) -> None:
        if self._is_local:
            Path(self._root).mkdir(mode=PRIVATE, parents=True, exist_ok=True)
        else:
            self._fs.makedirs(self._root, exist_ok=True)

    def open_new(self, name: str) -> Any:
        """Open a new file for writing, with its folders; blocks."""
        path = self.path(name)
        self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
        return self._fs.open(path, "wb")

    def move(self, source: str, target: str) -> None:
        """Move a complete body to its place; blocks."""
        folder = self.path(target).rpartition("/")[0]
        self._fs.makedirs(folder, exist_ok=True)
        self._fs.mv(self.path(source), self.path(target))
        if self._is_local:
            # The row says that the body is there, so its name must survive a power failure.
            for each in (folder, self.path(BODIES), self._root):
                _sync_folder(each)

    def sync(self, stream: Any) -> None:
        """Write a file's content to the disk, where the file system is local; blocks."""
        stream.flush()
        if self._is_local:
            os.fsync(stream.fileno())

    def remove_now(self, name: str) -> None:
        """Remove a file if there is one; blocks."""
        with contextlib.suppress(OSError):
            self._fs.rm_file(self.path(name))


class BodyWriter:
    """
    The body of a new file while it arrives; holds at most one block in memory.

    Args:
        bodies: Where to write.
        temporary: Name while the body is incomplete.
        final: Name of the complete body.
    """

    def __init__(self, bodies: Bodies, temporary: str, final: str) -> None:
        self.num_bytes = 0
        self.body = final
        self._bodies = bodies
        self._temporary = temporary
        self._digest = hashlib.sha256()
        self._block = bytearray()
        self._stream: Any = None
        self._is_over = False
        # After a cancellation, the thread that writes may still run when the body is discarded.
        self._lock = threading.Lock()

    @property
    def sha256(self) -> str:
        """Digest of the body in hex, after `commit`."""
        return self._digest.hexdigest()

    async def write(self, data: bytes) -> None:
        """Append *data* to the body."""
        self.num_bytes += len(data)
        self._block += data
        if len(self._block) >= BLOCK_BYTES:
            await self._flush()

    async def commit(self) -> None:
        """Write the rest of the body, and move it to its place."""
        await self._flush()
        await self._bodies.call(self._finish)

    async def discard(self) -> None:
        """Remove what was written, unless it was committed; also while a write still runs."""
        if not self._is_over:
            await self._bodies.call(self._discard)

    async def _flush(self) -> None:
        block, self._block = self._block, bytearray()
        await self._bodies.call(self._append, block)

    def _append(self, block: bytearray) -> None:
        with self._lock:
            if self._is_over:
                return
            if self._stream is None:
                self._stream = self._bodies.open_new(self._temporary)
            self._digest.update(block)
            self._stream.write(block)

    def _finish(self) -> None:
        with self._lock:
            if self._is_over:
                return
            self._bodies.sync(self._stream)
            self._stream.close()
            self._bodies.move(self._temporary, self.body)
            self._is_over = True

    def _discard(self) -> None:
        with self._lock:
            self._is_over = True
            if self._stream is None:
                return
            with contextlib.suppress(OSError):  # closing writes the rest, to a full disk
                self._stream.close()
            self._bodies.remove_now(self._temporary)


def _sync_folder(path: str) -> None:
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _read_error(work: "asyncio.Future[Any]") -> None:
    """Read the error of a call that is no longer awaited, so that it is not reported as lost."""
    if not work.cancelled():
        work.exception()
