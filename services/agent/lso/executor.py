"""Runs operations, one after another on each track, and says how each ended."""

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
from solver.planning.lsos import Lso, Track

log = structlog.get_logger()

L = TypeVar("L", bound=Lso)
Operation = Callable[[L], Awaitable[LsoResult]]
"""
Does one operation. It may be repeated: what is done already is `already`.

Raises `LsoRefusedError` before it has changed anything, `MeshError` when it failed.
"""
REFUSALS = (LsoRefusedError, UnsupportedError, ContractError)


class LsoExecutor:
    """
    Executes operations in the order in which they come, one at a time per track.

    An operation on runs waits for no download of weights, and the other way round; activating a
    model waits for both.

    Args:
        metrics: Counts what ends.
    """

    def __init__(self, metrics: LsoMetrics) -> None:
        self._metrics = metrics
        self._operations: dict[type[Lso], Operation[Any]] = {}
        self._locks = {track: asyncio.Lock() for track in Track}
        self._tasks: set[asyncio.Task[Any]] = set()

    def register(self, kind: type[L], operation: Operation[L]) -> None:
        """Say how *kind* is done."""
        self._operations[kind] = operation

    async def run(self, *lsos: Lso) -> tuple[LsoResult, ...]:
        """
        Run *lsos* in order; the first that fails is the last that is tried.

        Never raises for what an operation does: its result says it.
        """
        results = []
        for lso in lsos:
            async with AsyncExitStack() as stack:
                # Always in this order, so that no two wait for each other.
                for track in Track:
                    if track in lso.tracks:
                        await stack.enter_async_context(self._locks[track])
                results.append(await self.within(lso))
            if results[-1].outcome is LsoOutcome.FAILED:
                break
        return tuple(results)

    @asynccontextmanager
    async def exclusive(self) -> AsyncIterator[None]:
        """No operation runs while the context is open."""
        async with AsyncExitStack() as stack:
            for track in Track:
                await stack.enter_async_context(self._locks[track])
            yield

    def start(self, *lsos: Lso) -> asyncio.Task[tuple[LsoResult, ...]] | None:
        """Run *lsos* beside the caller; None when there are none."""
        if not lsos:
            return None
        task = asyncio.create_task(self.run(*lsos), name=f"lso:{lsos[0].kind}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def follow(self, lsos: Iterable[Lso]) -> tuple[tuple[Lso, LsoResult], ...]:
        """
        Run what a plan asks for; what is in the background is started and not waited for.

        Returns:
            What was waited for, with results.
        """
        lsos = tuple(lsos)
        ahead = [lso for lso in lsos if not lso.background]
        results = await self.run(*ahead)
        if all(result.outcome is not LsoOutcome.FAILED for result in results):
            # Each track by itself: nothing waits for what it does not depend on.
            for tracks in dict.fromkeys(lso.tracks for lso in lsos if lso.background):
                self.start(*(lso for lso in lsos if lso.background and lso.tracks == tracks))
        return tuple(zip(ahead, results, strict=False))

    async def within(self, lso: Lso) -> LsoResult:
        """Run *lso* as a part of the operation that is under way on its tracks."""
        log.info("lso.started", kind=lso.kind, why=lso.reason.text, **_named(lso))
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        done = await self._done(lso)
        result = replace(done, duration_s=loop.time() - started_s)
        self.record(lso, result)
        return result

    def record(self, lso: Lso, result: LsoResult) -> None:
        """Log and count an operation that has ended."""
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
        """Give up what still runs."""
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _done(self, lso: Lso) -> LsoResult:
        operation = self._operations.get(type(lso))
        if operation is None:
            return LsoResult(
                outcome=LsoOutcome.REFUSED, message=f"this agent knows no operation {lso.kind}"
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
    """What the operation is about, for logs."""
    return {
        name: value
        for name in ("request_id", "request_ids", "model")
        if (value := getattr(lso, name, None)) is not None
    }
