"""The host's events of runs, as events of the engine."""

from http import HTTPStatus
from typing import Any

import msgspec

from services.agent.backends.base import EngineOutput, NewOutput, RunEnded
from services.agent.backends.vllm.shared.wire import (
    CallAnswered,
    HostEvent,
    Outputs,
    RunDisplaced,
    RunFailed,
    RunOutput,
    RunRefused,
)
from shared.contracts.base import RequestId
from shared.contracts.errors import ContractError, EngineError, NotActiveError
from shared.contracts.requests import FinishReason

_FINISHES = frozenset({"", *(reason.value for reason in FinishReason)})
"""Valid finish reasons; vLLM also has `abort` and `error`."""


class _Error(msgspec.Struct, frozen=True):
    """An error object of OpenAI's or Anthropic's API."""

    message: str = ""
    param: str | None = None


class _ErrorBody(msgspec.Struct, frozen=True):
    error: _Error | None = None
    detail: Any = None


def events_of(event: HostEvent) -> list[NewOutput | RunEnded]:
    """The new tokens and the ends of runs in an event of the host."""
    match event:
        case Outputs():
            return [event_of(run) for run in event.runs]
        case CallAnswered():
            return [end_of_call(event)]
        case RunFailed():
            return [RunEnded(RequestId(event.request_id), EngineError(event.message))]
        case RunRefused():
            error = ContractError(
                event.message, code=event.code, param=event.param, status=event.status
            )
            return [RunEnded(RequestId(event.request_id), error)]
        case RunDisplaced():
            return [RunEnded(RequestId(event.request_id), NotActiveError(event.message))]
        case _:
            return []


def event_of(run: RunOutput) -> NewOutput | RunEnded:
    """The new tokens of a run, or its failure."""
    request_id = RequestId(run.request_id)
    if run.finish not in _FINISHES:
        return RunEnded(request_id, EngineError(f"the engine ended the run: {run.finish}"))
    return NewOutput(
        request_id,
        EngineOutput(
            token_ids=run.token_ids,
            finish_reason=FinishReason(run.finish) if run.finish else None,
            cached_tokens=run.cached_tokens,
            prefill_s=run.prefill_s,
            details=run.details,
            child=run.child,
            prompt_tokens=run.prompt_tokens,
        ),
    )


def end_of_call(answered: CallAnswered) -> NewOutput | RunEnded:
    """The response of a call, or its error."""
    request_id = RequestId(answered.request_id)
    if answered.status < HTTPStatus.BAD_REQUEST:
        end = EngineOutput(token_ids=(), response=answered.body, details=answered.events)
        return NewOutput(request_id, end)
    return RunEnded(request_id, _error_of(answered))


def _error_of(answered: CallAnswered) -> ContractError:
    try:
        body = msgspec.json.decode(answered.body, type=_ErrorBody)
    except msgspec.DecodeError:
        body = _ErrorBody()
    error = body.error or _Error(str(body.detail or ""))
    message = error.message or f"vLLM answered with status {answered.status}"
    if answered.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        return ContractError(message, code="internal_error", status=answered.status)
    return ContractError(message, param=error.param, status=answered.status, response=answered.body)
