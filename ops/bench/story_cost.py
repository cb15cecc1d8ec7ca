"""CPU time of the record of a finished request, compared with that of the request's messages."""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar

import msgspec
import numpy as np

from ops.bench.result import Line, Result
from services.estimator.stories.shelf import Shelf, ShelfSettings
from shared.contracts.base import Decoder, InstanceId, ModelName, RequestId, RunId, TenantId, encode
from shared.contracts.qos import Slo, SloVerdict
from shared.contracts.requests import (
    FinishReason,
    ModelRef,
    QueuedRequest,
    RequestCompleted,
    Sampling,
    Timings,
    Usage,
)
from shared.contracts.stories.story import PulledRequest, StoriesObserved, story_of

P = ParamSpec("P")
T = TypeVar("T")
MOST_SHARE = 0.5
"""Most CPU time of a record, as a part of that of the messages."""
AT_ONCE = 50
"""Number of records in one message, as at 200 requests per second."""
PROMPT, OUTPUT = 512, 128
_ROUNDS, _QUICK_ROUNDS = 200, 40
_decode_queued: Decoder[QueuedRequest] = Decoder(QueuedRequest)
_decode_final: Decoder[RequestCompleted] = Decoder(RequestCompleted)
_decode_observed: Decoder[StoriesObserved] = Decoder(StoriesObserved)


async def run(
    *,
    seed: int,
    quick: bool,
    broker: str | None,  # noqa: ARG001 - nothing here needs one
) -> Result:
    """Time records and messages of the same requests, in alternation."""
    result = Result(name="story_cost", seed=seed, quick=quick)
    random = np.random.default_rng(seed)
    shelf = Shelf(ShelfSettings(), heard_since=0.0)
    messages_s, agent_s, estimator_s = [], [], []
    for number in range(_QUICK_ROUNDS if quick else _ROUNDS):
        requests = [_request(random, AT_ONCE * number + each) for each in range(AT_ONCE)]
        _, of_messages_s = _timed(_messages, requests)
        body, of_agent_s = _timed(_record, requests)
        _, of_estimator_s = _timed(_keep, shelf, body, requests[-1].arrived_at)
        messages_s.append(of_messages_s)
        agent_s.append(of_agent_s)
        estimator_s.append(of_estimator_s)
    parts = {
        "messages": messages_s,
        "record, at the agent": agent_s,
        "record, at the estimator": estimator_s,
    }
    for name, values in parts.items():
        result.figures[f"{name}, microseconds"] = 1e6 * statistics.median(values) / AT_ONCE
    shares = [
        (at_agent + at_estimator) / of_messages
        for at_agent, at_estimator, of_messages in zip(
            agent_s, estimator_s, messages_s, strict=True
        )
    ]
    result.lines.append(
        Line(
            name="record of a request / messages with the request and its answer, CPU time",
            value=statistics.median(shares),
            bound=MOST_SHARE,
        )
    )
    return result


def _timed(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> tuple[T, float]:
    """The result of *work*, and its CPU time in seconds."""
    begun = time.process_time()
    result = work(*args, **kwargs)
    return result, time.process_time() - begun


def _request(random: np.random.Generator, number: int) -> QueuedRequest:
    model, now = ModelName("model"), 1e9 + number
    return QueuedRequest(
        request_id=RequestId(f"request-{number}"),
        model=ModelRef(name=model, base=model),
        prompt=tuple(random.integers(0, 100_000, PROMPT).tolist()),
        prompt_tokens=PROMPT,
        sampling=Sampling(max_tokens=OUTPUT),
        slo=Slo(ttft_s=2.0, tbt_s=0.1),
        arrived_at=now,
        grouped_at=now + 0.01,
        tenant=TenantId(f"tenant-{number % 50}"),
        lane="lane.0.model.high.9.w0",
        application="chat",
    )


def _messages(requests: Sequence[QueuedRequest]) -> None:
    """Encode and decode each request for its queue, and its final reply."""
    for request in requests:
        queued = _decode_queued(encode(request))
        at = queued.arrived_at
        final = RequestCompleted(
            request_id=queued.request_id,
            run_id=RunId("run"),
            instance_id=InstanceId("instance"),
            model=queued.model.name,
            token_ids=(queued.prompt if isinstance(queued.prompt, tuple) else ())[:OUTPUT],
            text="word " * OUTPUT,
            finish_reason=FinishReason.LENGTH,
            usage=Usage(
                prompt_tokens=PROMPT, completion_tokens=OUTPUT, total_tokens=PROMPT + OUTPUT
            ),
            timings=Timings(
                arrived_at=at,
                grouped_at=at,
                pulled_at=at,
                submitted_at=at,
                first_token_at=at,
                finished_at=at,
            ),
            verdict=SloVerdict(attained=True),
            engine="vllm",
        )
        _decode_final(encode(final))


def _record(requests: Sequence[QueuedRequest]) -> bytes:
    """The message of an agent about requests that it has pulled and ended."""
    pulled = [
        PulledRequest(tenant=each.tenant, request_id=each.request_id, at=each.grouped_at)
        for each in requests
    ]
    ended = [
        msgspec.structs.replace(
            story_of(each),
            attained=True,
            output_tokens=OUTPUT,
            pulled_at=each.grouped_at,
            submitted_at=each.grouped_at,
            first_token_at=each.grouped_at + 0.5,
            finished_at=each.grouped_at + 5.0,
            instance_id=InstanceId("instance"),
        )
        for each in requests
    ]
    return encode(StoriesObserved(sender="instance", pulled=tuple(pulled), ended=tuple(ended)))


def _keep(shelf: Shelf, body: bytes, now: float) -> None:
    """What an estimator does with the message."""
    observed = _decode_observed(body)
    for request in observed.pulled:
        shelf.pulled(request, InstanceId(observed.sender))
    for story in observed.ended:
        shelf.ended(story, now)
