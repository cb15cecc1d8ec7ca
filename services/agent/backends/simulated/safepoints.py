"""Iterations of the simulated engine in real time, and where they can be cut (ConServe §4.3)."""

import asyncio
import math

from services.agent.backends.settings import SimulatedSettings
from services.agent.backends.simulated.schedule import Pass, iteration_of
from shared.contracts.base import Seconds
from solver.scheduling.layer_preemption import RunningIteration, preempts


def has_safepoints(settings: SimulatedSettings) -> bool:
    """Whether iterations are cut; other policies would go on with what was dropped."""
    return settings.safepoint_layers > 0 and settings.policy == "qoserve"


class Passage:
    """
    The time that an engine's iterations take.

    A cut comes at the next of the safepoints, which are evenly spaced. What best-effort requests
    computed until then is lost; the others are then computed from the first layer, as in vLLM.

    Args:
        settings: Of the engine.
    """

    def __init__(self, settings: SimulatedSettings) -> None:
        self._scale = settings.time_scale
        self._interval = math.inf
        """Safepoint to safepoint, as a share of the iteration."""
        if has_safepoints(settings):
            self._interval = settings.safepoint_layers / settings.num_layers
        self._wanted = asyncio.Event()
        self._wanted_at = 0.0
        self._running: tuple[Pass, RunningIteration] | None = None
        self.layer_preemptions = 0
        self.dropped_tokens = 0
        self.yield_s: Seconds = 0.0
        """Real seconds from demands to safepoints."""

    async def spend(self, begun: Pass, begun_at: float) -> float:
        """
        Wait until *begun* is computed, or what is left of it.

        Args:
            begun: May lose its best-effort part here.
            begun_at: By the loop's clock, as what is returned: the end.
        """
        duration_s = begun.iteration().duration_s * self._scale
        due = begun_at + duration_s
        safepoint = await self._cut_at(begun, begun_at, due)
        if safepoint < due:
            await _sleep_until(safepoint)
            self.layer_preemptions += 1
            self.dropped_tokens += begun.drop_offline()
            self.yield_s += safepoint - self._wanted_at
            due = safepoint + begun.iteration().duration_s * self._scale
        await _sleep_until(due)
        return due

    def arrived(self, *, slack_s: Seconds, prefill_s: Seconds, online_s: Seconds) -> None:
        """
        A request with targets waits from now on; cuts the iteration if it would be late without.

        Args:
            slack_s: Until its first token is due, in real time.
            prefill_s: Predicted, of it alone.
            online_s: Predicted prefill of it and of those that wait already.
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
        """Cut the running iteration; whether it has best-effort work."""
        if self._running is None or not self._running[1].offline_tokens:
            return False
        if not self._wanted.is_set():
            self._wanted_at = asyncio.get_running_loop().time()
            self._wanted.set()
        return True

    async def _cut_at(self, begun: Pass, begun_at: float, due: float) -> float:
        """When the iteration is cut; infinite if it is not."""
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
