"""Loops that services run concurrently."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

from shared.contracts.errors import MeshError, SettingsError
from shared.runtime.events import EventLogger

log = EventLogger(__name__)
DRAIN_PERIOD_S = 0.05
BROKER_GONE_S = 5.0
"""Time without an answer of the broker after which a drain ends."""


async def pause(stop: asyncio.Event, duration_s: float) -> bool:
    """Sleep until *duration_s* has passed or *stop* is set; return whether *stop* is set."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(duration_s):
            await stop.wait()
    return stop.is_set()


async def every(
    period_s: float, action: Callable[[], Awaitable[None]], *, stop: asyncio.Event
) -> None:
    """
    Run *action* every *period_s* until *stop*.

    A failure of the broker or of a peer is logged, and the loop continues. Wrong settings and bugs
    end the loop.
    """
    # One task for all pauses: a time limit for each, which `pause` has, costs a cancellation.
    stopped = asyncio.create_task(stop.wait(), name="stop")
    try:
        while not stop.is_set():
            try:
                await action()
            except SettingsError:
                raise
            except MeshError as error:
                log.warning(
                    "action.failed",
                    action=getattr(action, "__qualname__", repr(action)),
                    error=str(error),
                )
            await asyncio.wait({stopped}, timeout=period_s)
    finally:
        stopped.cancel()


async def poll_until(
    condition: Callable[[], bool], *, timeout_s: float = float("inf"), period_s: float = 0.01
) -> bool:
    """Wait until *condition* is true or the time limit is reached; return whether it is true."""
    loop = asyncio.get_running_loop()
    until = loop.time() + timeout_s
    while not condition() and loop.time() < until:  # noqa: ASYNC110 - for what has no event
        await asyncio.sleep(period_s)
    return condition()


async def drained(
    is_empty: Callable[[], bool],
    broker_answers: Callable[[], bool],
    *,
    timeout_s: float = float("inf"),
) -> bool:
    """
    Wait until a service that stops *is_empty*; return whether it is.

    The wait ends after *timeout_s*, or when the broker does not answer for `BROKER_GONE_S`: without
    it, a service can neither pass answers on nor return requests, which the broker delivers again.
    """
    loop = asyncio.get_running_loop()
    answered_at = loop.time()

    def is_over() -> bool:
        nonlocal answered_at
        if broker_answers():
            answered_at = loop.time()
        return is_empty() or loop.time() - answered_at > BROKER_GONE_S

    await poll_until(is_over, timeout_s=timeout_s, period_s=DRAIN_PERIOD_S)
    return is_empty()
