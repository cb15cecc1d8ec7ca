"""Turns the parts of an answer into outputs of an engine core, step by step."""

from typing import Protocol

from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest
from vllm.v1.engine import FinishReason as EngineFinish
from vllm.v1.metrics.stats import PrefillStats

from services.engine_core.encoding import decode_output
from shared.contracts.errors import ContractError
from shared.contracts.requests import FinishReason, StepDetails, Tokens
from shared.producer.effects import NewTokens

_FINISH = {
    FinishReason.STOP: EngineFinish.STOP,
    FinishReason.LENGTH: EngineFinish.LENGTH,
    FinishReason.REPETITION: EngineFinish.REPETITION,
}


class WholeAnswer(Protocol):
    """A complete answer."""

    @property
    def token_ids(self) -> Tokens: ...

    @property
    def details(self) -> tuple[StepDetails, ...]: ...

    @property
    def finish_reason(self) -> FinishReason: ...


class AnswerSteps:
    """
    Outputs of the answer to one request.

    A stop token is in the same output as the finish reason, as in an engine core: vLLM leaves the
    text of such a token out. Answers with stop strings have one output for each token, because
    vLLM's rule for stop strings depends on the steps.
    """

    def __init__(self, request: EngineCoreRequest) -> None:
        self._request_id = request.request_id
        self.request_ids = (request.request_id,)
        params = request.sampling_params
        self._wants_details = wants_details(request)
        self._is_split = params is not None and bool(params.stop)
        self._stops = frozenset(params.stop_token_ids or ()) if params else frozenset()
        self._ends = self._stops | ({params.eos_token_id} if params else set())
        self._num_tokens = 0
        """Number of tokens in the outputs so far."""
        self._held: list[EngineCoreOutput] = []
        """An output that ends with a stop token, until the next part or the final."""

    def of(self, part: NewTokens) -> list[EngineCoreOutput]:
        """Outputs of the next part of the answer."""
        if self._wants_details and (not part.details or part.offset != self._num_tokens):
            return []  # the final has the details
        outputs = self._held + self._outputs(part.token_ids, part.details)
        self._held = []
        if outputs and outputs[-1].new_token_ids[-1:] and self._is_end(outputs[-1]):
            self._held = [outputs.pop()]
        return outputs

    def last(self, answer: WholeAnswer, *, cached_tokens: int = 0) -> list[EngineCoreOutput]:
        """
        Outputs of the rest of the answer; the last one has the finish reason.

        Raises:
            ContractError: The request asks for log probabilities, and the answer has token ids
                only, as those of simulated engines.
        """
        if self._wants_details and answer.token_ids and not answer.details:
            raise ContractError(
                "logprobs are not supported: the engine of this model returns token ids only",
                code="unsupported_parameter",
                param="logprobs",
            )
        details = _after(answer.details, self._num_tokens)
        outputs = self._held + self._outputs((), details)
        outputs += self._outputs(answer.token_ids[self._num_tokens :], ())
        is_by_string = answer.finish_reason is FinishReason.STOP and not (
            outputs and outputs[-1].new_token_ids and self._is_end(outputs[-1])
        )
        if is_by_string or not outputs:
            # VLLM would leave the text of a token beside the reason out, as that of a stop token.
            outputs.append(EngineCoreOutput(self._request_id, []))
        outputs[-1].finish_reason = _FINISH[answer.finish_reason]
        outputs[-1].stop_reason = self._stop_reason(answer)
        outputs[-1].prefill_stats = PrefillStats(num_cached_tokens=cached_tokens)
        return outputs

    def _outputs(
        self, token_ids: Tokens, details: tuple[StepDetails, ...]
    ) -> list[EngineCoreOutput]:
        if details:
            outputs = [decode_output(step.parts, self._request_id) for step in details]
        elif self._is_split:
            outputs = [EngineCoreOutput(self._request_id, [token]) for token in token_ids]
        else:
            outputs = [EngineCoreOutput(self._request_id, list(token_ids))] if token_ids else []
        self._num_tokens += sum(len(output.new_token_ids) for output in outputs)
        return outputs

    def _is_end(self, output: EngineCoreOutput) -> bool:
        return output.new_token_ids[-1] in self._ends

    def _stop_reason(self, answer: WholeAnswer) -> int | str | None:
        """The stop token that ended the answer, or vLLM's name of another end."""
        if answer.finish_reason is FinishReason.REPETITION:
            return "repetition_detected"
        last = answer.token_ids[-1] if answer.token_ids else None
        is_stop = answer.finish_reason is FinishReason.STOP and last in self._stops
        return last if is_stop else None


def wants_details(request: EngineCoreRequest) -> bool:
    """Return whether the answer has more than token ids."""
    params = request.sampling_params
    return params is not None and (
        params.logprobs is not None or params.prompt_logprobs is not None
    )


def _after(details: tuple[StepDetails, ...], num_tokens: int) -> tuple[StepDetails, ...]:
    """Details of the steps after the first *num_tokens* tokens of the answer."""
    position, steps = 0, iter(details)
    for step in steps:
        if position >= num_tokens:
            return (step, *steps)
        position += step.num_tokens
    return ()
