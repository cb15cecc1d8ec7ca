"""From the window to the engine: who runs next, and who makes room."""

import asyncio
import contextlib

from services.agent.backends.base import EngineBackend
from services.agent.runner import Runner
from services.agent.settings import PullSettings
from services.agent.state import AgentState, Ending, Run
from shared.contracts.requests import QueuedRequest
from shared.runtime.clock import Clock
from solver.scheduling.keys import Tier, tier_of
from solver.scheduling.relegation import is_hopeless
from solver.scheduling.window import tokens_needed

SUSPECT_CRASHES = 2
"""Engine crashes after which a request runs alone, so that only it is blamed for the next."""
CHECK_PERIOD_S = 0.1


class Admission:
    """
    Starts runs while the engine has room.

    Args:
        state: The agent's.
        engine: Whose room decides.
        runner: Executes what is admitted.
        settings: Shares.
        clock: Wall time.
    """

    def __init__(
        self,
        *,
        state: AgentState,
        engine: EngineBackend,
        runner: Runner,
        settings: PullSettings,
        clock: Clock,
    ) -> None:
        self._state = state
        self._engine = engine
        self._runner = runner
        self._settings = settings
        self._clock = clock
        self._count_again_at = 0.0

    async def work(self, stop: asyncio.Event, tasks: asyncio.TaskGroup) -> None:
        """Admit until *stop*; runs are tasks of *tasks*."""
        while not stop.is_set():
            self._state.admit_wake.clear()
            self._hand_back_late()
            while (request := self._admissible()) is not None:
                pulled = self._state.release(request.request_id)
                assert pulled is not None  # noqa: S101 - the window and `pulled` agree
                # Begun here and now, so that no swap finds the instance empty in between.
                run = self._runner.begin(pulled)
                run.on_begin = self._state.pull_wake.set
                tasks.create_task(self._runner.run(run), name=f"run:{request.request_id}")
                await asyncio.sleep(0)
                self._state.pull_wake.set()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._state.admit_wake.wait(), CHECK_PERIOD_S)

    def _hand_back_late(self) -> None:
        """
        What waits in the engine past its deadline goes back, to be relegated when it is pulled.

        An engine that serves it last would leave it in the window's place for good. Which runs
        wait is not known, only how many: the newest without a token are taken for them.
        """
        num_waiting = self._engine.snapshot().waiting
        loop_s = asyncio.get_running_loop().time()
        if not num_waiting or loop_s < self._count_again_at:
            return
        # The engine's count takes a moment to show that somebody left.
        self._count_again_at = loop_s + CHECK_PERIOD_S
        now = self._clock.now()
        waiting = [run for run in self._state.runs.values() if not run.begun]
        for run in waiting[-num_waiting:]:
            if is_hopeless(run.request, now=now, prefill_s=0.0, decode_s=0.0):
                end_run(self._state, self._engine, run, Ending.EVICTED)

    def _admissible(self) -> QueuedRequest | None:
        """The window's head if it may start now."""
        state = self._state
        if state.swapping or state.draining or not self._engine.alive or self._isolated():
            return None
        head = state.window.peek(self._clock.now())
        if head is None or self._must_wait(head):
            return None
        if tier_of(head) is not Tier.REACHABLE and not self._has_filler_room():
            return self._beside_filler()
        if self._fits(head):
            return head
        if tier_of(head) is Tier.REACHABLE:
            self._make_room()
        return None

    def _beside_filler(self) -> QueuedRequest | None:
        """Aged filler goes before the rest, but not into the slots that are kept from filler."""
        head = self._state.window.peek_tier(Tier.REACHABLE)
        if head is None or self._must_wait(head) or not self._fits(head):
            return None
        return head

    def _must_wait(self, head: QueuedRequest) -> bool:
        """Suspects wait to be alone; what came back, until its last run here is over."""
        runs = self._state.runs
        return head.request_id in runs or (head.attempts.crashes >= SUSPECT_CRASHES and bool(runs))

    def _isolated(self) -> bool:
        """Whether a suspect is running: nobody joins it."""
        return any(
            run.request.attempts.crashes >= SUSPECT_CRASHES for run in self._state.runs.values()
        )

    def _fits(self, request: QueuedRequest) -> bool:
        snapshot = self._engine.snapshot()
        if not self._state.runs:
            return True
        if len(self._state.runs) >= snapshot.max_running:
            return False
        return self._state.running_tokens + tokens_needed(request) <= snapshot.kv_capacity_tokens

    def _has_filler_room(self) -> bool:
        """Slots beyond the filler's share stay free for urgent arrivals."""
        filler = self._state.running_count(Tier.BEST_EFFORT)
        filler += self._state.running_count(Tier.RELEGATED)
        limit = self._settings.best_effort_running_share * self._engine.snapshot().max_running
        return filler < max(1, int(limit))

    def _make_room(self) -> None:
        """Evict the filler that loses least, one at a time."""
        if any(run.ending is Ending.EVICTED for run in self._state.runs.values()):
            return
        filler = [
            run
            for run in self._state.runs.values()
            if tier_of(run.request) is not Tier.REACHABLE and run.ending is None
        ]
        if filler:
            end_run(self._state, self._engine, min(filler, key=_progress), Ending.EVICTED)


def end_run(state: AgentState, engine: EngineBackend, run: Run, ending: Ending) -> None:
    """Ask a run to end; its own task sees to what becomes of it."""
    if run.ending is None:
        run.ending = ending
        task = asyncio.ensure_future(engine.abort(run.request.request_id))
        state.aborts.add(task)
        task.add_done_callback(state.aborts.discard)


def _progress(run: Run) -> tuple[int, float]:
    return (len(run.token_ids), -run.submitted_at)
