"""A TCP proxy whose connections tests can cut."""

import asyncio
from types import TracebackType
from typing import Self


class TcpProxy:
    """
    Forwards connections to one address.

    `drop` resets every connection; `refusing` makes the proxy refuse new connections; while
    `answering` is not set, answers wait.
    """

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.refusing = False
        self.answering = asyncio.Event()
        self.answering.set()

    @property
    def port(self) -> int:
        return self._server.sockets[0].getsockname()[1]

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._server.close()
        self.drop()
        self.answering.set()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def drop(self) -> None:
        for writer in self._writers:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        if self.refusing:
            writer.transport.abort()
            return
        try:
            upstream_reader, upstream_writer = await asyncio.open_connection(*self._target)
        except OSError:
            writer.transport.abort()
            return
        self._writers |= {writer, upstream_writer}
        try:
            await asyncio.gather(
                self._pump(reader, upstream_writer),
                self._pump(upstream_reader, writer, may=self.answering),
            )
        finally:
            for each in (writer, upstream_writer):
                self._writers.discard(each)
                each.transport.abort()

    @staticmethod
    async def _pump(
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        may: asyncio.Event | None = None,
    ) -> None:
        try:
            while data := await reader.read(65536):
                if may is not None:
                    await may.wait()
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        finally:
            writer.close()
