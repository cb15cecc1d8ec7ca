"""Parts of Headway's scheduler in vLLM's engine core, without vLLM."""

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from services.agent.backends.base import EngineRequest
from services.agent.backends.vllm.core.work import running_request, work_of
from services.agent.backends.vllm.shared.core_ids import core_id, run_of
from services.agent.backends.vllm.shared.qos import QOS_KEY, qos_in_core, qos_of, read_qos
from services.agent.backends.vllm.shared.wire import Submit
from shared.contracts.base import ModelName, RequestId, TenantId
from shared.contracts.estimates import LatencyCoefficients
from shared.contracts.qos import Importance, Slo
from shared.contracts.requests import Sampling
from solver.prediction.latency.iteration_fit import IterationWork
from solver.scheduling.engine.latency import OnlineLatencyModel

PRIOR = LatencyCoefficients(constant_s=0.01, linear_s=1e-4)


def vllm_request(name: str = "r", **fields: Any) -> Any:
    """A vLLM request with a prompt of 100 tokens, none computed."""
    defaults = {
        "request_id": name,
        "num_computed_tokens": 0,
        "num_output_tokens": 0,
        "num_output_placeholders": 0,
        "headway_prefill_tokens": 100,
    }
    return SimpleNamespace(**(defaults | fields))


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"num_computed_tokens": 64}, (100, True, 0)),
        ({"num_computed_tokens": 104, "num_output_tokens": 5}, (100, False, 5)),
        # Preempted after five tokens: they are computed again.
        (
            {
                "num_computed_tokens": 103,
                "num_output_tokens": 5,
                "headway_prefill_tokens": 105,
            },
            (105, True, 5),
        ),
        # Asynchronous scheduling: the last chunk and the token that it generates are in flight.
        ({"num_computed_tokens": 100, "num_output_placeholders": 1}, (100, False, 1)),
    ],
    ids=["prefill", "decode", "resumed", "in flight"],
)
def test_running_request_is_viewed_as_after_all_scheduled_iterations(
    fields: dict[str, int], expected: tuple[int, bool, int]
) -> None:
    seen = running_request(vllm_request(**fields))

    assert expected == (seen.num_prefill_tokens, seen.is_prefill, seen.num_output_tokens)


def test_work_of_an_iteration_counts_pairs_of_prefills_only() -> None:
    requests = {
        "decode": vllm_request(num_computed_tokens=121, num_output_tokens=21),
        "chunk": vllm_request(num_computed_tokens=96),
        "new": vllm_request(num_computed_tokens=10),
    }
    work = work_of({"decode": 1, "chunk": 32, "new": 10}, requests, begun=7.0)

    assert (work.tokens, work.context_tokens, work.num_decodes) == (43, 120 + 64, 1)
    assert work.pairs == 32 * (64 + 16) + 10 * 5
    assert work.iteration(0.5).duration_s == 0.5
    assert work.iteration(0.5).prefill_pairs == work.pairs


def test_policy_inputs_of_a_request_reach_the_engine_core() -> None:
    request = EngineRequest(
        request_id=RequestId("r"),
        model=ModelName("m"),
        prompt=(1, 2),
        sampling=Sampling(max_tokens=4),
        slo=Slo(ttft_s=0.5, tbt_s=0.05),
        arrived_at=1234.5,
        importance=Importance.LOW,
        tenant=TenantId("acme"),
        application="chat",
    )
    command = msgspec.msgpack.decode(msgspec.msgpack.encode(Submit(request, (2,))), type=Submit)
    # vLLM sends sampling parameters to its core as plain msgpack.
    extra = msgspec.msgpack.decode(
        msgspec.msgpack.encode({QOS_KEY: msgspec.to_builtins(qos_of(command.request))})
    )
    qos = read_qos(extra)

    assert command.request == request

    assert (qos.slo, qos.arrived_at) == (request.slo, request.arrived_at)
    assert (qos.importance, qos.tenant, qos.application) == (Importance.LOW, "acme", "chat")
    assert read_qos(None).slo == Slo()


@pytest.mark.parametrize("is_pooling", [False, True], ids=["sampling", "pooling"])
@pytest.mark.parametrize(
    ("extra", "expected"),
    [({QOS_KEY: {"slo": {"ttft_s": 0.5}}}, Slo(ttft_s=0.5)), ({}, Slo()), (None, Slo())],
    ids=["with", "without ours", "without any"],
)
def test_qos_of_sampling_and_pooling_requests_is_read(
    extra: dict[str, Any] | None, expected: Slo, *, is_pooling: bool
) -> None:
    if is_pooling:
        pooling = SimpleNamespace(extra_kwargs=extra)
        request = vllm_request(sampling_params=None, pooling_params=pooling)
    else:
        sampling = SimpleNamespace(extra_args=extra)
        request = vllm_request(sampling_params=sampling, pooling_params=None)

    assert qos_in_core(request).slo == expected


def test_runs_with_equal_ids_have_different_ids_in_the_core() -> None:
    run = RequestId("a-b/c")
    ids = [core_id(run, number) for number in range(3)]

    assert len(set(ids)) == 3
    assert {run_of(each) for each in ids} == {run}


def test_learner_refits_after_16_32_and_64_iterations_then_every_64() -> None:
    learner = OnlineLatencyModel(PRIOR, max_tokens=256)
    work = IterationWork(100, 5000.0, 0)
    renewed = [number for number in range(1, 260) if learner.observe(work, 0.002) is not None]

    assert renewed == [16, 32, 64, 128, 192, 256]
    assert learner.predict_s(work) == pytest.approx(0.002, rel=0.05)
    assert learner.table.max_tokens == 256


def test_learner_uses_its_prior_before_the_first_fit() -> None:
    learner = OnlineLatencyModel(PRIOR, max_tokens=256)
    for _ in range(15):
        learner.observe(IterationWork(100, 5000.0, 0), 0.002)

    assert learner.predict_s(IterationWork(100, 0.0, 0)) == pytest.approx(0.02)
