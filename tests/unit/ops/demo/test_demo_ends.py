"""Ends of the demo without a result."""

import argparse
import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from ops.demo import __main__ as demo


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """The demo configures this process, which must not be changed."""
    monkeypatch.setattr(demo, "configure_logging", lambda **_: None)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def demo_with(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["demo", "--engine", "simulated", *arguments])
    return demo.main()


def test_a_folder_that_cannot_be_made_is_refused_before_the_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    async def run(*_: object) -> int:
        raise AssertionError("the load is served")

    monkeypatch.setattr(demo, "run", run)
    file = tmp_path / "file"
    file.touch()

    assert demo_with(monkeypatch, "--out", str(file)) == 1
    assert str(file) in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_demo_with_everything_that_it_has_started(
    number: signal.Signals,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    stopped: list[bool] = []

    async def served(_options: argparse.Namespace, _engine: str) -> int:
        demo._cancel_at_signals()
        os.kill(os.getpid(), number)
        try:
            await asyncio.Event().wait()
        finally:
            os.kill(os.getpid(), number)
            for _ in range(3):  # turns of the loop, in which it handles the signal
                await asyncio.sleep(0)
            stopped.append(True)
        return 0

    monkeypatch.setattr(demo, "run", served)
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        code = demo_with(monkeypatch, "--out", str(tmp_path))
    finally:
        signal.signal(signal.SIGHUP, before)

    assert code == demo.INTERRUPTED
    assert stopped == [True]
    assert "interrupted" in capsys.readouterr().err
