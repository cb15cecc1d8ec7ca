"""Threads that compile grammars, with a limit on the time of each compilation."""

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from queue import SimpleQueue
from typing import Any

from shared.contracts.base import Seconds

Job = tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]


class CompileThreads:
    """
    The part of an `Executor` that vLLM's manager of structured outputs uses.

    A call that takes longer than the limit fails with a `TimeoutError`. Python cannot stop its
    thread, which ends later; the other threads continue with the next calls. The threads are
    daemons, so that a long call does not delay the end of the process.

    Args:
        limit_s: Maximum duration of one call, without the time in which it waits for a thread.
        num_threads: Number of threads.
    """

    def __init__(self, *, limit_s: Seconds, num_threads: int) -> None:
        self._limit_s = limit_s
        self._jobs: SimpleQueue[Job] = SimpleQueue()
        for _ in range(num_threads):
            threading.Thread(target=self._work, name="compile", daemon=True).start()

    def submit(self, call: Callable[..., Any], *args: Any) -> Future[Any]:
        """Start *call* on the next free thread."""
        result: Future[Any] = Future()
        self._jobs.put((result, call, args))
        return result

    def shutdown(self, *, wait: bool, cancel_futures: bool) -> None:
        """No-op: the threads end with the process, even if *wait* is true."""

    def _work(self) -> None:
        while True:
            self._run(*self._jobs.get())

    def _run(self, result: Future[Any], call: Callable[..., Any], args: tuple[Any, ...]) -> None:
        late = TimeoutError(f"the grammar takes longer than {self._limit_s:g} s to compile")
        timer = threading.Timer(self._limit_s, _fail, (result, late))
        timer.daemon = True
        timer.start()
        try:
            value = call(*args)
        except Exception as error:  # noqa: BLE001 - the caller gets every error with the result
            _fail(result, error)
        else:
            with contextlib.suppress(InvalidStateError):  # the call was too late
                result.set_result(value)
        finally:
            timer.cancel()


def _fail(result: Future[Any], error: Exception) -> None:
    with contextlib.suppress(InvalidStateError):
        result.set_exception(error)
