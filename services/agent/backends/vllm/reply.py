"""The host's answer to a command that somebody waits for."""

import asyncio

from shared.contracts.base import Seconds
from shared.contracts.errors import EngineError


class Reply:
    """One wait at a time."""

    def __init__(self) -> None:
        self._future: asyncio.Future[None] | None = None

    async def wait(self, timeout_s: Seconds) -> None:
        """
        Wait until it has come.

        Raises:
            EngineError: It says that the command failed.
            TimeoutError: It has not come.
        """
        self._future = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(timeout_s):
                await self._future
        finally:
            self._future = None

    def end(self, error: EngineError | None = None) -> None:
        """It has come; without effect when nobody waits."""
        if self._future is not None and not self._future.done():
            if error is None:
                self._future.set_result(None)
            else:
                self._future.set_exception(error)
