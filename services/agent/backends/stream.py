"""Stream of tokens from an engine's loop to the task that reads them."""

import asyncio
from collections.abc import AsyncIterator
from itertools import chain

from services.agent.backends.base import EngineOutput
from shared.contracts.errors import EngineError


class OutputStream:
    """
    Stream of the outputs of one run. The stream is used in one event loop only and never blocks the
    sender.

    Outputs that a slow reader has not read are merged into one. Outputs after the end are dropped.
    """

    def __init__(self) -> None:
        self._outputs: list[EngineOutput] = []
        self._error: EngineError | None = None
        self._arrived = asyncio.Event()
        self.ended = False
        """True after the last output of the run; only this class writes the field."""

    def push(self, output: EngineOutput) -> None:
        """Append *output* to the stream; an output with a finish reason is the last output."""
        if not self.ended:
            self._outputs.append(output)
            self.ended = output.finish_reason is not None
            self._arrived.set()

    def end(self) -> None:
        """End the stream without a finish reason; earlier outputs can still be read."""
        self.ended = True
        self._arrived.set()

    def fail(self, error: EngineError) -> None:
        """Fail the stream with *error*; earlier outputs can still be read."""
        if not self.ended:
            self._error = error
            self.end()

    async def outputs(self) -> AsyncIterator[EngineOutput]:
        """
        Iterate over the outputs until the end of the stream.

        Raises:
            EngineError: The run failed.
        """
        while self._outputs or not self.ended:
            await self._arrived.wait()
            self._arrived.clear()
            if self._outputs:
                output, self._outputs = _merged(self._outputs), []
                yield output
        if self._error is not None:
            raise self._error


def _merged(outputs: list[EngineOutput]) -> EngineOutput:
    if len(outputs) == 1:
        return outputs[0]
    return EngineOutput(
        token_ids=tuple(chain.from_iterable(each.token_ids for each in outputs)),
        finish_reason=outputs[-1].finish_reason,
        cached_tokens=sum(each.cached_tokens for each in outputs),
        prefill_s=sum(each.prefill_s for each in outputs),
        details=tuple(chain.from_iterable(each.details for each in outputs)),
    )
