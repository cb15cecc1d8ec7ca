"""Executes operations one at a time on each track, and reports their results."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any, TypeVar

import structlog

from services.agent.lso.metrics import LsoMetrics
from services.agent.lso.results import LsoRefusedError, LsoResult
from shared.contracts.control import LsoOutcome
from shared.contracts.errors import ContractError, MeshError, UnsupportedError
from solver.planning.lso.operations import Lso, Track

log = structlog.get_logger()

L = TypeVar("L", bound=Lso)
Operation = Callable[[L], Awaitable[LsoResult]]
"""
Function that executes one operation. Executing an operation again is safe: if nothing is left to
do, the result is `already`.

An implementation raises `LsoRefusedError` before any change, or `MeshError` on failure.
"""
REFUSALS = (LsoRefusedError, UnsupportedError, ContractError)


class LsoExecutor:
    """
    Executes operations in order of arrival, one at a time on each track.

    Operations on runs and loads of weights are on different tracks, so they do not wait for each
    other. Activating a model waits for both tracks.

    Args:
        metrics: Counts finished operations.
    """

    def __init__(self, metrics: LsoMetrics) -> None:
        self._metrics = metrics
        self._operations: dict[type[Lso], Operation[Any]] = {}
        self._locks = {track: asyncio.Lock() for track in Track}
        self._tasks: set[asyncio.Task[Any]] = set()

    def register(self, kind: type[L], operation: Operation[L]) -> None:
        """Set the function that executes operations of kind *kind*."""
        self._operations[kind] = operation

    async def run(self, *lsos: Lso) -> tuple[LsoResult, ...]:
        """
        Execute the operations *lsos* in order; stop at the first failure.

        Does not raise if an operation fails; the operation's result reports the failure.
        """
        results = []
        for lso in lsos:
            async with AsyncExitStack() as stack:
                # Lock the tracks always in this order, to avoid deadlocks.
                for track in Track:
                    if track in lso.tracks:
                        await stack.enter_async_context(self._locks[track])
                results.append(await self.within(lso))
            if results[-1].outcome is LsoOutcome.FAILED:
                break
        return tuple(results)

    @asynccontextmanager
    async def exclusive(self) -> AsyncIterator[None]:
        """Context in which no other operation runs."""
        async with AsyncExitStack() as stack:
            for track in Track:
                await stack.enter_async_context(self._locks[track])
            yield

    def start(self, *lsos: Lso) -> asyncio.Task[tuple[LsoResult, ...]] | None:
        """Execute the operations *lsos* in the background; return None if there are none."""
        if not lsos:
            return None
        task = asyncio.create_task(self.run(*lsos), name=f"lso:{lsos[0].kind}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def follow(self, lsos: Iterable[Lso]) -> tuple[tuple[Lso, LsoResult], ...]:
        """
        Execute the operations of a plan; do not wait for background operations.

        Returns:
            The operations in the foreground, with their results.
        """
        lsos = tuple(lsos)
        ahead = [lso for lso in lsos if not lso.background]
        results = await self.run(*ahead)
        if all(result.outcome is not LsoOutcome.FAILED for result in results):
            # Start the operations of each track separately, so that an operation waits only for
            # operations on its track.
            for tracks in dict.fromkeys(lso.tracks for lso in lsos if lso.background):
                self.start(*(lso for lso in lsos if lso.background and lso.tracks == tracks))
        return tuple(zip(ahead, results, strict=False))

    async def within(self, lso: Lso) -> LsoResult:
        """
        Execute the operation *lso* inside the operation in progress, which holds the same tracks.
        """
        log.info("lso.started", kind=lso.kind, why=lso.reason.text, **_named(lso))
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        done = await self._done(lso)
        result = replace(done, duration_s=loop.time() - started_s)
        self.record(lso, result)
        return result

    def record(self, lso: Lso, result: LsoResult) -> None:
        """Log and count a finished LLM serving operation."""
        self._metrics.ended(lso.kind, result)
        fields = {
            "kind": lso.kind,
            "outcome": result.outcome.value,
            "message": result.message,
            "duration_s": round(result.duration_s, 4),
            "num_bytes": result.num_bytes,
            **_named(lso),
        }
        if result.outcome is LsoOutcome.FAILED:
            log.error("lso.failed", **fields)
        elif result.outcome is LsoOutcome.REFUSED:
            log.warning("lso.refused", **fields)
        else:
            log.info("lso.completed", **fields)

    async def close(self) -> None:
        """Cancel running operations."""
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _done(self, lso: Lso) -> LsoResult:
        operation = self._operations.get(type(lso))
        if operation is None:
            return LsoResult(
                outcome=LsoOutcome.REFUSED,
                message=(f"this agent does not support the operation {lso.kind}"),
            )
        try:
            return await operation(lso)
        except REFUSALS as error:
            return LsoResult(outcome=LsoOutcome.REFUSED, message=str(error))
        except MeshError as error:
            return LsoResult(outcome=LsoOutcome.FAILED, message=str(error))
        except Exception as error:  # one broken operation must not end the agent
            log.exception("lso.broken", kind=lso.kind)
            return LsoResult(outcome=LsoOutcome.FAILED, message=f"{type(error).__name__}: {error}")


def _named(lso: Lso) -> dict[str, object]:
    """Subject of an LLM serving operation, for logs."""
    return {
        name: value
        for name in ("request_id", "request_ids", "model")
        if (value := getattr(lso, name, None)) is not None
    }
