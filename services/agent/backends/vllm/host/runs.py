"""One run in an engine core: reads the core's outputs into events for the front."""

from collections.abc import Callable
from typing import Any

from services.agent.backends.base import EngineRequest
from services.agent.backends.vllm.host.core_engine import CoreEngine
from services.agent.backends.vllm.shared.prefill_reports import reported_prefill_s
from services.agent.backends.vllm.shared.wire import RunOutput
from services.engine_core.outputs import encode_output
from shared.contracts.errors import EngineError
from shared.contracts.requests import FinishReason

_FINISHES = frozenset({None, *(reason.value for reason in FinishReason)})
"""Finish reasons of answers; vLLM also has `abort`, `error` and `repetition`."""


class Run:
    """
    Receiver of one run's outputs.

    Args:
        request: The run.
        core_id: Id of the run in the engine core.
        engine: Engine of the run's model.
        on_output: Called with each output, in order.
        on_error: Called with the run and the error that ends it.
    """

    def __init__(
        self,
        request: EngineRequest,
        core_id: str,
        engine: CoreEngine,
        *,
        on_output: Callable[[RunOutput], None],
        on_error: Callable[["Run", Exception], None],
    ) -> None:
        self.run_id = request.request_id
        self.model = request.model
        self.core_id = core_id
        self.engine = engine
        self._send = on_output
        self._fail = on_error

    def on_output(self, output: Any) -> None:
        self._send(self._read(output))

    def on_error(self, error: Exception) -> None:
        self._fail(self, error)

    def _read(self, output: Any) -> RunOutput:
        finish = None if output.finish_reason is None else str(output.finish_reason)
        if finish not in _FINISHES:
            raise EngineError(f"the engine ended the run: {output.stop_reason or finish}")
        return RunOutput(
            self.run_id,
            tuple(output.new_token_ids),
            finish or "",
            # Both are in the output with the first tokens only.
            output.prefill_stats.num_cached_tokens if output.prefill_stats else 0,
            reported_prefill_s(output.kv_transfer_params),
            encode_output(output),
        )
