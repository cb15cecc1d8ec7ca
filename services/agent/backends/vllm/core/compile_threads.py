"""Threads that compile grammars, with a limit on the time of each compilation."""

import contextlib
import threading
from collections.abc import Callable, Hashable
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

from shared.contracts.base import Seconds


@dataclass(eq=False, slots=True)
class _Job:
    result: Future[Any]
    call: Callable[..., Any]
    args: tuple[Any, ...]
    key: Hashable
    ended: bool = False
    replaced: bool = False
    """Whether another thread has been started in place of the job's."""


class CompileThreads:
    """
    The part of an `Executor` that vLLM's manager of structured outputs uses.

    A call that takes longer than the limit fails with a `TimeoutError`. Python cannot stop its
    thread, which ends later, so that another thread is started for the next calls; at *max_late*
    late calls, the calls after them wait. Meanwhile calls with the same key fail at once. The
    threads are daemons, so that a late call does not delay the end of the process.

    Args:
        limit_s: Maximum duration of one call, without the time in which it waits for a thread.
        num_threads: Number of threads without late calls.
        max_late: Maximum number of threads with late calls that are replaced at a time.
        key_of: Returns, from a call's arguments, the key of what it compiles.
    """

    def __init__(
        self,
        *,
        limit_s: Seconds,
        num_threads: int,
        max_late: int,
        key_of: Callable[..., Hashable],
    ) -> None:
        self._limit_s = limit_s
        self._max_late = max_late
        self._key_of = key_of
        self._jobs: SimpleQueue[_Job] = SimpleQueue()
        self._lock = threading.Lock()
        self._late: list[_Job] = []
        for _ in range(num_threads):
            self._start_thread()

    def submit(self, call: Callable[..., Any], *args: Any) -> Future[Any]:
        """Start *call* on the next free thread."""
        job = _Job(Future(), call, args, self._key_of(*args))
        self._jobs.put(job)
        return job.result

    def shutdown(self, *, wait: bool, cancel_futures: bool) -> None:
        """No-op: the threads end with the process, even if *wait* is true."""

    def _start_thread(self) -> None:
        threading.Thread(target=self._work, name="compile", daemon=True).start()

    def _work(self) -> None:
        replaced = False
        while not replaced:
            job = self._jobs.get()
            self._run(job)
            replaced = job.replaced

    def _run(self, job: _Job) -> None:
        with self._lock:
            is_late = any(late.key == job.key for late in self._late)
        if is_late:
            _fail(job.result, self._too_late())
            return
        timer = threading.Timer(self._limit_s, self._expire, (job,))
        timer.daemon = True
        timer.start()
        try:
            value = job.call(*job.args)
        except Exception as error:  # noqa: BLE001 - the caller gets every error with the result
            self._end(job)
            _fail(job.result, error)
        else:
            self._end(job)
            with contextlib.suppress(InvalidStateError):  # the call was too late
                job.result.set_result(value)
        finally:
            timer.cancel()

    def _expire(self, job: _Job) -> None:
        with self._lock:
            if job.ended:
                return
            job.replaced = len(self._late) < self._max_late
            self._late.append(job)
        if job.replaced:
            self._start_thread()
        _fail(job.result, self._too_late())

    def _end(self, job: _Job) -> None:
        with self._lock:
            job.ended = True
            if job in self._late:
                self._late.remove(job)

    def _too_late(self) -> TimeoutError:
        return TimeoutError(f"the grammar takes longer than {self._limit_s:g} s to compile")


def _fail(result: Future[Any], error: Exception) -> None:
    with contextlib.suppress(InvalidStateError):
        result.set_exception(error)
