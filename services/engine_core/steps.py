"""Turns the parts of an answer into outputs of an engine core, step by step."""

from collections.abc import Iterable
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
        self._request = request
        self.request_ids = (request.request_id,)
        params = request.sampling_params
        self._wants_details = wants_details(request)
        self._ends = {*(params.stop_token_ids or ()), params.eos_token_id} if params else set()
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
        outputs = ended(outputs, self._request, answer.finish_reason)
        outputs[-1].prefill_stats = PrefillStats(num_cached_tokens=cached_tokens)
        return outputs

    def _outputs(
        self, token_ids: Tokens, details: tuple[StepDetails, ...]
    ) -> list[EngineCoreOutput]:
        outputs = outputs_of(self._request, token_ids, details)
        self._num_tokens += sum(len(output.new_token_ids) for output in outputs)
        return outputs

    def _is_end(self, output: EngineCoreOutput) -> bool:
        return output.new_token_ids[-1] in self._ends


def outputs_of(
    request: EngineCoreRequest, token_ids: Tokens, details: Iterable[StepDetails] = ()
) -> list[EngineCoreOutput]:
    """
    Outputs for new tokens of an answer: of each step, if there are details; otherwise one for all
    tokens, or one for each if the request has stop strings.
    """
    name, params = request.request_id, request.sampling_params
    if details:
        return [decode_output(step.parts, name) for step in details]
    if params is not None and params.stop:
        return [EngineCoreOutput(name, [token]) for token in token_ids]
    return [EngineCoreOutput(name, list(token_ids))] if token_ids else []


def ended(
    outputs: list[EngineCoreOutput], request: EngineCoreRequest, reason: FinishReason
) -> list[EngineCoreOutput]:
    """The last outputs of an answer, with the reason of its end, in another output if needed."""
    params = request.sampling_params
    stops = frozenset(params.stop_token_ids or ())
    last = outputs[-1].new_token_ids[-1] if outputs and outputs[-1].new_token_ids else None
    is_by_token = last is not None and (last in stops or last == params.eos_token_id)
    if not outputs or (reason is FinishReason.STOP and not is_by_token):
        # VLLM would leave the text of a token beside the reason out, as that of a stop token.
        outputs = [*outputs, EngineCoreOutput(request.request_id, [])]
    outputs[-1].finish_reason = _FINISH[reason]
    if reason is FinishReason.REPETITION:
        outputs[-1].stop_reason = "repetition_detected"  # vLLM's name of this end
    elif reason is FinishReason.STOP and last in stops:
        outputs[-1].stop_reason = last
    return outputs


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
