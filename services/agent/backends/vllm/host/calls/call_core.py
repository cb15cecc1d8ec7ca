"""An engine core for vLLM's application whose requests run in the engines of the host."""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Protocol

import structlog
from vllm.exceptions import GracefulHTTPError
from vllm.tasks import SupportedTask
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest
from vllm.v1.engine.core_client import EngineCoreClient
from vllm.v1.metrics.stats import PrefillStats

from services.agent.backends.base import EnginePayload
from services.agent.backends.vllm.host.calls.events import CallEvents, events_of_call
from services.engine_core.encoding import encode_request, encode_requests
from services.engine_core.engine_client import Fail
from services.engine_core.pooling import num_values, pooled_output
from services.engine_core.steps import AnswerSteps, ended, outputs_of
from shared.api.pooling import MAX_UNIT_VALUES
from shared.contracts.base import UnixTime
from shared.contracts.requests import FinishReason, StepDetails, Tokens
from shared.producer.effects import NewTokens

log = structlog.get_logger()

_NUM_SEEDS = 1 << 31
_MOST_OUTPUTS = 16
"""Number of outputs of a request that vLLM gets at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """A complete answer."""

    token_ids: Tokens
    """Tokens of the answer; none if the model pools."""
    details: tuple[StepDetails, ...]
    finish_reason: FinishReason
    cached_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NewPart:
    """New tokens of an answer that the application streams."""

    token_ids: Tokens
    details: tuple[StepDetails, ...] = ()
    """Details of all of the tokens, or none."""
    finish_reason: FinishReason | None = None
    """Set if the answer is complete."""
    cached_tokens: int = 0
    """Number of cached tokens of the prompt; set on the first part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Child:
    """One request that vLLM's application makes of a call."""

    index: int
    prompt: Tokens
    payload: EnginePayload
    pools: bool
    """True for an input of a pooling model; then `payload` is a list of one request."""
    answer: Callable[[Answered], object]
    """Completes the request; may be called from another thread."""
    append: Callable[[Iterable[NewPart]], object]
    """Appends parts of the answer, which `answer` does not follow; may be called the same way."""
    refuse: Callable[[str], object]
    """Ends the request with an error of its sender; may be called from another thread."""


class Caller(Protocol):
    """The call in whose context vLLM's application runs."""

    @property
    def name(self) -> str:
        """Id of the request, which is the same in each of its runs."""

    @property
    def arrived_at(self) -> UnixTime: ...

    @property
    def events(self) -> CallEvents | None:
        """Takes the events of the stream; None if the answer comes as a whole."""

    @property
    def seed(self) -> int: ...

    @property
    def tenant(self) -> str | None: ...

    def begin(self, child: Child) -> None:
        """Run a request; called from the application's thread, in the order of the answers."""


@dataclass(slots=True)
class _Current:
    caller: Caller
    num_requests: int = 0
    """Number of requests so far, which the application makes in the order of the answers."""
    num_values: int = 0
    """Count of numbers in the outputs of all inputs so far, if the model pools."""


_current: ContextVar[_Current] = ContextVar("call")


def in_context_of(caller: Caller) -> None:
    """Run the requests of the current task, and of tasks that it creates, for *caller*."""
    _current.set(_Current(caller))


class CallCoreClient(EngineCoreClient):  # type: ignore[misc]  # vLLM is untyped to mypy
    """
    Gives vLLM's requests to their calls, and replays each answer when it is complete.

    Args:
        loop: Event loop of the application.
        tasks: Kinds of requests that the model serves.
        width: Length of the vectors that the model makes.
        fail: Ends one request of the application with an error.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        tasks: tuple[SupportedTask, ...],
        width: int,
        fail: Fail,
    ) -> None:
        self._loop = loop
        self._supported_tasks = tasks
        self._width = width
        self._fail = fail
        self._outputs: dict[str, deque[EngineCoreOutput]] = {}
        """Request -> its outputs that vLLM has not taken."""
        self._has_outputs = asyncio.Event()

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        """
        Run *request* for the current call.

        Raises:
            GracefulHTTPError: The output of a pooling model would be too large.
        """
        current = _current.get()
        index, current.num_requests = current.num_requests, current.num_requests + 1
        pools = request.pooling_params is not None
        if pools:
            self._count(request, current)
        else:
            _with_seed(request, current.caller.seed + index)
        if request.cache_salt:  # equal salts of two tenants share no prefixes
            request.cache_salt = f"{current.caller.tenant}/{request.cache_salt}"
        if (events := events_of_call.get()) is not None:
            events.begins(request.request_id, index)
        soon = self._loop.call_soon_threadsafe
        current.caller.begin(
            Child(
                index=index,
                prompt=tuple(request.prompt_token_ids or ()),
                payload=_encoded(request),
                pools=pools,
                answer=lambda answer: soon(self._replay, request, answer),
                append=lambda parts: soon(self._append, request, parts),
                refuse=lambda message: soon(self._refuse, request.request_id, message),
            )
        )

    async def get_output_async(self) -> EngineCoreOutputs:
        """
        The next outputs; never raises. Each request has its turn, since a stream that is continued
        has the outputs of all known tokens at once.
        """
        await self._has_outputs.wait()
        outputs = []
        for name, waiting in tuple(self._outputs.items()):
            taken = [waiting.popleft() for _ in range(min(len(waiting), _MOST_OUTPUTS))]
            outputs += taken
            if not waiting:
                del self._outputs[name]
        if not self._outputs:
            self._has_outputs.clear()
        return EngineCoreOutputs(outputs=outputs)

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        """No-op: requests are complete when vLLM gets their answers."""

    async def cancel(self, request_ids: Iterable[str]) -> None:
        """No-op: the call ends its runs itself."""

    async def get_supported_tasks_async(self) -> tuple[SupportedTask, ...]:
        return self._supported_tasks

    async def reset_mm_cache_async(self) -> None:
        """No-op: there is no cache of processed images."""

    def shutdown(self, timeout: float | None = None) -> None:  # vLLM's signature
        """No-op: the engines belong to the host."""

    def _count(self, request: EngineCoreRequest, current: _Current) -> None:
        """
        Count the output of an input.

        Raises:
            GracefulHTTPError: The outputs of the inputs so far have too many numbers.
        """
        current.num_values += num_values(request, width=self._width)
        if current.num_values > MAX_UNIT_VALUES:
            message = (
                f"the output of the first {current.num_requests} inputs has {current.num_values} "
                f"numbers; at most {MAX_UNIT_VALUES} are returned in one message"
            )
            raise GracefulHTTPError(message, HTTPStatus.REQUEST_ENTITY_TOO_LARGE)

    def _replay(self, request: EngineCoreRequest, answer: Answered) -> None:
        self._put(request, lambda: _outputs(request, answer))

    def _append(self, request: EngineCoreRequest, parts: Iterable[NewPart]) -> None:
        for part in parts:
            self._put(request, partial(_outputs_of_part, request, part))

    def _put(self, request: EngineCoreRequest, made: Callable[[], list[EngineCoreOutput]]) -> None:
        try:
            outputs = made()
        except Exception as error:  # damaged details end this request alone
            log.exception("answer.broken", request_id=request.request_id)
            self._fail(request.request_id, error)
        else:
            if outputs:
                self._outputs.setdefault(request.request_id, deque()).extend(outputs)
                self._has_outputs.set()

    def _refuse(self, request_id: str, message: str) -> None:
        self._fail(request_id, GracefulHTTPError(message, HTTPStatus.BAD_REQUEST))


def _encoded(request: EngineCoreRequest) -> EnginePayload:
    if request.pooling_params is not None:
        return encode_requests((request,))
    return encode_request(request)


def _outputs(request: EngineCoreRequest, answer: Answered) -> list[EngineCoreOutput]:
    """The outputs of an engine core that has run *request*."""
    if request.pooling_params is not None:
        return [pooled_output(step, request.request_id) for step in answer.details]
    steps = AnswerSteps(request)
    whole = NewTokens(offset=0, token_ids=answer.token_ids, text="", details=answer.details)
    return steps.of(whole) + steps.last(answer, cached_tokens=answer.cached_tokens)


def _outputs_of_part(request: EngineCoreRequest, part: NewPart) -> list[EngineCoreOutput]:
    outputs = outputs_of(request, part.token_ids, part.details)
    if part.finish_reason is not None:
        outputs = ended(outputs, request, part.finish_reason)
    if part.cached_tokens and outputs:
        outputs[0].prefill_stats = PrefillStats(num_cached_tokens=part.cached_tokens)
    return outputs


def _with_seed(request: EngineCoreRequest, seed: int) -> None:
    """Set a seed for random sampling, so that a run that is repeated samples the same tokens."""
    params = request.sampling_params
    if params.temperature > 0 and params.seed is None:
        # A copy: without a seed, all answers to one prompt share their parameters.
        request.sampling_params = params.clone()
        request.sampling_params.seed = seed % _NUM_SEEDS
