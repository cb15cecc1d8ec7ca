"""
Virtual time: an event loop that jumps to its next timer instead of waiting for it.

On it, `asyncio.sleep` and timeouts of the loop take no wall time. Sockets and threads work, since
time does not pass while a thread works; processes and other waits outside the loop do not. Tests
marked `virtual_time` run on it, and benchmarks that run a whole mesh for many minutes.
"""

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")
BEGIN = 1_700_000_000.0
"""Unix time at which virtual time begins."""
MAX_THREAD_S = 60.0
"""Wall time that a thread may take."""
MAX_IDLE_S = 5.0
"""Wall time without any timer, in which only sockets may wake the loop."""


class _JumpingSelector(selectors.DefaultSelector):
    """
    A selector that calls *idle* when no socket is ready.

    *idle* advances virtual time and returns 0, or returns the wall time to wait.
    """

    def __init__(self, idle: Callable[[float | None], float]) -> None:
        super().__init__()
        self._idle = idle

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        found = super().select(0)
        if found or timeout == 0 or (wall_s := self._idle(timeout)) == 0:
            return found
        found = super().select(wall_s)
        if not found:
            raise RuntimeError(f"nothing has happened for {wall_s} s: virtual time cannot pass")
        return found


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop whose time passes only when nothing is ready."""

    def __init__(self) -> None:
        self._now = 0.0
        self._threads = 0
        super().__init__(_JumpingSelector(self._idle))

    def time(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        """Let time pass at once, as in a process that stalls."""
        self._now += seconds

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> Any:  # type: ignore[override]  # any types
        self._threads += 1
        future = super().run_in_executor(executor, func, *args)
        future.add_done_callback(self._thread_ended)
        return future

    def _thread_ended(self, _: object) -> None:
        self._threads -= 1

    def _idle(self, timeout: float | None) -> float:
        """Advance by *timeout* to the next timer and return 0, or return the wall time to wait."""
        if self._threads:
            return MAX_THREAD_S
        if timeout is None:
            return MAX_IDLE_S
        self._now += timeout
        return 0.0


class LoopClock:
    """A wall clock that follows the running loop's time."""

    def now(self) -> float:
        return BEGIN + asyncio.get_running_loop().time()


def run_virtually(main: Coroutine[Any, Any, T]) -> T:
    """Run *main* like `asyncio.run`, in virtual time."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)


def stall(seconds: float) -> None:
    """Stall the running loop, which must be virtual."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualTimeLoop)
    loop.advance(seconds)
