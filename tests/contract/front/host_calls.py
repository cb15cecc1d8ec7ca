"""Requests that vLLM's application makes in an engine host, and the replay of their answers."""

import asyncio
from typing import Any

import pytest
import torch
from vllm import PoolingParams, SamplingParams
from vllm.exceptions import GracefulHTTPError
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest

from services.agent.backends.vllm.host.calls.call_core import (
    Answered,
    CallCoreClient,
    Child,
    in_context_of,
)
from services.engine_core.encoding import decode_request, decode_requests, encode_output
from services.engine_core.pooling import num_values
from shared.api.pooling import MAX_UNIT_VALUES
from shared.contracts.requests import FinishReason, StepDetails

WIDTH = MAX_UNIT_VALUES // 2
Failures = dict[str, Exception]


class Caller:
    """A call that keeps its requests."""

    seed = 5
    tenant = "acme"

    def __init__(self) -> None:
        self.children: list[Child] = []

    def begin(self, child: Child) -> None:
        self.children.append(child)


def request(name: str, *, pools: bool = True, **params: Any) -> Any:
    return EngineCoreRequest(
        request_id=name,
        prompt_token_ids=[10, 11, 12],
        mm_features=None,
        sampling_params=None if pools else SamplingParams(**params),
        pooling_params=PoolingParams(**({"task": "embed"} | params)) if pools else None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt="salt",
        data_parallel_rank=None,
    )


@pytest.fixture
def failures() -> Failures:
    return {}


@pytest.fixture
async def client(failures: Failures) -> CallCoreClient:
    return CallCoreClient(
        asyncio.get_running_loop(),
        tasks=("embed",),
        width=WIDTH,
        fail=failures.__setitem__,
    )


def called() -> Caller:
    """The call in whose context the test runs from now on."""
    caller = Caller()
    in_context_of(caller)
    return caller


def answered(*vectors: tuple[float, ...]) -> Answered:
    outputs = [EngineCoreOutput("", [], pooling_output=torch.tensor(each)) for each in vectors]
    return Answered(
        token_ids=(),
        details=tuple(StepDetails(0, encode_output(output)) for output in outputs),
        finish_reason=FinishReason.STOP,
        cached_tokens=0,
    )


async def test_input_of_a_pooling_model_is_a_list_of_one_request(client: CallCoreClient) -> None:
    caller = called()
    await client.add_request_async(request("a"))
    (child,) = caller.children
    (encoded,) = decode_requests(child.payload)

    assert (child.index, child.pools, child.prompt) == (0, True, (10, 11, 12))
    assert (encoded.pooling_params.task, encoded.cache_salt) == ("embed", "acme/salt")


async def test_answer_of_a_generating_model_has_the_seed_of_its_call(
    client: CallCoreClient,
) -> None:
    caller = called()
    for name in ("a", "b"):
        await client.add_request_async(request(name, pools=False, temperature=1.0))
    seeds = [decode_request(child.payload).sampling_params.seed for child in caller.children]

    assert [child.pools for child in caller.children] == [False, False]
    assert seeds == [5, 6]


async def test_output_of_an_input_is_replayed_as_it_came(client: CallCoreClient) -> None:
    caller = called()
    await client.add_request_async(request("a"))
    caller.children[0].answer(answered((1.0, 2.0)))
    (output,) = (await client.get_output_async()).outputs

    assert (output.request_id, str(output.finish_reason)) == ("a", "stop")
    assert output.pooling_output.tolist() == [1.0, 2.0]


async def test_refused_input_fails_alone(client: CallCoreClient, failures: Failures) -> None:
    caller = called()
    await client.add_request_async(request("a"))
    caller.children[0].refuse("no")
    await asyncio.sleep(0)

    assert isinstance(failures["a"], GracefulHTTPError)


async def test_output_of_one_call_is_limited(client: CallCoreClient) -> None:
    caller = called()
    for name in ("a", "b"):
        await client.add_request_async(request(name))
    with pytest.raises(GracefulHTTPError, match="first 3 inputs") as refused:
        await client.add_request_async(request("c"))
    assert refused.value.http_status == 413
    assert len(caller.children) == 2

    called()
    await client.add_request_async(request("d"))


@pytest.mark.parametrize(
    ("params", "expected"),
    [({}, 100), ({"dimensions": 8}, 8), ({"task": "token_embed"}, 300)],
)
def test_an_output_has_as_many_numbers_as_its_parameters_ask_for(
    params: dict[str, Any], expected: int
) -> None:
    assert num_values(request("a", **params), width=100) == expected
