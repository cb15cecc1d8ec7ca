"""What our scheduler in vLLM's engine core is made of, without vLLM."""

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from services.agent.backends.base import EngineRequest
from services.agent.backends.vllm.learning import LatencyLearner
from services.agent.backends.vllm.qos import QOS_KEY, qos_of, read_qos, submission
from services.agent.backends.vllm.wire import Submit
from services.agent.backends.vllm.work import running_request, work_of
from shared.contracts.base import ModelName, RequestId, TenantId
from shared.contracts.estimates import LatencyCoefficients
from shared.contracts.qos import Importance, Slo
from shared.contracts.requests import Sampling
from solver.prediction.iteration_fit import IterationWork

PRIOR = LatencyCoefficients(constant_s=0.01, linear_s=1e-4)


def vllm_request(name: str = "r", **fields: Any) -> Any:
    """A request of vLLM's: a prompt of 100, nothing computed."""
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
        # Asynchronous: the last chunk is in flight, and so is the token that it gives.
        ({"num_computed_tokens": 100, "num_output_placeholders": 1}, (100, False, 1)),
    ],
    ids=["prefill", "decode", "resumed", "in flight"],
)
def test_a_running_request_is_seen_as_after_what_is_scheduled(
    fields: dict[str, int], expected: tuple[int, bool, int]
) -> None:
    seen = running_request(vllm_request(**fields))

    assert expected == (seen.num_prefill_tokens, seen.is_prefill, seen.num_output_tokens)


def test_the_work_of_an_iteration_counts_pairs_of_prefills_only() -> None:
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


def test_what_a_policy_needs_reaches_the_engine_core() -> None:
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
    command = msgspec.msgpack.decode(msgspec.msgpack.encode(submission(request, (2,))), type=Submit)
    # vLLM sends sampling parameters to its core as plain msgpack.
    extra = msgspec.msgpack.decode(
        msgspec.msgpack.encode({QOS_KEY: msgspec.to_builtins(qos_of(command))})
    )
    qos = read_qos(extra)

    assert (qos.slo, qos.arrived_at) == (request.slo, request.arrived_at)
    assert (qos.importance, qos.tenant, qos.application) == (Importance.LOW, "acme", "chat")
    assert read_qos(None).slo == Slo()


def test_a_learner_gives_a_new_table_after_16_32_and_64_iterations_then_every_64() -> None:
    learner = LatencyLearner(PRIOR, max_tokens=256)
    work = IterationWork(100, 5000.0, 0)
    renewed = [number for number in range(1, 260) if learner.observe(work, 0.002) is not None]

    assert renewed == [16, 32, 64, 128, 192, 256]
    assert learner.predict_s(work) == pytest.approx(0.002, rel=0.05)
    assert learner.table.max_tokens == 256


def test_a_learner_believes_its_prior_until_then() -> None:
    learner = LatencyLearner(PRIOR, max_tokens=256)
    for _ in range(15):
        learner.observe(IterationWork(100, 5000.0, 0), 0.002)

    assert learner.predict_s(IterationWork(100, 0.0, 0)) == pytest.approx(0.02)
