"""The client for programs without asyncio: it runs the client for asyncio in a thread."""

import asyncio
import os
import threading
from collections.abc import Coroutine, Iterator
from concurrent.futures import CancelledError, Future
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import Any, TypeVar

from shared.client.client import GIVE_UP_AFTER_S, STATUS_TIMEOUT_S, Answer, Client, connect
from shared.contracts.errors import MeshError
from shared.contracts.requests import RequestCompleted
from shared.contracts.stored import RequestStatus
from shared.producer.effects import NewTokens

T = TypeVar("T")


class _LoopThread:
    """A thread with an event loop, for one process."""

    def __init__(self, name: str) -> None:
        self._pid = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._gate = threading.Lock()
        """Held to begin a coroutine, so that none begins after the end of the loop."""
        self._closed = False
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """
        Run *coroutine* in the thread, and return its result.

        Raises:
            MeshError: This process is a fork of the one that has the thread, or the thread has
                ended or ends.
        """
        try:
            future = self._begin(coroutine)
        except MeshError:
            coroutine.close()
            raise
        try:
            return future.result()
        except CancelledError as error:
            raise MeshError("the client was closed before the answer") from error
        except BaseException:  # also KeyboardInterrupt, which ends the wait only
            future.cancel()
            raise

    def close(self) -> None:
        """End the loop and the thread; calls in progress in other threads raise `MeshError`."""
        self._check_process()
        with self._gate:
            self._closed = True
            ending = asyncio.run_coroutine_threadsafe(_end_others(), self._loop)
        ending.result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _begin(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        self._check_process()
        with self._gate:
            if self._closed:
                raise MeshError("the client is closed")
            return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise MeshError("the client belongs to the parent process: connect after the fork")


async def _end_others() -> None:
    """End all other tasks of the running loop, and its generators."""
    while others := asyncio.all_tasks() - {asyncio.current_task()}:
        for task in others:
            task.cancel()
        await asyncio.wait(others)
    await asyncio.get_running_loop().shutdown_asyncgens()


class SyncAnswer:
    """
    `Answer` without asyncio.

    Args:
        answer: The answer.
        thread: Thread of its client.
    """

    def __init__(self, answer: Answer, thread: _LoopThread) -> None:
        self._answer = answer
        self._thread = thread

    @property
    def request_id(self) -> str:
        """Id of the request."""
        return self._answer.request_id

    def stream(self) -> Iterator[NewTokens]:
        """Yield the parts of the answer as they arrive; see `Answer.stream`."""
        parts = self._answer.stream()

        async def following() -> NewTokens | None:
            return await anext(parts, None)

        while (part := self._thread.run(following())) is not None:
            yield part

    def wait(self, timeout_s: float | None = None) -> RequestCompleted:
        """Wait for the end of the request; see `Answer.wait`."""
        return self._thread.run(self._answer.wait(timeout_s))

    def cancel(self) -> None:
        """Cancel the request, wherever it is; see `Answer.cancel`."""
        self._thread.run(self._answer.cancel())


class SyncClient:
    """
    `Client` without asyncio, for any number of threads of one process.

    Args:
        client: The client.
        thread: Its thread.
    """

    def __init__(self, client: Client, thread: _LoopThread) -> None:
        self._client = client
        self._thread = thread

    def submit(
        self, *, idempotent: bool = False, traceparent: str | None = None, **fields: Any
    ) -> SyncAnswer:
        """Publish a request durably; see `Client.submit`."""
        submitting = self._client.submit(idempotent=idempotent, traceparent=traceparent, **fields)
        return SyncAnswer(self._thread.run(submitting), self._thread)

    def status(self, request_id: str, *, timeout_s: float = STATUS_TIMEOUT_S) -> RequestStatus:
        """Ask how far an idempotent request has come; see `Client.status`."""
        return self._thread.run(self._client.status(request_id, timeout_s=timeout_s))


@contextmanager
def connect_sync(
    url: str, *, name: str = "client", give_up_after_s: float = GIVE_UP_AFTER_S
) -> Iterator[SyncClient]:
    """
    Context with a client for programs without asyncio; see `connect`.

    Processes that fork connect after the fork. A call of another thread that is in progress at the
    end, and each call after it, raises `MeshError`.
    """
    thread = _LoopThread(f"headway {name}")
    try:
        opened = connect(url, name=name, give_up_after_s=give_up_after_s)
        client = thread.run(opened.__aenter__())
        try:
            yield SyncClient(client, thread)
        finally:
            thread.run(_closed(opened))
    finally:
        thread.close()


async def _closed(opened: AbstractAsyncContextManager[Client]) -> None:
    await opened.__aexit__(None, None, None)
