"""Iterations of the simulated engine in real time, and their safepoints (ConServe §4.3)."""

import asyncio
import math

from services.agent.backends.settings import SimulatedSettings
from services.agent.backends.simulated.schedule import Pass, iteration_of
from services.agent.backends.totals import SchedulingTotals
from shared.contracts.base import Seconds
from solver.scheduling.engine.layer_preemption import RunningIteration, preempts


def has_safepoints(settings: SimulatedSettings) -> bool:
    """
    Return whether iterations can be preempted at safepoints.

    Only `qoserve` supports this; other policies would continue as if the dropped work were
    computed.
    """
    return settings.safepoint_layers > 0 and settings.policy == "qoserve"


class Passage:
    """
    Executes an engine's iterations in real time.

    Safepoints are evenly spaced, and a preemption takes effect at the next one. The computation for
    best-effort requests in the iteration is then lost. The other requests are computed from the
    first layer, as in vLLM.
    """

    def __init__(self, settings: SimulatedSettings) -> None:
        self._scale = settings.time_scale
        self._interval = math.inf
        """Distance between safepoints, as a share of the iteration."""
        if has_safepoints(settings):
            self._interval = settings.safepoint_layers / settings.num_layers
        self._wanted = asyncio.Event()
        self._wanted_at = 0.0
        self._running: tuple[Pass, RunningIteration] | None = None
        self.totals = SchedulingTotals()
        """
        Counters of preemptions at safepoints; the time from demands to safepoints is real time.
        """

    async def spend(self, begun: Pass, begun_at: float) -> float:
        """
        Wait until *begun* is computed; after a preemption, until its remaining part is computed.

        Args:
            begun: The iteration; a preemption removes its best-effort part.
            begun_at: Start of the iteration by the event loop's clock.

        Returns:
            End of the iteration by the event loop's clock.
        """
        duration_s = begun.iteration().duration_s * self._scale
        due = begun_at + duration_s
        safepoint = await self._cut_at(begun, begun_at, due)
        if safepoint < due:
            await _sleep_until(safepoint)
            self.totals.layer_preemptions += 1
            self.totals.dropped_tokens += begun.drop_offline()
            self.totals.yield_s += safepoint - self._wanted_at
            due = safepoint + begun.iteration().duration_s * self._scale
        await _sleep_until(due)
        return due

    def arrived(self, *, slack_s: Seconds, prefill_s: Seconds, online_s: Seconds) -> None:
        """
        Register an arrived request with targets, and preempt the running iteration if necessary.

        The iteration is preempted if the request would be late without the preemption.

        Args:
            slack_s: Real time until the first token of this request is due.
            prefill_s: Predicted prefill time of this request alone.
            online_s: Predicted prefill time of this request and of all waiting requests.
        """
        if self._running is not None:
            iteration, now = self._running[1], asyncio.get_running_loop().time()
            if preempts(
                iteration,
                now=now,
                online_s=online_s * self._scale,
                slack_s=slack_s,
                prefill_s=prefill_s * self._scale,
            ):
                self.preempt()

    def preempt(self) -> bool:
        """
        Preempt the iteration at its next safepoint; return whether the iteration has best-effort
        work.
        """
        if self._running is None or not self._running[1].offline_tokens:
            return False
        if not self._wanted.is_set():
            self._wanted_at = asyncio.get_running_loop().time()
            self._wanted.set()
        return True

    async def _cut_at(self, begun: Pass, begun_at: float, due: float) -> float:
        """
        Wait until the iteration is preempted or over.

        Returns the time of the safepoint at which the iteration is preempted; infinity if it is not
        preempted.
        """
        offline_tokens = begun.offline_tokens
        if not offline_tokens or self._interval >= 1 or due <= begun_at:
            return math.inf
        self._running = begun, self._iteration(begun, begun_at, due, offline_tokens)
        self._wanted.clear()
        try:
            async with asyncio.timeout_at(due):
                await self._wanted.wait()
        except TimeoutError:
            return math.inf
        finally:
            self._running = None
        interval_s = self._interval * (due - begun_at)
        passed = max(0.0, self._wanted_at - begun_at)
        return begun_at + interval_s * max(1, math.ceil(passed / interval_s))

    def _iteration(
        self, begun: Pass, begun_at: float, due: float, offline_tokens: int
    ) -> RunningIteration:
        decodes = [part for part in begun.parts if not part[0].is_prefill]
        decodes_s = 0.0
        if len(decodes) < len(begun.parts):
            decodes_s = iteration_of(decodes, begun.latency).duration_s * self._scale
        return RunningIteration(
            began_at=begun_at,
            predicted_s=due - begun_at,
            decodes_s=decodes_s,
            online_tokens=sum(count for _, count in begun.parts) - offline_tokens,
            offline_tokens=offline_tokens,
        )


async def _sleep_until(at: float) -> None:
    await asyncio.sleep(max(0.0, at - asyncio.get_running_loop().time()))
