"""Runs the plan generator in a separate process, so that solving never blocks the event loop."""

import asyncio
import contextlib
import signal
import time
from collections.abc import Mapping
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from types import TracebackType
from typing import NamedTuple, Self, TypeVar

import structlog

from shared.contracts.base import Seconds
from solver.planning.capacity.advice import AdviceOptions, DeviceAdvice, scale_advice
from solver.planning.explanation import PlacedGroup, explain
from solver.planning.problem.problem import QueueOrder
from solver.planning.problem.snapshot import ClusterSnapshot, planning_problem
from solver.planning.review import Basis, Review, ReviewOptions, review

log = structlog.get_logger()
PATIENCE_S = 30.0
"""Time beyond the solve budget that a solve may take on a busy machine."""


class _Review(NamedTuple):
    snapshot: ClusterSnapshot
    basis: Basis | None
    seed: int


class _Explain(NamedTuple):
    snapshot: ClusterSnapshot
    order: QueueOrder
    most: int


class _Advise(NamedTuple):
    snapshot: ClusterSnapshot
    options: AdviceOptions
    floors: Mapping[str, int]
    seed: int


_Task = _Review | _Explain | _Advise
_Answer = Review | tuple[PlacedGroup, ...] | tuple[DeviceAdvice, ...]
_T = TypeVar("_T")


class PlanWorker:
    """
    Reviews plans in one long-lived process, one plan at a time.

    Args:
        options: Options of the planner.
        patience_s: Time beyond the solve budget after which the process is replaced.
    """

    def __init__(self, options: ReviewOptions, *, patience_s: Seconds = PATIENCE_S) -> None:
        self._options = options
        self._patience_s = patience_s
        self._seed = 0
        self.restarts = 0
        """Number of times that the worker process ended or hung and was replaced."""
        self._process: SpawnProcess
        self._pipe: Connection
        self._ready: asyncio.Task[object]
        self._turn = asyncio.Lock()

    async def __aenter__(self) -> Self:
        self._start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._stop()

    @property
    def pid(self) -> int | None:
        """Process id of the worker; a replaced worker has another id."""
        return self._process.pid

    async def ready(self) -> None:
        """
        Wait until the worker process has loaded its kernels.

        Raises:
            EOFError: The process ended before its kernels were loaded.
        """
        await asyncio.shield(self._ready)

    async def review(self, snapshot: ClusterSnapshot, basis: Basis | None) -> Review | None:
        """
        Review the plan for a snapshot; the review contains the plan to follow from now on.

        Returns:
            The review, or None if the process still loads its kernels, failed or took too long. A
            failed or slow process is replaced.
        """
        self._seed += 1
        answer = await self._ask(_Review(snapshot, basis, self._seed))
        return answer if isinstance(answer, Review) else None

    async def explain(
        self, snapshot: ClusterSnapshot, order: QueueOrder, *, most: int
    ) -> tuple[PlacedGroup, ...]:
        """
        Run `solver.planning.explanation.explain` in the worker; the result is empty where `review`
        returns None.
        """
        return _all(PlacedGroup, await self._ask(_Explain(snapshot, order, most)))

    async def advise(
        self, snapshot: ClusterSnapshot, options: AdviceOptions, floors: Mapping[str, int]
    ) -> tuple[DeviceAdvice, ...]:
        """
        Run `capacity.advice.scale_advice` in the worker; the result is empty where `review` returns
        None.
        """
        self._seed += 1
        return _all(DeviceAdvice, await self._ask(_Advise(snapshot, options, floors, self._seed)))

    async def _ask(self, task: _Task) -> _Answer | None:
        if not self._ready.done():
            return None
        async with self._turn:
            try:
                await self.ready()
                return await asyncio.to_thread(self._exchange, task)
            except (OSError, EOFError) as error:
                log.warning("plan.worker_lost", reason=repr(error))
                await self._stop()
                self._start()
                self.restarts += 1
                return None

    def _exchange(self, task: _Task) -> _Answer:
        self._pipe.send(task)
        patience_s = self._options.budget_s + self._patience_s
        if not self._pipe.poll(patience_s):
            raise TimeoutError(f"the plan generator did not answer within {patience_s} s")
        answer: _Answer = self._pipe.recv()
        return answer

    def _start(self) -> None:
        # Spawn the worker: a forked process would lack the threads of this one, but copy the locks
        # that they hold.
        context = get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_work, args=(theirs, self._options), name="plan-worker", daemon=True
        )
        self._process.start()
        theirs.close()
        self._ready = asyncio.create_task(
            asyncio.to_thread(self._pipe.recv), name="plan-worker-ready"
        )

    async def _stop(self) -> None:
        # Kill the process without asking it to stop: it may be stuck, and none of its state is
        # needed.
        self._process.kill()
        await asyncio.wait((self._ready,))
        await asyncio.to_thread(self._process.join)
        self._ready.exception()  # avoids asyncio's warning about an unread exception
        self._pipe.close()


def _work(pipe: Connection, options: ReviewOptions) -> None:
    """Entry point of the worker process: load or compile the kernels, then serve until killed."""
    # Ctrl-C in a terminal reaches all processes; the leader still plans while it drains.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    from solver.planning.search.loading import compile_kernels  # noqa: PLC0415 - numba is for workers

    compile_kernels()
    pipe.send("ready")
    while True:
        try:
            task: _Task = pipe.recv()
        except EOFError:
            return
        pipe.send(_answer(task, options))


def _all(kind: type[_T], answer: object) -> tuple[_T, ...]:
    """Elements of *answer*, all of type *kind*; empty if *answer* is not a sequence."""
    if not isinstance(answer, tuple):
        return ()
    return tuple(each for each in answer if isinstance(each, kind))


def _answer(task: _Task, options: ReviewOptions) -> _Answer:
    if isinstance(task, _Review):
        return review(
            task.snapshot, task.basis, options=options, clock=time.thread_time, seed=task.seed
        )
    if isinstance(task, _Advise):
        # A failure of the advice must not end a process that can plan.
        with contextlib.suppress(RuntimeError):
            return scale_advice(
                task.snapshot,
                importance_weight=options.importance_weight,
                objective=options.objective,
                options=task.options,
                floors=task.floors,
                clock=time.thread_time,
                seed=task.seed,
            )
        return ()
    problem = planning_problem(
        task.snapshot, importance_weight=options.importance_weight, objective=options.objective
    )
    return explain(problem, task.order, most=task.most)
