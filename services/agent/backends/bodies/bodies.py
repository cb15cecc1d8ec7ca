"""Bodies that an engine in tokens answers at present."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

import structlog

from services.agent.backends.base import EngineCall, EngineRequest, NewOutput, RunEnded
from services.agent.backends.bodies.body_run import BodyRun
from shared.contracts.base import RequestId
from shared.contracts.errors import EngineError, MeshError
from shared.contracts.models import ModelEntry
from shared.models.tokenizer import Tokenizer

log = structlog.get_logger()
INLINE_BYTES = 4096
"""Largest body that is rendered without a thread, whose start takes longer than the rendering."""


class Bodies:
    """
    Renders bodies, long ones in threads, and runs their answers at the engine.

    Args:
        submit: Submits the run of one answer to the engine.
        cancel: Ends the run of one answer there.
        report: Receives the outputs and the ends of calls.
    """

    def __init__(
        self,
        *,
        submit: Callable[[EngineRequest], None],
        cancel: Callable[[RequestId], None],
        report: Callable[[Sequence[NewOutput | RunEnded]], None],
    ) -> None:
        self._submit, self._cancel, self._report = submit, cancel, report
        self._rendering: dict[RequestId, asyncio.Task[None]] = {}
        self._runs: dict[RequestId, BodyRun] = {}
        self._answers: dict[RequestId, tuple[RequestId, int]] = {}
        """Run of an answer that is not complete -> its call, and its index there."""
        self._tokenizers: dict[str, Tokenizer] = {}
        """Tokenizer of each model that had a body, by the model's directory."""

    def begin(
        self, request: EngineRequest, call: EngineCall, entry: ModelEntry, vocab_size: int | None
    ) -> None:
        """Begin the run of a call; its first outputs, or its refusal, follow."""
        task = asyncio.create_task(
            self._begun(request, call, entry, vocab_size), name="render a body"
        )
        self._rendering[request.request_id] = task
        task.add_done_callback(lambda _: self._rendering.pop(request.request_id, None))

    def events_of(self, new: NewOutput | RunEnded) -> list[NewOutput | RunEnded]:
        """The events that an event of the engine means; of a call, if it is about one's answer."""
        if (place := self._answers.get(new.request_id)) is None:
            return [new]
        name, index = place
        if isinstance(new, RunEnded):
            del self._answers[new.request_id]
            self._ended(name)
            return [RunEnded(name, new.error)]
        run = self._runs[name]
        outputs = run.push(index, new.output)
        if run.is_complete(index):
            del self._answers[new.request_id]
            if new.output.finish_reason is None:
                self._cancel(new.request_id)
        if outputs[-1].response is not None:
            del self._runs[name]
        return [NewOutput(name, output) for output in outputs]

    def cancel(self, name: RequestId) -> bool:
        """End the run of a call; False if *name* is none."""
        if (task := self._rendering.get(name)) is not None:
            task.cancel()
        return self._ended(name) or task is not None

    def clear(self) -> None:
        """Forget all calls, because the engine died."""
        for task in self._rendering.values():
            task.cancel()
        self._runs.clear()
        self._answers.clear()

    def _ended(self, name: RequestId) -> bool:
        """End the answers of a call that run at the engine; False if there is no such call."""
        for answer in [each for each, (call, _) in self._answers.items() if call == name]:
            del self._answers[answer]
            self._cancel(answer)
        return self._runs.pop(name, None) is not None

    async def _begun(
        self, request: EngineRequest, call: EngineCall, entry: ModelEntry, vocab_size: int | None
    ) -> None:
        name = request.request_id
        try:
            if len(call.body) <= INLINE_BYTES and entry.path in self._tokenizers:
                run = self._rendered(request, call, entry, vocab_size)
            else:
                run = await asyncio.to_thread(self._rendered, request, call, entry, vocab_size)
            missing = run.missing()
            self._report([NewOutput(name, output) for output in run.opening()])
            if not missing:
                return
            self._runs[name] = run
            indices = {each.request_id: int(each.request_id.rpartition("/")[2]) for each in missing}
            self._answers |= {answer: (name, index) for answer, index in indices.items()}
            for each in missing:
                self._submit(each)
        except MeshError as error:
            self._fail(name, error)
        except Exception as error:  # a fault here must end the call, not leave it waiting
            log.exception("body.broken")
            self._fail(name, EngineError(f"the body cannot be read: {error!r}"))

    def _fail(self, name: RequestId, error: MeshError) -> None:
        self._ended(name)
        self._report([RunEnded(name, error)])

    def _rendered(
        self, request: EngineRequest, call: EngineCall, entry: ModelEntry, vocab_size: int | None
    ) -> BodyRun:
        tokenizer = self._tokenizers.get(entry.path)
        if tokenizer is None:
            tokenizer = self._tokenizers[entry.path] = Tokenizer.load(Path(entry.path))
        return BodyRun(request, call, entry, tokenizer, vocab_size)
