"""Fits that a running estimator has made beside itself, for whoever does not want to do it."""

import asyncio
import os
import sys
from collections import Counter
from contextlib import suppress

import msgspec
import structlog

from services.estimator.fit_report import FitReport
from services.estimator.sample_store import SampleStore
from services.estimator.settings import Settings

log = structlog.get_logger()

LEAST_NEW = 500
"""Samples since the last fit, of all keys together, for which it is worth the while."""
FAILED = "failed"
_NICENESS = 19
_decode = msgspec.json.Decoder(FitReport).decode


class OwnFits:
    """
    Runs `headway-estimator fit` when there is something new to learn.

    In a process of its own, at the lowest priority: it takes seconds of a core, and libraries
    that no service should hold. What it writes is loaded like any other artefact.

    Args:
        settings: The estimator's; without `profile_dir` nothing is ever fitted.
        samples: Whose count says whether there is something new.
    """

    def __init__(self, settings: Settings, samples: SampleStore) -> None:
        self._settings = settings
        self._samples = samples
        self._num_at_last_fit = 0
        self.outcomes: Counter[str] = Counter()
        """Fits of a key by `Outcome`, and processes that `FAILED`."""

    async def fit(self, stop: asyncio.Event) -> None:
        """One round; ends early with *stop*, and the process with it."""
        if self._samples.num_taken - self._num_at_last_fit < LEAST_NEW:
            return
        self._num_at_last_fit = self._samples.num_taken
        try:
            process = await asyncio.create_subprocess_exec(
                *self._command(),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
            )
        except OSError as error:  # neither memory nor a process to be had: the next round tries
            self.outcomes[FAILED] += 1
            log.warning("fit.failed", error=str(error))
            return
        with suppress(ProcessLookupError):  # it has ended already
            os.setpriority(os.PRIO_PROCESS, process.pid, _NICENESS)
        async with asyncio.TaskGroup() as tasks:
            ended = tasks.create_task(process.communicate(), name="fit.output")
            stopped = tasks.create_task(stop.wait(), name="fit.stop")
            try:
                await asyncio.wait({ended, stopped}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                if process.returncode is None and not ended.done():
                    process.kill()
                stopped.cancel()
        if not stop.is_set():
            self._tell(*ended.result())

    def _command(self) -> list[str]:
        values = {
            "profile_dir": self._settings.profile_dir or "",
            "trees.max_samples": self._settings.trees.max_samples,
        }
        settings = [part for name, value in values.items() for part in ("--set", f"{name}={value}")]
        return [sys.executable, "-m", "services.estimator", "fit", "--json", *settings]

    def _tell(self, out: bytes, err: bytes) -> None:
        """One line for each key; without any, why."""
        try:
            reports = [_decode(line) for line in out.splitlines()]
        except msgspec.DecodeError:
            reports = []
        if not reports:
            self.outcomes[FAILED] += 1
            log.warning("fit.failed", error=err.decode(errors="replace")[-500:])
        for each in reports:
            self.outcomes[each.outcome.value] += 1
            log.info(
                "trees.fitted",
                model=each.model,
                outcome=each.outcome.value,
                samples=each.samples,
                detail=each.detail,
            )
