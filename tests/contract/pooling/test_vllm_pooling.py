"""vLLM's engine core serves pooling models, with every policy and beside interrupted requests."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from services.agent.backends.base import SchedulingParameters
from shared.contracts.base import ModelName
from shared.contracts.errors import EngineError
from shared.contracts.qos import Slo
from tests.brokers import eventually
from tests.contract.engine.engines import prompt_of
from tests.contract.pooling.pooling_engines import BERT, EMBED, PoolingRig, Vector, pooling_rig

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="module")]
INPUTS = [prompt_of(20 + 11 * number, first=number) for number in range(12)]
SMALL_BUDGET = SchedulingParameters(token_budget=48, max_running=64)
USUAL_BUDGET = SchedulingParameters(token_budget=2048, max_running=64)


@pytest_asyncio.fixture(
    scope="module",
    loop_scope="module",
    params=["qoserve", pytest.param("fcfs", marks=pytest.mark.slow)],
)
async def rig(request: Any, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[PoolingRig]:
    async with pooling_rig(tmp_path_factory.mktemp("models"), request.param) as rig:
        yield rig


async def alone(rig: PoolingRig, model: ModelName) -> Vector:
    """The vectors of `INPUTS`, each asked for by itself."""
    return np.concatenate([await rig.vectors(tokens, model=model) for tokens in INPUTS])


def equal(one: Vector, other: Vector) -> bool:
    return bool(np.allclose(one, other, rtol=0, atol=1e-5))


@pytest.mark.parametrize("model", [EMBED, BERT])
async def test_inputs_of_one_request_get_the_vectors_that_they_get_alone(
    rig: PoolingRig, model: ModelName
) -> None:
    await rig.bring_up(model)
    expected = await alone(rig, model)
    together = await rig.vectors(*INPUTS, model=model)
    await rig.settled()

    assert expected.shape == (len(INPUTS), 128)
    assert len({row.tobytes() for row in expected}) == len(INPUTS)
    assert equal(expected, together)


@pytest.mark.parametrize("model", [EMBED, BERT])
async def test_prompts_are_divided_only_if_the_model_allows_it(
    rig: PoolingRig, model: ModelName
) -> None:
    """Most inputs are longer than the budget of an iteration."""
    await rig.bring_up(model)
    expected = await rig.vectors(*INPUTS, model=model)
    await rig.engine.clear_caches()
    await rig.engine.set_scheduling(SMALL_BUDGET)
    try:
        small = await rig.vectors(*INPUTS, model=model)
    finally:
        await rig.engine.set_scheduling(USUAL_BUDGET)

    assert equal(expected, small)


@pytest.mark.parametrize("model", [EMBED, BERT])
async def test_requests_of_all_classes_are_served_beside_each_other(
    rig: PoolingRig, model: ModelName
) -> None:
    await rig.bring_up(model)
    expected = await alone(rig, model)
    slos = (Slo(ttlt_s=0.001), Slo(ttlt_s=60.0), Slo())
    requests = [
        rig.pooled(INPUTS[first : first + 4], model=model, slo=slos[first % 3])
        for first in range(len(INPUTS) - 3)
    ]
    answers = await asyncio.gather(*map(rig.vectors_of, requests))

    assert all(equal(expected[n : n + 4], answer) for n, answer in enumerate(answers))


async def test_aborted_request_leaves_nothing_and_is_served_again(rig: PoolingRig) -> None:
    await rig.bring_up(EMBED)
    many = [prompt_of(200, first=number) for number in range(200)]
    request = rig.pooled(many)
    running = asyncio.create_task(rig.vectors_of(request))
    other = asyncio.create_task(rig.vectors(*INPUTS))
    await eventually(lambda: rig.engine.snapshot().running > 0)
    rig.engine.abort(request.request_id)
    with pytest.raises(ValueError, match="values to unpack"):  # an aborted run has no output
        await running
    beside = await other
    await rig.settled()
    again = await rig.vectors(*many[:3])

    assert equal(beside, await rig.vectors(*INPUTS))
    assert equal(again, await rig.vectors(*many[:3]))


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"task": "classify"}, "Unsupported task"),
        ({"dimensions": 3}, "Matryoshka"),
        ({"late_interaction_params": ("cache_query", "key", 1)}, "inside an engine"),
    ],
)
async def test_invalid_parameters_end_their_own_request_only(
    rig: PoolingRig, params: dict[str, Any], message: str
) -> None:
    await rig.bring_up(EMBED)
    with pytest.raises(EngineError, match=message) as refused:
        await rig.vectors(*INPUTS[:2], **params)

    assert not refused.value.engine_dead
    assert (await rig.vectors(*INPUTS[:2])).shape == (2, 128)


async def test_encoder_reports_room_for_more_than_one_request(rig: PoolingRig) -> None:
    await rig.bring_up(BERT)
    await rig.vectors(*INPUTS, model=BERT)
    snapshot = rig.engine.snapshot()

    assert snapshot.kv_capacity_tokens == snapshot.max_running * 512
    assert snapshot.kv_utilization == 0


async def test_crashed_request_gets_equal_vectors_from_the_next_engine(rig: PoolingRig) -> None:
    await rig.bring_up(EMBED)
    expected = await rig.vectors(*INPUTS)
    many = [prompt_of(200, first=number) for number in range(400)]
    running = asyncio.create_task(rig.vectors(*many))
    await asyncio.sleep(0.05)
    await rig.kill()
    with pytest.raises(EngineError) as died:
        await running
    assert died.value.engine_dead
    await rig.bring_up(EMBED)

    assert equal(expected, await rig.vectors(*INPUTS))
