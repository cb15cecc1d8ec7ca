"""Life cycle of a service process: start, run until a signal, drain, exit code."""

import asyncio
import contextlib
import gc
import signal
from collections.abc import Awaitable, Callable

import structlog

from shared.contracts.base import Seconds
from shared.contracts.errors import BrokerUnavailableError, SettingsError

log = structlog.get_logger()

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_NO_BROKER = 3
CANCEL_PERIOD_S = 1.0
MAX_YOUNG_OBJECTS = 10_000
"""
Number of new objects from which Python looks for cycles among them; its default is 700, which a
service makes several times per request.
"""

ServiceMain = Callable[[asyncio.Event], Awaitable[None]]
"""Main function of a service: runs until its event is set, then drains and returns."""


async def run_until_stopped(main: ServiceMain, *, limit_s: Seconds | None = None) -> None:
    """
    Run *main*; the first SIGTERM or SIGINT sets its event, the second cancels *main*.

    *main* is also cancelled *limit_s* after the first signal, since a drain could wait for an
    absent broker without end.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    task = asyncio.ensure_future(main(stop))

    def end() -> None:
        if not task.done():
            task.cancel()
            # Each step of closing down may block forever.
            loop.call_later(CANCEL_PERIOD_S, end)

    def on_signal() -> None:
        if stop.is_set():
            end()
        elif limit_s is not None:
            loop.call_later(limit_s, end)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    with contextlib.suppress(asyncio.CancelledError):
        await task


def run_service(service: str, main: ServiceMain, *, limit_s: Seconds | None = None) -> int:
    """Run *main* in this process to its end, at most *limit_s* after the first stop signal."""
    try:
        import uvloop  # noqa: PLC0415 - absent on some platforms

        loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = uvloop.new_event_loop
    except ImportError:
        loop_factory = None
    gc.set_threshold(MAX_YOUNG_OBJECTS)
    code = EXIT_OK
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        try:
            runner.run(run_until_stopped(main, limit_s=limit_s))
        except* SettingsError as group:
            log.error("service.misconfigured", service=service, error=str(first_error(group)))
            code = EXIT_USAGE
        except* BrokerUnavailableError as group:
            log.error("broker.unreachable", service=service, error=str(first_error(group)))
            code = EXIT_NO_BROKER
    return code


def first_error(error: BaseException | None) -> BaseException | None:
    """The first error in a group, and in the groups that it has; else *error* itself."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
