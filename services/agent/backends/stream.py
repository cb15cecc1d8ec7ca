"""The way of tokens from an engine's loop to the task that waits for them."""

import asyncio
from collections.abc import AsyncIterator

from services.agent.backends.base import EngineOutput
from shared.contracts.base import Seconds
from shared.contracts.errors import EngineError
from shared.contracts.requests import FinishReason


class OutputStream:
    """
    One run's outputs. Made and used in one event loop; never blocks the sender.

    A slow reader gets several outputs merged into one. What comes after the end is dropped.
    """

    def __init__(self) -> None:
        self._token_ids: list[int] = []
        self._cached_tokens = 0
        self._prefill_s = 0.0
        self._finish_reason: FinishReason | None = None
        self._error: EngineError | None = None
        self._ended = False
        self._arrived = asyncio.Event()

    def push(
        self,
        token_ids: tuple[int, ...],
        finish_reason: FinishReason | None = None,
        *,
        cached_tokens: int = 0,
        prefill_s: Seconds = 0.0,
    ) -> None:
        """New tokens; with *finish_reason* they are the last."""
        if self._ended:
            return
        self._token_ids.extend(token_ids)
        self._cached_tokens += cached_tokens
        self._prefill_s += prefill_s
        self._finish_reason = finish_reason
        self._ended = finish_reason is not None
        self._arrived.set()

    def end(self) -> None:
        """The run was aborted."""
        self._ended = True
        self._arrived.set()

    def fail(self, error: EngineError) -> None:
        """The run failed; what came before is still read."""
        if not self._ended:
            self._error = error
            self.end()

    @property
    def ended(self) -> bool:
        """Nothing more will come."""
        return self._ended

    async def outputs(self) -> AsyncIterator[EngineOutput]:
        """
        The outputs until the end.

        Raises:
            EngineError: The run failed.
        """
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            if self._token_ids or self._finish_reason is not None:
                output = EngineOutput(
                    token_ids=tuple(self._token_ids),
                    finish_reason=self._finish_reason,
                    cached_tokens=self._cached_tokens,
                    prefill_s=self._prefill_s,
                )
                ended = self._ended
                self._token_ids.clear()
                self._cached_tokens, self._prefill_s = 0, 0.0
                yield output
                if ended:
                    break
            elif self._ended:
                break
        if self._error is not None:
            raise self._error
