"""Admission of requests from the window to the engine, and evictions that make room for them."""

import asyncio
import contextlib

from services.agent.backends.base import EngineBackend
from services.agent.lso.executor import LsoExecutor
from services.agent.lso.results import LsoRefusedError, LsoResult
from services.agent.lso.situation import Observer
from services.agent.runner import Runner
from services.agent.settings import PullSettings
from services.agent.state import AgentState, Ending, SwappedOut
from shared.contracts.base import RequestId
from shared.contracts.plans import Segment
from shared.contracts.requests import QueuedRequest
from shared.runtime.clock import Clock
from solver.planning.lso.actions import lso_actions, make_room
from solver.planning.lso.operations import Evict, Rule, SwapIn, because
from solver.planning.lso.situation import Demand, HeadChange
from solver.scheduling.engine.entry import Rank
from solver.scheduling.keys import rank_of
from solver.scheduling.relegation import is_infeasible
from solver.scheduling.window import tokens_needed

SUSPECT_CRASHES = 2
"""
Number of engine crashes during a request's runs after which the request runs without other
requests.
"""
CHECK_PERIOD_S = 0.1
Started = asyncio.Task[tuple[LsoResult, ...]] | None
_LEAVES_ROOM = (Ending.EVICTED, Ending.SWAPPED_OUT)


class Admission:
    """
    Starts runs while the engine has room.

    Args:
        runner: Executes admitted requests.
        executor: Evicts and swaps out displaced runs.
        observer: Reports the runs that could be displaced.
    """

    def __init__(
        self,
        *,
        state: AgentState,
        engine: EngineBackend,
        runner: Runner,
        executor: LsoExecutor,
        observer: Observer,
        settings: PullSettings,
        clock: Clock,
    ) -> None:
        self._state = state
        self._engine = engine
        self._runner = runner
        self._executor = executor
        self._observer = observer
        self._settings = settings
        self._clock = clock
        self._count_again_at = 0.0
        self._tasks: asyncio.TaskGroup | None = None
        self._making_room: Started = None
        self._handing_back: Started = None

    async def work(self, stop: asyncio.Event, tasks: asyncio.TaskGroup) -> None:
        """Start waiting requests until *stop* is set; each run is a task of the group *tasks*."""
        self._tasks = tasks
        while not stop.is_set():
            self._state.admit_wake.clear()
            self._hand_back_late()
            while (request := self._admissible()) is not None:
                self._admit(request)
                await asyncio.sleep(0)
                self._state.pull_wake.set()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._state.admit_wake.wait(), CHECK_PERIOD_S)

    def resume(self, swapped: SwappedOut) -> None:
        """
        Run a swapped-out request now, ahead of all waiting requests.

        Raises:
            LsoRefusedError: The engine has no room, or the instance does not start runs now.
        """
        state, request = self._state, swapped.pulled.request
        if state.swapping or state.draining or not self._engine.alive or self._tasks is None:
            raise LsoRefusedError(
                "the instance is draining, swapping models or down, and starts no runs"
            )
        if self._must_wait(request) or self._isolated():
            raise LsoRefusedError("a request that ran during several engine crashes must run alone")
        if not self._fits(request):
            snapshot = self._engine.snapshot()
            raise LsoRefusedError(
                f"no room: {len(state.runs)} of {snapshot.max_running} requests run, with up "
                f"to {state.running_tokens} of {snapshot.kv_capacity_tokens} KV tokens; the "
                f"request needs {tokens_needed(request)}"
            )
        self._begin(request.request_id)

    def _admit(self, request: QueuedRequest) -> None:
        """Run the request at the head of the window on the engine."""
        swapped = self._state.swapped_out.get(request.request_id)
        self._begin(request.request_id)
        if swapped is not None:
            lso = SwapIn(
                request_id=request.request_id,
                reason=because(Rule.ROOM_AGAIN, tokens=tokens_needed(request)),
            )
            self._executor.record(
                lso, LsoResult(message="the request resumed in the order of the window")
            )

    def _begin(self, request_id: RequestId) -> None:
        pulled = self._state.release(request_id)
        assert pulled is not None  # noqa: S101 - the window and `pulled` agree
        assert self._tasks is not None  # noqa: S101 - only `work` and what it allows come here
        # Begin the run synchronously. If a model swap ran before `begin`, it would count the
        # instance as empty.
        run = self._runner.begin(pulled)
        run.on_begin = self._state.pull_wake.set
        self._tasks.create_task(self._runner.run(run), name=f"run:{request_id}")

    def _hand_back_late(self) -> None:
        """
        Evict requests that still wait in the engine past their deadlines; the next pull relegates
        them.

        The engine serves late requests last, so they would occupy the window without limit. The
        engine reports only the number of waiting runs. This method assumes that they are the newest
        runs without a token.
        """
        num_waiting = self._engine.snapshot().waiting
        loop_s = asyncio.get_running_loop().time()
        if not num_waiting or loop_s < self._count_again_at or _under_way(self._handing_back):
            return
        # The engine updates its count of waiting requests late, so it may still include evicted
        # requests.
        self._count_again_at = loop_s + CHECK_PERIOD_S
        now = self._clock.now()
        waiting = [run for run in self._state.runs.values() if not run.answer.begun]
        late = tuple(
            run.request.request_id
            for run in waiting[-num_waiting:]
            if run.ending is None
            and is_infeasible(run.request, now=now, prefill_s=0.0, decode_s=0.0)
        )
        if late:
            lso = Evict(request_ids=late, reason=because(Rule.LATE))
            self._handing_back = self._executor.start(lso)

    def _admissible(self) -> QueuedRequest | None:
        """Return the request at the head of the window if it may start now."""
        state = self._state
        if state.swapping or state.draining or not self._engine.alive or self._isolated():
            return None
        head = state.window.peek(self._clock.now())
        if head is None or self._must_wait(head):
            return None
        if rank_of(head) is not Rank.REGULAR and not self._has_best_effort_room():
            return self._beside_best_effort()
        if self._fits(head):
            return head
        if rank_of(head) is Rank.REGULAR:
            self._make_room(head)
        return None

    def _beside_best_effort(self) -> QueuedRequest | None:
        """
        Return the first regular request of the window if it fits.

        A best-effort request that precedes it through aging must not block the slots that are
        reserved for regular requests.
        """
        head = self._state.window.peek_rank(Rank.REGULAR)
        if head is None or self._must_wait(head) or not self._fits(head):
            return None
        return head

    def _must_wait(self, head: QueuedRequest) -> bool:
        """
        Return whether *head* must wait.

        A request waits until its earlier run on this instance has ended. A request that is
        suspected of crashing engines also waits until no other request runs.
        """
        runs = self._state.runs
        return head.request_id in runs or (head.attempts.crashes >= SUSPECT_CRASHES and bool(runs))

    def _isolated(self) -> bool:
        """
        True while a request that is suspected of crashing engines runs; no other request may start
        then.
        """
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

    def _has_best_effort_room(self) -> bool:
        """
        True if best-effort work may take a free slot of the engine; some slots are reserved for
        regular requests while such requests run.
        """
        best_effort = self._state.running_count(Rank.BEST_EFFORT)
        best_effort += self._state.running_count(Rank.RELEGATED)
        if best_effort == len(self._state.runs):
            return True
        limit = self._settings.best_effort_running_share * self._engine.snapshot().max_running
        return best_effort < max(1, int(limit))

    def _make_room(self, head: QueuedRequest) -> None:
        """
        Displace runs to make room for the request *head* by the rule of QLM §5, one run at a time.
        """
        if _under_way(self._making_room):
            return
        if any(run.ending in _LEAVES_ROOM for run in self._state.runs.values()):
            return
        demand = Demand(tokens=tokens_needed(head), slots=1)
        situation = self._observer.situation(demand)
        plan = self._state.plan
        queue = plan.queue.segments if plan is not None else ()
        if not queue or queue[0].model != head.model.base:
            # The plan's active segment is not of the head's model, so only best-effort work waits
            # behind the head.
            queue = (Segment(model=head.model.base),)
        change = HeadChange(old_head=None, queue=queue)
        lsos = lso_actions(change, situation, rules=(make_room,))
        self._making_room = self._executor.start(*lsos)


def _under_way(task: Started) -> bool:
    return task is not None and not task.done()
