"""Kills under load: no committed file is lost, and no half file is visible."""

import hashlib
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ops.bench.postgres import PrivatePostgres
from shared.store.settings import StoreSettings
from tests.stores import ACME, open_store, place

LEAST_COMMITTED = 12


class Writer:
    """A process that stores files, and the ids that it has reported."""

    def __init__(self, settings: StoreSettings, directory: Path) -> None:
        url = place(settings).url.render_as_string(hide_password=False)
        module = "tests.contract.store.store_writer"
        self._output = directory / "committed"
        with self._output.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, url, str(directory)], stdout=output
            )

    @property
    def committed(self) -> list[str]:
        # The last line may be incomplete.
        return self._output.read_text().split("\n")[:-1]

    def wait(self, number: int) -> None:
        """Wait until *number* files are committed."""
        give_up_at = time.monotonic() + 120
        while len(self.committed) < number:
            assert self._process.poll() is None
            assert time.monotonic() < give_up_at
            time.sleep(0.01)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


async def assert_whole(settings: StoreSettings, committed: list[str]) -> None:
    """Assert that every committed file is there, and that every visible file is complete."""
    async with open_store(settings) as store:
        await store.check()
        files, _ = await store.files.page(ACME, limit=10_000)
        for file in files:
            digest, size = hashlib.sha256(), 0
            async for block in store.bodies.read(file.body):
                digest.update(block)
                size += len(block)
            assert (digest.hexdigest(), size) == (file.sha256, file.num_bytes)

    assert set(committed) <= {file.id for file in files}
    assert len(set(committed)) == len(committed) >= LEAST_COMMITTED


@pytest.fixture
def writer(migrated: StoreSettings, tmp_path: Path) -> Callable[[], Writer]:
    return lambda: Writer(migrated, tmp_path)


@pytest.mark.parametrize(
    "num_kills", [1, pytest.param(3, marks=pytest.mark.slow)], ids=["once", "often"]
)
async def test_a_killed_writer_loses_no_committed_file(
    migrated: StoreSettings, writer: Callable[[], Writer], num_kills: int
):
    committed = []
    for number in range(num_kills):
        running = writer()
        running.wait(LEAST_COMMITTED + number)
        running.kill()
        committed += running.committed

    await assert_whole(migrated, committed)


@pytest.mark.slow
@pytest.mark.parametrize("database_kind", ["postgresql"], indirect=True)
async def test_a_killed_server_loses_no_committed_file(
    migrated: StoreSettings, writer: Callable[[], Writer], postgres: PrivatePostgres
):
    running = writer()
    for _ in range(3):
        running.wait(len(running.committed) + LEAST_COMMITTED)
        postgres.kill()
        postgres.start()
    running.wait(len(running.committed) + LEAST_COMMITTED)
    running.kill()

    await assert_whole(migrated, running.committed)
