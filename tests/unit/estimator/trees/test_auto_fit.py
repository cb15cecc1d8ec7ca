"""Fits that a running estimator starts in a separate process."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from structlog.testing import capture_logs

from services.estimator.settings import Settings
from services.estimator.trees.auto_fit import FAILED, LEAST_NEW, OwnFits
from services.estimator.trees.fit_report import FitReport, Outcome
from services.estimator.trees.sample_store import SampleStore
from tests.sampled import plain, sampled

REPORT = FitReport(
    model="m", engine="e", device="d", outcome=Outcome.WORSE, detail="why", samples=9, span_s=1.0
)


class ScriptedFits(OwnFits):
    """Runs a shell command instead of a fit."""

    def __init__(self, store: SampleStore, script: str) -> None:
        super().__init__(Settings(), store)
        self._script = script

    def _command(self) -> list[str]:
        return ["/bin/sh", "-c", self._script]


def store(directory: Path, count: int) -> SampleStore:
    kept = SampleStore(directory)
    kept.take(sampled(*[plain()] * count))
    return kept


async def events(fits: OwnFits, stop: asyncio.Event) -> Sequence[str]:
    with capture_logs() as logs:
        await fits.fit(stop)
    return [each["event"] for each in logs]


async def test_outcome_of_each_key_is_logged(tmp_path: Path):
    fits = ScriptedFits(
        store(tmp_path, LEAST_NEW), f"printf '%s\\n' '{msgspec.json.encode(REPORT).decode()}'"
    )

    assert await events(fits, asyncio.Event()) == ["trees.fitted"]
    assert fits.outcomes == {"worse": 1}


async def test_without_new_samples_no_fit_starts(tmp_path: Path):
    kept = store(tmp_path, LEAST_NEW - 1)
    fits = ScriptedFits(kept, "true")
    stop = asyncio.Event()
    assert await events(fits, stop) == []
    kept.take(sampled(plain()))

    assert await events(fits, stop) == ["fit.failed"]
    assert await events(fits, stop) == []


@pytest.mark.parametrize("script", ["echo no reason >&2; exit 1", "echo nonsense", "true"])
async def test_failed_fit_is_counted(tmp_path: Path, script: str):
    fits = ScriptedFits(store(tmp_path, LEAST_NEW), script)

    assert await events(fits, asyncio.Event()) == ["fit.failed"]
    assert fits.outcomes == {FAILED: 1}


async def test_fit_that_cannot_be_started_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    async def no_process(*_command: str, **_pipes: int) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    fits = ScriptedFits(store(tmp_path, LEAST_NEW), "true")
    monkeypatch.setattr(asyncio, "create_subprocess_exec", no_process)
    await fits.fit(asyncio.Event())

    assert fits.outcomes == {FAILED: 1}


async def test_shutdown_does_not_wait_for_a_fit(tmp_path: Path):
    fits = ScriptedFits(store(tmp_path, LEAST_NEW), "exec sleep 600")
    stop = asyncio.Event()
    asyncio.get_running_loop().call_later(0.05, stop.set)
    async with asyncio.timeout(30):
        assert await events(fits, stop) == []
    assert not fits.outcomes
