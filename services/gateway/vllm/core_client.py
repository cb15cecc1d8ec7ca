"""The mesh as the engine core of vLLM's API server."""

import asyncio
import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from http import HTTPStatus

import structlog
from vllm import SamplingParams
from vllm.exceptions import GracefulHTTPError
from vllm.tasks import SupportedTask
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest
from vllm.v1.engine import FinishReason as EngineFinish
from vllm.v1.engine.core_client import EngineCoreClient
from vllm.v1.metrics.stats import PrefillStats

from services.engine_core.outputs import decode_output
from services.engine_core.payload import encode_request
from services.gateway.errors import error_info
from services.gateway.vllm.call import Call, current
from shared.broker.tasks import OwnedTasks
from shared.contracts.errors import MeshError
from shared.contracts.ingress import InferenceRequest
from shared.contracts.requests import (
    ErrorInfo,
    FinishReason,
    ReplyMode,
    RequestCompleted,
    Tokens,
)
from shared.producer.generation import Generation
from shared.producer.producer import Producer

log = structlog.get_logger()

STOPPED_WAIT_S = 2.0
"""Time that a stopped request has to end in the mesh before it is cancelled there."""
MAX_TEMPERATURE = 2.0
_FINISH = {FinishReason.STOP: EngineFinish.STOP, FinishReason.LENGTH: EngineFinish.LENGTH}


class RequestFailedError(GracefulHTTPError):  # type: ignore[misc]  # vLLM is untyped to mypy
    """A request failed in the mesh; vLLM answers with the error's status."""

    def __init__(self, info: ErrorInfo) -> None:
        known = {status.value for status in HTTPStatus}
        status = info.status if info.status in known else HTTPStatus.INTERNAL_SERVER_ERROR
        super().__init__(info.message, HTTPStatus(status))


@dataclass(slots=True)
class _Relay:
    generation: Generation
    task: asyncio.Task[None]


class MeshCoreClient(EngineCoreClient):  # type: ignore[misc]  # vLLM is untyped to mypy
    """
    Publishes vLLM's requests to the mesh, and returns their tokens as outputs of an engine core.

    Args:
        producer: Connection to the mesh.
        tasks: Kinds of requests that the model serves.
        fail: Ends one request of the API server with an error.
    """

    def __init__(
        self,
        producer: Producer,
        *,
        tasks: tuple[SupportedTask, ...],
        fail: Callable[[str, Exception], None],
    ) -> None:
        self._producer = producer
        self._supported_tasks = tasks
        self._fail = fail
        self._outputs: asyncio.Queue[EngineCoreOutput] = asyncio.Queue()
        self._relays: dict[str, _Relay] = {}
        self._tasks = OwnedTasks()

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        """
        Publish *request* on behalf of the current call.

        Raises:
            RequestFailedError: The broker did not accept the request.
        """
        call = current.get()
        _with_seed(request.sampling_params)
        try:
            generation = await self._producer.submit(
                ingress_of(request, call),
                # Only finals carry details.
                reply=ReplyMode.STREAM
                if call.stream and not wants_details(request)
                else ReplyMode.FINAL,
                traceparent=call.traceparent,
            )
        except MeshError as error:
            call.failure = call.failure or error_info(error)
            raise RequestFailedError(call.failure) from error
        task = self._tasks.spawn(
            self._relayed(request, generation, call), name=f"relay {request.request_id}"
        )
        self._relays[request.request_id] = _Relay(generation, task)

    async def get_output_async(self) -> EngineCoreOutputs:
        """The next outputs, all that are present; never raises."""
        outputs = [await self._outputs.get()]
        while not self._outputs.empty():
            outputs.append(self._outputs.get_nowait())
        return EngineCoreOutputs(outputs=outputs)

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        """
        End requests whose answer is complete for vLLM, e.g. at a stop string.

        The agent finds the same end, so the mesh's own final is on its way.
        """
        for request_id in request_ids:
            if (relay := self._relays.pop(request_id, None)) is not None:
                self._tasks.spawn(_stopped(relay), name=f"stop {request_id}")

    async def cancel(self, request_ids: Iterable[str]) -> None:
        """Cancel requests whose client has left."""
        relays = [self._relays.pop(name) for name in request_ids if name in self._relays]
        await asyncio.gather(*(relay.generation.cancel() for relay in relays))

    async def get_supported_tasks_async(self) -> tuple[SupportedTask, ...]:
        return self._supported_tasks

    async def reset_mm_cache_async(self) -> None:
        """No-op: the mesh has no cache of processed images."""

    def shutdown(self, timeout: float | None = None) -> None:  # vLLM's signature
        """No-op: the producer belongs to the gateway."""

    async def _relayed(
        self, request: EngineCoreRequest, generation: Generation, call: Call
    ) -> None:
        request_id = request.request_id
        try:
            num_tokens = 0
            if not wants_details(request):
                async for part in generation:
                    num_tokens += len(part.token_ids)
                    self._outputs.put_nowait(EngineCoreOutput(request_id, list(part.token_ids)))
            final = await generation.final()
            if isinstance(final, RequestCompleted):
                call.finals.append(final)
                for step in final.details:
                    num_tokens += step.num_tokens
                    self._outputs.put_nowait(decode_output(step.parts, request_id))
                rest = final.token_ids[num_tokens:]
                self._outputs.put_nowait(last_output(request, final, rest))
            else:
                self._refuse(request_id, final.error, call)
        except MeshError as error:
            self._refuse(request_id, error_info(error), call)
        except Exception as error:  # a bug or a damaged output ends this request alone
            log.exception("relay.broken", request_id=request_id)
            self._refuse(request_id, error_info(error), call)
        finally:
            self._relays.pop(request_id, None)

    def _refuse(self, request_id: str, info: ErrorInfo, call: Call) -> None:
        """End a request with an error, unless it has been stopped or cancelled here."""
        if request_id not in self._relays:
            return
        call.failure = call.failure or info
        self._fail(request_id, RequestFailedError(info))


def _with_seed(sampling: SamplingParams | None) -> None:
    """Set a seed for random sampling, so that a run that is repeated samples the same tokens."""
    if sampling is not None and sampling.temperature > 0 and sampling.seed is None:
        sampling.seed = secrets.randbits(31)


async def _stopped(relay: _Relay) -> None:
    try:
        async with asyncio.timeout(STOPPED_WAIT_S):
            await asyncio.wait({relay.task})
    except TimeoutError:
        await relay.generation.cancel()


def ingress_of(request: EngineCoreRequest, call: Call) -> InferenceRequest:
    """The message that publishes *request*."""
    sampling = request.sampling_params or SamplingParams()
    stop = sampling.stop or []
    return InferenceRequest(
        id=call.new_request_id(),
        model=call.model,
        prompt=tuple(request.prompt_token_ids or ()),
        prompt_tokens=len(request.prompt_token_ids or ()),
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        temperature=min(sampling.temperature, MAX_TEMPERATURE),
        seed=sampling.seed,
        stop=tuple([stop] if isinstance(stop, str) else stop) or None,
        ignore_eos=sampling.ignore_eos,
        slo=call.slo,
        importance=call.importance,
        application=call.application,
        priority=call.priority,
        tenant=call.tenant,
        arrived_at=call.arrived_at,
        engine=encode_request(request),
    )


def wants_details(request: EngineCoreRequest) -> bool:
    """Return whether the answer has more than token ids."""
    sampling = request.sampling_params
    return sampling is not None and (
        sampling.logprobs is not None or sampling.prompt_logprobs is not None
    )


def last_output(
    request: EngineCoreRequest, final: RequestCompleted, token_ids: Tokens
) -> EngineCoreOutput:
    """The output that ends *request*, with the tokens that were not emitted before."""
    sampling = request.sampling_params
    last = final.token_ids[-1] if final.token_ids else None
    stops = (sampling.stop_token_ids or []) if sampling else []
    return EngineCoreOutput(
        request.request_id,
        list(token_ids),
        finish_reason=_FINISH[final.finish_reason],
        stop_reason=last if final.finish_reason is FinishReason.STOP and last in stops else None,
        prefill_stats=PrefillStats(num_cached_tokens=final.usage.cached_tokens),
    )
