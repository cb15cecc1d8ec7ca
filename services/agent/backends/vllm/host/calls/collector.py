"""Outputs of vLLM's engine client that the application reads one by one."""

import asyncio
from collections import deque
from typing import Any

from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import async_llm
from vllm.v1.engine.output_processor import RequestOutputCollector

from services.agent.backends.vllm.host.calls.events import CallEvents, events_of_call

_MOST_IN_A_ROW = 16
"""Number of outputs that one stream reads before the others have their turn."""


class StepCollector(RequestOutputCollector):  # type: ignore[misc]  # vLLM is untyped to mypy
    """
    Collects the outputs of one request, and notes in the events of its call what has been read.

    vLLM's collector joins outputs if the application is slow; events would then depend on times.
    """

    def __init__(self, output_kind: RequestOutputKind, request_id: str) -> None:
        super().__init__(output_kind, request_id)
        self._events = events_of_call.get() if output_kind == RequestOutputKind.DELTA else None
        self._outputs: deque[Any] = deque()
        self._in_a_row = 0

    def put(self, output: Any) -> None:
        if self._events is None:
            super().put(output)
            return
        self._outputs.append(output)
        self.ready.set()

    def get_nowait(self) -> Any:
        if self._events is None:
            return super().get_nowait()
        self._events.reads(self.request_id)
        self._in_a_row += 1
        if not self._outputs or self._in_a_row > _MOST_IN_A_ROW:
            return None
        return self._next(self._events)

    async def get(self) -> Any:
        if self._events is None:
            return await super().get()
        self._in_a_row = 0
        if self._outputs:
            await asyncio.sleep(0)
        while not self._outputs:
            self.ready.clear()
            await self.ready.wait()
        return self._next(self._events)

    def _next(self, events: CallEvents) -> Any:
        output = self._outputs.popleft()
        if isinstance(output, Exception):
            raise output
        events.has_read(self.request_id, output.outputs)
        return output


def collect_steps() -> None:
    """Let vLLM's engine clients in this process use `StepCollector`."""
    async_llm.RequestOutputCollector = StepCollector
