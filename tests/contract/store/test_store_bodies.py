"""Bodies of files in fsspec file systems."""

import asyncio
import errno
import hashlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from shared.contracts.errors import SettingsError, StoreFullError, StoreUnavailableError
from shared.store.bodies import BLOCK_BYTES, Bodies, MissingBodyError
from shared.store.ids import folder_of, new_file_id
from tests.stores import NOW


@pytest.fixture(params=["file", "memory"])
async def bodies(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Bodies]:
    """Bodies in a local directory that does not exist yet, or in memory."""
    places = {"file": f"file://{tmp_path}/made/later", "memory": f"memory://{uuid4().hex}"}
    made = Bodies(places[request.param], timeout_s=60.0)
    yield made
    made.close()


async def stored(bodies: Bodies, content: bytes, *, part: int = 100_000) -> str:
    """Id of a new file with *content*."""
    file_id = new_file_id(NOW)
    async with bodies.upload(file_id) as writer:
        for begin in range(0, len(content), part):
            await writer.write(content[begin : begin + part])
        await writer.commit()
    assert writer.body == bodies.body_of(file_id)
    assert writer.num_bytes == len(content)
    assert writer.sha256 == hashlib.sha256(content).hexdigest()
    return file_id


async def content_of(bodies: Bodies, file_id: str) -> bytes:
    return b"".join([block async for block in bodies.read(bodies.body_of(file_id))])


@pytest.mark.parametrize("size", [0, 1, BLOCK_BYTES, 3 * BLOCK_BYTES + 7])
async def test_a_body_is_read_as_it_was_written(bodies: Bodies, size: int):
    content = bytes(number % 251 for number in range(size))
    file_id = await stored(bodies, content)

    assert await content_of(bodies, file_id) == content
    assert await bodies.uploads() == set()
    assert await bodies.folders() == {folder_of(file_id)}
    assert await bodies.in_folder(folder_of(file_id)) == {file_id}


async def test_a_body_is_in_its_place_only_when_it_is_complete(bodies: Bodies):
    file_id = new_file_id(NOW)
    async with bodies.upload(file_id) as writer:
        await writer.write(b"x" * (BLOCK_BYTES + 1))
        during = await bodies.exists(writer.body), await bodies.uploads()
        await writer.commit()

    assert during == (False, {file_id})
    assert await bodies.exists(writer.body)


async def test_nothing_remains_of_an_upload_that_fails(bodies: Bodies):
    async def upload() -> None:
        async with bodies.upload(new_file_id(NOW)) as writer:
            await writer.write(b"x" * BLOCK_BYTES)
            raise ValueError("the client left")

    with pytest.raises(ValueError, match="the client left"):
        await upload()

    assert await bodies.uploads() == set()
    assert await bodies.folders() == set()


async def test_nothing_remains_of_an_upload_that_is_cancelled(bodies: Bodies):
    began = asyncio.Event()

    async def upload() -> None:
        async with bodies.upload(new_file_id(NOW)) as writer:
            await writer.write(b"x" * BLOCK_BYTES)
            began.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(upload())
    await began.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    assert await bodies.uploads() == set()


async def test_a_removed_body_is_missing_and_can_be_removed_again(bodies: Bodies):
    file_id = await stored(bodies, b"x")
    for _ in range(2):
        await bodies.remove(bodies.body_of(file_id))

    assert not await bodies.exists(bodies.body_of(file_id))
    with pytest.raises(MissingBodyError):
        await content_of(bodies, file_id)


async def test_the_marker_is_read_as_it_was_written(bodies: Bodies):
    before = await bodies.marker()
    await bodies.set_marker("store 1")

    assert before is None
    assert await bodies.marker() == "store 1"


async def test_only_the_services_user_enters_a_new_folder(tmp_path: Path):
    bodies = Bodies(f"file://{tmp_path}/new", timeout_s=60.0)
    await bodies.set_marker("store 1")
    bodies.close()

    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700


class FailingStream:
    """A file on a disk that is full after one block."""

    def __init__(self, stream: Any, number: int) -> None:
        self._stream = stream
        self._number = number
        self._num_written = 0

    def write(self, block: bytes) -> None:
        if self._num_written:
            raise OSError(self._number, "injected")
        self._num_written += 1
        self._stream.write(block)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@pytest.mark.parametrize(
    ("number", "error"),
    [
        (errno.ENOSPC, StoreFullError),
        (errno.EDQUOT, StoreFullError),
        (errno.EIO, StoreUnavailableError),
    ],
)
async def test_a_full_disk_leaves_no_half_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, error: type[Exception]
):
    bodies = Bodies(f"file://{tmp_path}", timeout_s=60.0)
    opened = bodies.open_new
    monkeypatch.setattr(bodies, "open_new", lambda name: FailingStream(opened(name), number))

    with pytest.raises(error):
        await stored(bodies, b"x" * (3 * BLOCK_BYTES))

    assert await bodies.uploads() == set()
    assert await bodies.folders() == set()
    bodies.close()


@pytest.mark.parametrize("url", ["no-such-protocol://x", "s4://bucket"])
def test_a_place_that_fsspec_does_not_know_is_refused(url: str):
    with pytest.raises(SettingsError, match=r"store\.files"):
        Bodies(url, timeout_s=1.0)
