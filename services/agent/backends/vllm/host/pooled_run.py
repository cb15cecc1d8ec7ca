"""One run of a pooling model in an engine core: gathers the outputs of its inputs."""

from collections.abc import Callable, Sequence
from typing import Any

from vllm.v1.engine import EngineCoreRequest

from services.agent.backends.base import EngineRequest
from services.agent.backends.vllm.host.engine import Engine
from services.agent.backends.vllm.shared.prefill_reports import reported_prefill_s
from services.agent.backends.vllm.shared.wire import RunOutput
from services.engine_core.encoding import encode_output
from shared.contracts.errors import EngineError
from shared.contracts.requests import FinishReason, StepDetails


class PooledRun:
    """
    The inputs of one run, which the engine core computes as separate requests, in any order.

    The run is reported once, with the outputs of all inputs in their order. An input that fails
    ends the run; the core still computes the other inputs.

    Args:
        request: The run.
        inputs: Requests to the engine core.
        engine: Engine of the run's model.
        on_output: Called with the output of the run.
        on_error: Called with the run and the error that ends it.
    """

    def __init__(
        self,
        request: EngineRequest,
        inputs: Sequence[EngineCoreRequest],
        engine: Engine,
        *,
        on_output: Callable[[RunOutput], None],
        on_error: Callable[["PooledRun", Exception], None],
    ) -> None:
        self.run_id = request.request_id
        self.model = request.model
        self._inputs = inputs
        self._engine = engine
        self._send = on_output
        self._fail = on_error
        self._details: dict[int, StepDetails] = {}
        """Place of an input -> its output."""
        self._cached_tokens = 0

    async def begin(self) -> None:
        """
        Send all inputs to the engine core.

        Raises:
            EngineDeadError: The core has died.
        """
        for place, each in enumerate(self._inputs):
            await self._engine.submit(each, _Input(self, place))

    async def abort(self) -> None:
        """End the run in the engine core; nothing more is reported."""
        for each in self._inputs:
            await self._engine.abort(each.request_id)

    def take(self, place: int, output: Any) -> None:
        """Take the output of the input at *place*; report the run if it is the last one."""
        reason = str(output.finish_reason)
        if reason != FinishReason.STOP.value or output.pooling_output is None:
            raise EngineError(f"the engine ended an input: {output.stop_reason or reason}")
        self._details[place] = StepDetails(0, encode_output(output))
        if output.prefill_stats:
            self._cached_tokens += output.prefill_stats.num_cached_tokens
        if len(self._details) < len(self._inputs):
            return
        is_alone = len(self._inputs) == 1  # the times of several inputs overlap
        self._send(
            RunOutput(
                self.run_id,
                (),
                FinishReason.STOP.value,
                self._cached_tokens,
                reported_prefill_s(output.kv_transfer_params) if is_alone else 0.0,
                tuple(self._details[place] for place in range(len(self._inputs))),
            )
        )

    def fail(self, error: Exception) -> None:
        """End the run, because an input has failed."""
        self._fail(self, error)


class _Input:
    """Receiver of the output of one input."""

    def __init__(self, run: PooledRun, place: int) -> None:
        self._run = run
        self._place = place

    def on_output(self, output: Any) -> bool:
        self._run.take(self._place, output)
        return True

    def on_error(self, error: Exception) -> None:
        self._run.fail(error)
