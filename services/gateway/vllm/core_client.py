"""The mesh as the engine core of vLLM's API server."""

import asyncio
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from itertools import chain

import msgspec
import structlog
from vllm import SamplingParams
from vllm.exceptions import GracefulHTTPError
from vllm.tasks import SupportedTask
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest
from vllm.v1.engine.core_client import EngineCoreClient

from services.engine_core.encoding import encode_request, encode_requests
from services.engine_core.engine_client import Fail
from services.engine_core.steps import AnswerSteps
from services.gateway.call import Call, current
from services.gateway.errors import error_info
from services.gateway.vllm.pooled_inputs import PooledInputs, units_of
from shared.api.images import CODE, FIELD
from shared.broker.tasks import OwnedTasks
from shared.contracts.errors import ContractError, MeshError
from shared.contracts.ingress import InferenceRequest
from shared.contracts.requests import ErrorInfo, ReplyMode, RequestCompleted
from shared.producer.generation import Generation
from shared.producer.producer import Producer

log = structlog.get_logger()

STOPPED_WAIT_S = 2.0
"""Time that a stopped request has to end in the mesh before it is cancelled there."""
MAX_TEMPERATURE = 2.0
_Steps = AnswerSteps | PooledInputs


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
    call: Call


@dataclass(slots=True)
class _Gathered:
    """Inputs of one call, and the task that publishes them."""

    requests: list[EngineCoreRequest]
    task: asyncio.Task[None]


class MeshCoreClient(EngineCoreClient):  # type: ignore[misc]  # vLLM is untyped to mypy
    """
    Publishes vLLM's requests to the mesh, and returns their tokens as outputs of an engine core.

    Args:
        producer: Connection to the mesh.
        tasks: Kinds of requests that the model serves.
        digest: `model_digest` of the model.
        width: Length of the vectors that the model makes.
        fail: Ends one request of the API server with an error.
    """

    def __init__(
        self,
        producer: Producer,
        *,
        tasks: tuple[SupportedTask, ...],
        digest: str,
        width: int,
        fail: Fail,
    ) -> None:
        self._producer = producer
        self._supported_tasks = tasks
        self._digest = digest
        self._width = width
        self._fail = fail
        self._outputs: asyncio.Queue[EngineCoreOutput] = asyncio.Queue()
        self._relays: dict[str, _Relay] = {}
        self._gathered: dict[str, _Gathered] = {}
        self._tasks = OwnedTasks()

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        """
        Publish *request* on behalf of the current call.

        Raises:
            RequestFailedError: The request is too large, or the broker did not accept it.
        """
        call = current.get()
        call.rendered()
        if request.cache_salt:  # equal salts of two tenants share no prefixes
            request.cache_salt = f"{call.tenant}/{request.cache_salt}"
        if request.mm_features and request.pooling_params is not None:
            raise self._failed(call, _images_refused("pooling models of the mesh read no images"))
        if request.pooling_params is not None:
            await self._gather(request, call)
            return
        request.sampling_params = _with_seed(request.sampling_params)
        await self._publish(ingress_of(request, call, self._digest), AnswerSteps(request), call)

    async def _gather(self, request: EngineCoreRequest, call: Call) -> None:
        """Publish *request* together with the other inputs of *call*."""
        gathered = self._gathered.get(call.call_id)
        if gathered is None:
            # VLLM adds all inputs of a call in one turn of the event loop, and the task begins in
            # the next one.
            task = self._tasks.spawn(self._publish_gathered(call), name=f"gather {call.call_id}")
            gathered = self._gathered[call.call_id] = _Gathered([], task)
        gathered.requests.append(request)
        try:
            await asyncio.shield(gathered.task)
        except asyncio.CancelledError:
            gathered.task.add_done_callback(
                lambda _: self._tasks.spawn(
                    self.cancel((request.request_id,)), name=f"cancel {request.request_id}"
                )
            )
            raise

    async def _publish_gathered(self, call: Call) -> None:
        requests = self._gathered.pop(call.call_id).requests
        try:
            units = units_of(requests, width=self._width)
        except MeshError as error:
            raise self._failed(call, error) from error
        for unit in units:
            body = pooled_ingress_of(unit, call, self._digest)
            await self._publish(body, PooledInputs(unit), call)

    async def _publish(self, body: InferenceRequest, steps: _Steps, call: Call) -> None:
        is_streamed = call.stream and not body.input_lengths
        try:
            generation = await self._producer.submit(
                body,
                reply=ReplyMode.STREAM if is_streamed else ReplyMode.FINAL,
                trace=call.trace,
                digest=call.digest,
            )
        except MeshError as error:
            raise self._failed(call, error) from error
        call.generations.append(generation)
        task = self._tasks.spawn(
            self._relayed(steps, generation, call), name=f"relay {generation.request_id}"
        )
        self._relays |= dict.fromkeys(steps.request_ids, _Relay(generation, task, call))

    def _failed(self, call: Call, error: MeshError) -> RequestFailedError:
        """Record that *call* has failed, and return the error for vLLM."""
        call.failure = call.failure or error_info(error)
        return RequestFailedError(call.failure)

    async def get_output_async(self) -> EngineCoreOutputs:
        """Wait until an output is available, and return all available outputs; never raises."""
        outputs = [await self._outputs.get()]
        while not self._outputs.empty():
            outputs.append(self._outputs.get_nowait())
        return EngineCoreOutputs(outputs=outputs)

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        """
        End requests whose answer is complete for vLLM, e.g. at a stop string.

        The agent detects the same end, so the mesh sends a final without a stop command.
        """
        for request_id in request_ids:
            if (relay := self._relays.pop(request_id, None)) is not None:
                stopping = self._tasks.spawn(_stopped(relay), name=f"stop {request_id}")
                relay.call.stopping.add(stopping)

    async def cancel(self, request_ids: Iterable[str]) -> None:
        """Cancel requests whose client has left."""
        relays = [self._relays.pop(name) for name in request_ids if name in self._relays]
        await asyncio.gather(*(relay.generation.cancel() for relay in relays))

    async def get_supported_tasks_async(self) -> tuple[SupportedTask, ...]:
        return self._supported_tasks

    async def reset_mm_cache_async(self) -> None:
        """No-op: the mesh has no cache of processed images."""

    @property
    def is_idle(self) -> bool:
        """True if no request of the API server is in the mesh."""
        return not self._relays and not self._gathered

    def shutdown(self, timeout: float | None = None) -> None:  # vLLM's signature
        """No-op: the gateway owns the producer and closes it."""

    async def _relayed(self, steps: _Steps, generation: Generation, call: Call) -> None:
        try:
            async for part in generation:
                self._put(steps.of(part))
            final = await generation.final()
            if isinstance(final, RequestCompleted):
                call.finals.append(final)
                self._put(steps.last(final, cached_tokens=final.usage.cached_tokens))
            else:
                self._refuse(steps.request_ids, final.error, call)
        except MeshError as error:
            self._refuse(steps.request_ids, error_info(error), call)
        except Exception as error:  # a bug or a damaged output ends this request alone
            log.exception("relay.broken", request_id=generation.request_id)
            self._refuse(steps.request_ids, error_info(error), call)
        finally:
            for request_id in steps.request_ids:
                self._relays.pop(request_id, None)

    def _put(self, outputs: Iterable[EngineCoreOutput]) -> None:
        for output in outputs:
            self._outputs.put_nowait(output)

    def _refuse(self, request_ids: Iterable[str], info: ErrorInfo, call: Call) -> None:
        """End requests with an error, except those that have been stopped or cancelled here."""
        for request_id in request_ids:
            if request_id in self._relays:
                call.failure = call.failure or info
                self._fail(request_id, RequestFailedError(info))


def _images_refused(message: str) -> ContractError:
    return ContractError(message, code=CODE, param=FIELD)


def _with_seed(sampling: SamplingParams | None) -> SamplingParams | None:
    """
    Parameters with a seed for random sampling, so that a run that is repeated samples the same
    tokens. A copy, since vLLM shares parameters among the answers of a call.
    """
    if sampling is None or sampling.temperature == 0 or sampling.seed is not None:
        return sampling
    seeded = sampling.clone()
    seeded.seed = secrets.randbits(31)
    return seeded


async def _stopped(relay: _Relay) -> None:
    try:
        async with asyncio.timeout(STOPPED_WAIT_S):
            await asyncio.wait({relay.task})
    except TimeoutError:
        await relay.generation.cancel()


def ingress_of(request: EngineCoreRequest, call: Call, digest: str) -> InferenceRequest:
    """The message that publishes *request*."""
    sampling = request.sampling_params or SamplingParams()
    stop = sampling.stop or []
    return msgspec.structs.replace(
        _ingress(call),
        prompt=tuple(request.prompt_token_ids or ()),
        prompt_tokens=len(request.prompt_token_ids or ()),
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        temperature=min(sampling.temperature, MAX_TEMPERATURE),
        seed=sampling.seed,
        stop=tuple([stop] if isinstance(stop, str) else stop) or None,
        ignore_eos=sampling.ignore_eos,
        engine=encode_request(request, digest),
    )


def pooled_ingress_of(
    requests: Sequence[EngineCoreRequest], call: Call, digest: str
) -> InferenceRequest:
    """The message that publishes inputs of a pooling model."""
    prompts = [request.prompt_token_ids or [] for request in requests]
    tokens = tuple(chain.from_iterable(prompts))
    return msgspec.structs.replace(
        _ingress(call),
        prompt=tokens,
        prompt_tokens=len(tokens),
        input_lengths=tuple(len(prompt) for prompt in prompts),
        engine=encode_requests(requests, digest),
    )


def _ingress(call: Call) -> InferenceRequest:
    """The fields of a message that do not depend on vLLM's request."""
    return InferenceRequest(
        id=call.new_request_id(),
        model=call.model,
        slo=call.slo,
        importance=call.importance,
        application=call.application,
        session=call.session,
        priority=call.priority,
        tenant=call.tenant,
        arrived_at=call.arrived_at,
        expires_at=call.ends.expires_at,
        not_before=call.ends.not_before,
        on_late=call.ends.on_late,
        clamped=call.clamped,
    )
