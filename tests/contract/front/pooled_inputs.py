"""Inputs of one HTTP request to a pooling model are published together, and answered together."""

import asyncio
from typing import Any

import pytest
import torch
from vllm import PoolingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest

from services.engine_core.encoding import decode_requests, encode_output
from services.gateway.call import Call, current
from services.gateway.vllm import pooled_inputs
from services.gateway.vllm.core_client import MeshCoreClient
from shared.api.pooling import MAX_INPUTS, MAX_UNIT_VALUES
from shared.contracts.base import InstanceId, ModelName, RequestId, RunId, TenantId
from shared.contracts.errors import ContractError
from shared.contracts.ingress import InferenceRequest
from shared.contracts.qos import Importance, Slo, SloVerdict
from shared.contracts.requests import (
    FinishReason,
    ReplyMode,
    RequestCompleted,
    StepDetails,
    Timings,
    Usage,
)
from shared.producer.generation import Generation
from shared.tracing.context import TraceContext

WIDTH = 4


def pooling_request(name: str, tokens: int = 3, task: str = "embed") -> Any:
    return EngineCoreRequest(
        request_id=name,
        prompt_token_ids=list(range(10, 10 + tokens)),
        mm_features=None,
        sampling_params=None,
        pooling_params=PoolingParams(task=task),
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )


def vector(*values: float) -> StepDetails:
    output = EngineCoreOutput("", [], pooling_output=torch.tensor(values))
    return StepDetails(0, encode_output(output))


def final(request_id: str, *details: StepDetails) -> RequestCompleted:
    return RequestCompleted(
        request_id=RequestId(request_id),
        run_id=RunId("run"),
        instance_id=InstanceId("a"),
        model=ModelName("m"),
        token_ids=(),
        text="",
        finish_reason=FinishReason.STOP,
        usage=Usage(prompt_tokens=1, completion_tokens=0, total_tokens=1),
        timings=Timings(
            arrived_at=0.0,
            grouped_at=0.0,
            pulled_at=0.0,
            submitted_at=0.0,
            first_token_at=0.0,
            finished_at=0.0,
        ),
        verdict=SloVerdict(attained=True),
        engine="simulated",
        details=details,
    )


class Producer:
    """Records what is published; the test answers."""

    def __init__(self) -> None:
        self.bodies: list[InferenceRequest] = []
        self.modes: list[ReplyMode] = []
        self.generations: list[Generation] = []
        self.cancelled: list[str] = []

    async def submit(
        self,
        body: InferenceRequest,
        *,
        reply: ReplyMode,
        trace: TraceContext | None,
        digest: str | None,
    ) -> Generation:
        assert (trace, digest) == (None, None)
        self.bodies.append(body)
        self.modes.append(reply)
        self.generations.append(Generation(RequestId(body.id or ""), cancel=self._cancel))
        await asyncio.sleep(0)
        return self.generations[-1]

    async def _cancel(self, request_id: RequestId) -> None:
        self.cancelled.append(request_id)


class Front:
    """A core client, in the context of one call."""

    def __init__(self) -> None:

        self.producer = Producer()
        self.failures: dict[str, Exception] = {}
        self.client = MeshCoreClient(
            self.producer,  # type: ignore[arg-type]  # a fake
            tasks=("embed",),
            digest="digest",
            width=WIDTH,
            fail=self.failures.__setitem__,
        )
        self.call = Call(
            call_id="call",
            model="m",
            tenant=TenantId("acme"),
            arrived_at=1.0,
            slo=Slo(ttlt_s=5.0),
            importance=Importance.HIGH,
            stream=True,
        )
        current.set(self.call)

    async def add(self, *requests: Any) -> list[Any]:
        """Add requests as vLLM adds the inputs of a call; return the errors."""
        adding = (self.client.add_request_async(request) for request in requests)
        return await asyncio.gather(*adding, return_exceptions=True)

    async def outputs(self) -> dict[str, list[float]]:
        outputs = (await self.client.get_output_async()).outputs
        assert {str(each.finish_reason) for each in outputs} == {"stop"}
        return {each.request_id: each.pooling_output.tolist() for each in outputs}


@pytest.fixture
async def front() -> Front:
    return Front()


async def test_inputs_are_one_message_without_streamed_replies(front: Front) -> None:
    errors = await front.add(pooling_request("a", 2), pooling_request("b", 3))
    (body,) = front.producer.bodies

    assert errors == [None, None]
    assert (body.prompt, body.input_lengths) == ((10, 11, 10, 11, 12), (2, 3))
    assert (body.prompt_tokens, body.tenant, body.slo) == (5, "acme", Slo(ttlt_s=5.0))
    assert front.producer.modes == [ReplyMode.FINAL]


async def test_payload_has_the_parameters_of_each_input(front: Front) -> None:
    await front.add(pooling_request("a"), pooling_request("b", task="token_embed"))
    (body,) = front.producer.bodies
    assert body.engine is not None
    decoded = decode_requests(body.engine)

    assert [each.pooling_params.task for each in decoded] == ["embed", "token_embed"]
    assert [(each.request_id, each.prompt_token_ids) for each in decoded] == [("", None)] * 2


async def test_each_input_gets_its_vector(front: Front) -> None:
    await front.add(pooling_request("a"), pooling_request("b"))
    front.producer.generations[0].finish(final("call", vector(1, 2), vector(3, 4)))

    assert await front.outputs() == {"a": [1, 2], "b": [3, 4]}
    assert [each.request_id for each in front.call.finals] == ["call"]


async def test_engine_without_vectors_is_an_error_by_name(front: Front) -> None:
    await front.add(pooling_request("a"), pooling_request("b"))
    front.producer.generations[0].finish(final("call"))
    await asyncio.sleep(0.01)

    assert set(front.failures) == {"a", "b"}
    assert front.call.failure is not None
    assert (front.call.failure.code, front.call.failure.status) == ("no_vectors", 501)


async def test_too_many_inputs_are_refused_before_they_are_published(front: Front) -> None:
    errors = await front.add(*(pooling_request(f"{n}", 1) for n in range(MAX_INPUTS + 1)))

    assert {str(each) for each in errors} == {
        f"the request has {MAX_INPUTS + 1} inputs; at most {MAX_INPUTS} are allowed"
    }
    assert front.call.failure is not None
    assert front.call.failure.status == 400
    assert front.producer.bodies == []


async def test_largest_number_of_inputs_is_one_message(front: Front) -> None:
    await front.add(*(pooling_request(f"{n}", 1) for n in range(MAX_INPUTS)))

    assert [len(body.input_lengths) for body in front.producer.bodies] == [MAX_INPUTS]


async def test_client_that_leaves_cancels_all_inputs(front: Front) -> None:
    await front.add(pooling_request("a"), pooling_request("b"))
    await front.client.cancel(("a", "b"))

    assert set(front.producer.cancelled) == {"call"}


async def test_client_that_leaves_during_the_publish_cancels_all_inputs(front: Front) -> None:
    adding = asyncio.create_task(front.client.add_request_async(pooling_request("a")))
    while not front.producer.bodies:
        await asyncio.sleep(0)
    adding.cancel()
    await asyncio.sleep(0.01)

    assert front.producer.cancelled == ["call"]


def test_units_are_bounded_by_their_tokens_and_their_output() -> None:
    tokens, values = pooled_inputs.MAX_UNIT_TOKENS, MAX_UNIT_VALUES
    half = [pooling_request(f"{n}", tokens // 2) for n in range(4)]
    few = [pooling_request(f"{n}", 1) for n in range(3)]
    by_token = [pooling_request(f"{n}", 100, "token_embed") for n in range(3)]

    def sizes(requests: list[Any], width: int) -> list[int]:
        return [len(unit) for unit in pooled_inputs.units_of(requests, width=width)]

    assert sizes(half, WIDTH) == [2, 2]
    assert sizes(few, values) == [1, 1, 1]
    assert sizes(by_token, values // 200) == [2, 1]
    with pytest.raises(ContractError, match="at most"):
        pooled_inputs.units_of(by_token, width=values)
