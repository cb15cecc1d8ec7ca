"""
LLM serving operations on requests (evict, swap out, swap in, checkpoint).

The agent combines them to empty an instance.
"""

import asyncio

from services.agent.aborting import end_run
from services.agent.admission import Admission
from services.agent.backends.base import Capability, EngineBackend
from services.agent.endings import Endings
from services.agent.lso.capabilities import require
from services.agent.lso.executor import LsoExecutor
from services.agent.lso.results import LsoRefusedError, LsoResult, already
from services.agent.lso.situation import Observer
from services.agent.state import AgentState, Ending, Run
from shared.contracts.base import RequestId, Seconds
from shared.contracts.errors import EngineError
from shared.runtime.tasks import poll_until
from solver.planning.lso.operations import Checkpoint, ClearCaches, Evict, Reason, SwapIn, SwapOut


class RunOperations:
    """
    Implements operations on requests.

    Args:
        executor: Executor to register the operations with.
        endings: Handles requests that leave the agent.
        admission: Resumes requests.
        observer: Provides the sizes of KV.
    """

    def __init__(
        self,
        *,
        executor: LsoExecutor,
        state: AgentState,
        engine: EngineBackend,
        endings: Endings,
        admission: Admission,
        observer: Observer,
    ) -> None:
        self._executor = executor
        self._state = state
        self._engine = engine
        self._endings = endings
        self._admission = admission
        self._observer = observer
        executor.register(Evict, self._evict)
        executor.register(SwapOut, self._swap_out)
        executor.register(SwapIn, self._swap_in)
        executor.register(Checkpoint, self._checkpoint)
        executor.register(ClearCaches, self._clear)

    async def hand_back_window(self) -> None:
        """Return all requests in the window to their queues. The caller has stopped pulling."""
        state = self._state
        await poll_until(lambda: state.pulling == 0)
        for request_id in (*state.pulled, *state.swapped_out):
            swapped = request_id in state.swapped_out
            pulled = state.release(request_id)
            if pulled is not None and swapped:
                await self._endings.evict_waiting(pulled)
            elif pulled is not None:
                await self._endings.hand_back(pulled)

    async def finish_runs(self, drain_s: Seconds) -> tuple[RequestId, ...]:
        """
        Hand back waiting requests, let runs finish for *drain_s*, and return the ids of other runs.
        """
        await self.hand_back_window()
        await poll_until(lambda: not self._state.runs, timeout_s=drain_s)
        return tuple(self._state.runs)

    async def evict_within(self, request_ids: tuple[RequestId, ...], reason: Reason) -> None:
        """
        Evict requests as a part of the operation in progress; return when the instance has no runs.
        """
        if request_ids:
            await self._executor.within(Evict(request_ids=request_ids, reason=reason))
        await poll_until(lambda: not self._state.runs)

    async def _evict(self, lso: Evict) -> LsoResult:
        state = self._state
        runs = [state.runs[name] for name in lso.request_ids if name in state.runs]
        waiting = [name for name in lso.request_ids if name in state.swapped_out]
        if not runs and not waiting:
            return self._nothing_runs(lso.request_ids)
        for run in runs:
            end_run(state, self._engine, run, Ending.EVICTED)
        tokens = num_waiting = 0
        for name in waiting:
            # The request may have been resumed or cancelled while the loop returned an earlier
            # request.
            swapped = state.swapped_out.get(name)
            if swapped is not None and (pulled := state.release(name)) is not None:
                tokens += swapped.context_tokens
                num_waiting += 1
                await self._endings.evict_waiting(pulled)
        await asyncio.gather(*(run.over.wait() for run in runs))
        evicted = [run for run in runs if _left_by(run, Ending.EVICTED)]
        tokens += sum(_context_tokens(run) for run in evicted)
        count = len(evicted) + num_waiting
        if count == 0:
            return already(f"{_names(lso.request_ids)} had already ended")
        return LsoResult(
            message=f"{count} requeued with their progress; {tokens} tokens must be computed again",
            num_bytes=self._observer.kv_bytes(tokens),
        )

    async def _swap_out(self, lso: SwapOut) -> LsoResult:
        state = self._state
        if lso.request_id in state.swapped_out:
            return already(f"{lso.request_id} is already swapped out")
        run = state.runs.get(lso.request_id)
        if run is None:
            return self._nothing_runs((lso.request_id,))
        if state.draining or state.swapping:
            doing = "drains" if state.draining else "changes its model"
            raise LsoRefusedError(
                f"the instance {doing} and could not resume {lso.request_id}; evict it instead"
            )
        if lso.rest_s > self._endings.swap_lease_s:
            raise LsoRefusedError(
                f"{lso.request_id} cannot rest for {lso.rest_s:g} s: its lease ends after "
                f"{self._endings.swap_lease_s:g} s (lso.swap_lease_s), "
                "after which the request is evicted"
            )
        run.rest_s = lso.rest_s
        end_run(state, self._engine, run, Ending.SWAPPED_OUT)
        await run.over.wait()
        if not run.kept:
            if run.ending is Ending.SWAPPED_OUT and not self._engine.alive:
                raise EngineError(
                    f"the engine crashed while {lso.request_id} ran; the request was requeued"
                )
            return already(f"{lso.request_id} had already ended: {self._fate(run)}")
        tokens = _context_tokens(run)
        return LsoResult(
            message=(
                f"removed from the engine with {tokens} tokens; this instance resumes the "
                "request when there is room"
            ),
            num_bytes=self._observer.kv_bytes(tokens),
        )

    async def _swap_in(self, lso: SwapIn) -> LsoResult:
        state = self._state
        if lso.request_id in state.runs:
            return already(f"{lso.request_id} is running")
        swapped = state.swapped_out.get(lso.request_id)
        if swapped is None:
            if lso.request_id in state.pulled:
                raise LsoRefusedError(
                    f"{lso.request_id} waits in the window and was never swapped out"
                )
            return self._nothing_runs((lso.request_id,))
        self._admission.resume(swapped)
        return LsoResult(
            message=f"resumed with {swapped.context_tokens} tokens",
            num_bytes=self._observer.kv_bytes(swapped.context_tokens),
        )

    async def _checkpoint(self, lso: Checkpoint) -> LsoResult:
        require(self._engine, Capability.CHECKPOINT, "keep KV in host memory")
        pulled = self._state.find(lso.request_id)
        if pulled is None:
            return self._nothing_runs((lso.request_id,))
        if self._engine.snapshot().host_kv_capacity_bytes == 0:
            raise LsoRefusedError(
                f"the engine keeps no KV of {self._state.model} in host memory; "
                "the engine's log has the reason"
            )
        if pulled.checkpointed:
            return already(f"{lso.request_id} is checkpointed")
        pulled.checkpointed = True
        if lso.request_id in self._state.runs:
            return LsoResult(
                message=(
                    "KV is kept from the next run on; to begin now, swap the request out and in"
                )
            )
        return LsoResult(message="KV is kept, beginning with the first run on this instance")

    async def _clear(self, _lso: ClearCaches) -> LsoResult:
        before = self._engine.snapshot().host_kv_bytes
        await self._engine.clear_caches()
        return LsoResult(
            message="all KV was dropped except that of running requests", num_bytes=before
        )

    def _nothing_runs(self, request_ids: tuple[RequestId, ...]) -> LsoResult:
        """
        Check that this instance has held each request and that the request has left.

        The caller has checked that none of the requests runs or is swapped out.

        Raises:
            LsoRefusedError: A request was never here, or waits in the window.
        """
        state = self._state
        for name in request_ids:
            if name in state.pulled:
                raise LsoRefusedError(f"{name} does not run: it waits in the window")
            if name not in state.departed:
                raise LsoRefusedError(
                    f"{name} is unknown to {state.instance_id}: it runs elsewhere, waits in a "
                    "queue, or never existed"
                )
        fates = {state.departed[name] for name in request_ids}
        return already(
            f"{_names(request_ids)} left the instance before: {', '.join(sorted(fates))}"
        )

    def _fate(self, run: Run) -> str:
        return self._state.departed.get(run.request.request_id, "unknown")


def _left_by(run: Run, ending: Ending) -> bool:
    return run.ending is ending and run.answer.finish_reason is None


def _context_tokens(run: Run) -> int:
    return run.request.prompt_tokens + run.answer.num_tokens


def _names(request_ids: tuple[RequestId, ...]) -> str:
    return request_ids[0] if len(request_ids) == 1 else f"all {len(request_ids)} requests"
