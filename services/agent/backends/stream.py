"""Stream of tokens from an engine's loop to the task that reads them."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from itertools import chain

from services.agent.backends.base import EngineOutput
from shared.contracts.errors import MeshError


class OutputStream:
    """
    Stream of the outputs of one run. The stream is used in one event loop only and never blocks the
    sender.

    Outputs of one answer that a slow reader has not read are merged into one. Outputs after the end
    are dropped.
    """

    def __init__(self) -> None:
        self._outputs: list[EngineOutput] = []
        self._error: MeshError | None = None
        self._arrived = asyncio.Event()
        self.ended = False
        """True after the last output of the run; only this class writes the field."""

    def push(self, output: EngineOutput) -> None:
        """Append *output* to the stream; outputs after the last output are ignored."""
        if not self.ended:
            self._outputs.append(output)
            self.ended = output.is_last
            self._arrived.set()

    def end(self) -> None:
        """End the stream without a finish reason; earlier outputs can still be read."""
        self.ended = True
        self._arrived.set()

    def fail(self, error: MeshError) -> None:
        """Fail the stream with *error*; earlier outputs can still be read."""
        if not self.ended:
            self._error = error
            self.end()

    async def outputs(self) -> AsyncIterator[EngineOutput]:
        """
        Iterate over the outputs until the end of the stream.

        Raises:
            MeshError: The run failed.
        """
        while self._outputs or not self.ended:
            await self._arrived.wait()
            self._arrived.clear()
            if self._outputs:
                outputs, self._outputs = self._outputs, []
                for output in _by_answer(outputs):
                    yield output
        if self._error is not None:
            raise self._error


def _by_answer(outputs: list[EngineOutput]) -> Iterator[EngineOutput]:
    """Merge the outputs of each answer; the last output of a call remains the last."""
    answers: dict[int | None, list[EngineOutput]] = {}
    for output in outputs:
        answers.setdefault(output.child, []).append(output)
    last = answers.pop(None, None)
    yield from map(_merged, answers.values())
    if last is not None:
        yield _merged(last)


def _merged(outputs: list[EngineOutput]) -> EngineOutput:
    if len(outputs) == 1:
        return outputs[0]
    return EngineOutput(
        token_ids=tuple(chain.from_iterable(each.token_ids for each in outputs)),
        finish_reason=outputs[-1].finish_reason,
        cached_tokens=sum(each.cached_tokens for each in outputs),
        prefill_s=sum(each.prefill_s for each in outputs),
        details=tuple(chain.from_iterable(each.details for each in outputs)),
        child=outputs[-1].child,
        prompt_tokens=sum(each.prompt_tokens for each in outputs),
        response=outputs[-1].response,
    )
