"""One run in an engine core: converts the core's outputs into events for the front."""

from collections.abc import Callable
from typing import Any

from vllm.v1.engine import EngineCoreRequest

from services.agent.backends.base import EngineRequest
from services.agent.backends.vllm.host.answer_end import AnswerEnd
from services.agent.backends.vllm.host.engine import Engine
from services.agent.backends.vllm.shared.prefill_reports import reported_prefill_s
from services.agent.backends.vllm.shared.wire import RunOutput
from services.engine_core.encoding import encode_output
from shared.contracts.errors import EngineError
from shared.contracts.requests import FinishReason, StepDetails

_FINISHES = frozenset({None, *(reason.value for reason in FinishReason)})
"""Finish reasons of answers; vLLM also has `abort` and `error`."""


class Run:
    """
    Receiver of one run's outputs.

    Args:
        request: The run.
        built: The run's request to the engine core; None if the progress is the whole answer.
        engine: Engine of the run's model.
        end: Finds the end of the answer.
        on_output: Called with each output, in order.
        on_error: Called with the run and the error that ends it.
    """

    def __init__(
        self,
        request: EngineRequest,
        built: EngineCoreRequest | None,
        engine: Engine,
        end: AnswerEnd,
        *,
        on_output: Callable[[RunOutput], None],
        on_error: Callable[["Run", Exception], None],
    ) -> None:
        self.run_id = request.request_id
        self.model = request.model
        self._built = built
        self._engine = engine
        self._end = end
        self._send = on_output
        self._fail = on_error

    async def begin(self) -> None:
        """
        Send the run's request to the engine core, or end the run if there is none.

        Raises:
            EngineDeadError: The core has died.
        """
        if self._built is None:
            self._send(RunOutput(self.run_id, (), FinishReason.STOP.value))
        else:
            await self._engine.submit(self._built, self)

    async def abort(self) -> None:
        """End the run in the engine core; nothing more is reported."""
        if self._built is not None:
            await self._engine.abort(self._built.request_id)

    def on_output(self, output: Any) -> bool:
        read = self._read(output)
        self._send(read)
        return bool(read.finish)

    def on_error(self, error: Exception) -> None:
        self._fail(self, error)

    def _read(self, output: Any) -> RunOutput:
        finish = None if output.finish_reason is None else str(output.finish_reason)
        if finish not in _FINISHES:
            raise EngineError(f"the engine ended the run: {output.stop_reason or finish}")
        is_stop = finish == FinishReason.STOP.value
        token_ids = self._end.push(tuple(output.new_token_ids), stopped=is_stop)
        if self._end.reached:
            finish = FinishReason.STOP.value
        details = encode_output(output)
        return RunOutput(
            self.run_id,
            token_ids,
            finish or "",
            # vLLM reports cached tokens and prefill time only in the output with the first tokens.
            output.prefill_stats.num_cached_tokens if output.prefill_stats else 0,
            reported_prefill_s(output.kv_transfer_params),
            (StepDetails(len(token_ids), details),) if details else (),
        )
