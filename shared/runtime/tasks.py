"""Loops that services run beside each other."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

import structlog

from shared.contracts.errors import MeshError, SettingsError

log = structlog.get_logger()


async def pause(stop: asyncio.Event, duration_s: float) -> bool:
    """Sleep, or less when *stop* is set; whether it is."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(stop.wait(), duration_s)
    return stop.is_set()


async def every(
    period_s: float, action: Callable[[], Awaitable[None]], *, stop: asyncio.Event
) -> None:
    """
    Run *action* each *period_s* until *stop*.

    What the broker or a peer denies it is logged and survived; wrong settings and bugs are not.
    """
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
        await pause(stop, period_s)


async def poll_until(
    condition: Callable[[], bool], *, timeout_s: float = float("inf"), period_s: float = 0.01
) -> bool:
    """Wait until *condition* holds or the time is up; whether it holds."""
    loop = asyncio.get_running_loop()
    until = loop.time() + timeout_s
    while not condition() and loop.time() < until:  # noqa: ASYNC110 - for what has no event
        await asyncio.sleep(period_s)
    return condition()
