"""Periodic fits of trees, which a running estimator starts in a separate process."""

import asyncio
import os
import sys
from collections import Counter
from contextlib import suppress

import msgspec
import structlog

from services.estimator.settings import Settings
from services.estimator.trees.fit_report import FitReport
from services.estimator.trees.sample_store import SampleStore

log = structlog.get_logger()

LEAST_NEW = 500
"""Minimum number of new samples since the last fit, summed over all keys, for another fit."""
FAILED = "failed"
_NICENESS = 19
_decode = msgspec.json.Decoder(FitReport).decode


class OwnFits:
    """
    Runs `headway-estimator fit` when there are enough new samples.

    The command runs in a separate process at the lowest priority, since it uses a core for seconds
    and loads large libraries. The estimator loads the resulting artefacts like any other artefacts.

    Args:
        settings: Settings of the estimator; without `profile_dir` no fit runs.
        samples: Store of samples; its count shows whether there are new samples.
    """

    def __init__(self, settings: Settings, samples: SampleStore) -> None:
        self._settings = settings
        self._samples = samples
        self._num_at_last_fit = 0
        self.outcomes: Counter[str] = Counter()
        """
        Number of fits by `Outcome`, one for each (model, engine, device); a failed process is
        `FAILED`.
        """

    async def fit(self, stop: asyncio.Event) -> None:
        """Execute one round of fits; *stop* ends the round and the fit process early."""
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
        except OSError as error:  # no memory or no process is available: the next round retries
            self.outcomes[FAILED] += 1
            log.warning("fit.failed", error=str(error))
            return
        with suppress(ProcessLookupError):  # the process has already ended
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
            self._log_outcome(*ended.result())

    def _command(self) -> list[str]:
        values = {
            "profile_dir": self._settings.profile_dir or "",
            "trees.max_samples": self._settings.trees.max_samples,
        }
        settings = [part for name, value in values.items() for part in ("--set", f"{name}={value}")]
        return [sys.executable, "-m", "services.estimator", "fit", "--json", *settings]

    def _log_outcome(self, out: bytes, err: bytes) -> None:
        """
        Log one line for each fit of a (model, engine, device), or the reason if there was none.
        """
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
