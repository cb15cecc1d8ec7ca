"""Predictions for groups on simulated engines, made before the groups are served."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from ops.bench.__main__ import main
from ops.bench.completion_forecasts import covered, figures_of, r_squared
from ops.bench.completion_load import Answer, ModelLoad
from ops.bench.completion_mesh import MODELS, agents
from ops.bench.completion_simulated import GROUP, Load, first_batch
from ops.sim.mesh.engine import BatchEngine
from ops.sim.mesh.kinds import A10, A100, LLAMA_70B, MISTRAL_7B, served
from ops.sim.mesh.limits import BatchLimits
from ops.sim.mesh.request import MeshRequest
from ops.sim.request import Arrival
from shared.contracts.base import InstanceId, ModelName, RequestId, RunId
from shared.contracts.ingress import InferenceRequest
from shared.contracts.qos import Slo, SloVerdict
from shared.contracts.requests import (
    FinishReason,
    ReplyMode,
    RequestCompleted,
    Timings,
    Usage,
    WaitForecast,
)
from solver.prediction.calibration.completion_calibration import PredictedTime
from solver.prediction.time_distribution import TimeDistribution


@pytest.fixture(scope="module")
def load() -> Load:
    made = Load(MISTRAL_7B, A100, seed=0)
    for queue_length in (64, 256, 128, 64):
        made.keep(queue_length, groups=20)
    made.drain()
    return made


def test_all_groups_at_a_length_are_judged(load: Load):
    passed = load.forecaster.passed
    lengths = [each.forecast.queue_length for each in passed]

    assert {each: lengths.count(each) for each in lengths} == {64: 40, 256: 20, 128: 20}
    for each in passed:
        assert each.forecast.queue_length - GROUP <= each.forecast.ahead
        assert each.forecast.ahead < each.forecast.queue_length
        assert each.wait_s < each.completion_s


def test_waits_are_near_their_predictions(load: Load):
    figures = figures_of(load.forecaster.passed)

    assert figures["waiting"]["R2, not corrected"] > 0.9


def test_forecasts_are_not_corrected_before_enough_groups_have_passed(load: Load):
    passed = load.forecaster.passed

    assert not passed[0].forecast.corrected
    assert passed[-1].forecast.corrected


def test_a_first_batch_has_the_requests_that_began_before_it_emptied():
    """The first batch has the first 8 requests, and 6 requests that replace ended requests."""
    how = served(MISTRAL_7B, A100)
    assert how is not None
    requests = [
        MeshRequest(
            number,
            Arrival(
                arrived_at=0.0,
                prompt_tokens=100,
                output_tokens=50 + 20 * number,
                class_name="",
                slo=Slo(),
            ),
            ModelName("only"),
        )
        for number in range(24)
    ]
    limits = BatchLimits(kv_capacity_tokens=100_000, max_running=8)
    batch = first_batch(BatchEngine(how.latency, limits), requests)

    assert len(batch) == 8 + 6
    assert all(each.begun_at < each.first_token_at < each.finished_at for each in batch)


def test_a_model_that_does_not_fit_is_rejected():
    with pytest.raises(ValueError, match="a10 cannot serve llama-70b"):
        Load(LLAMA_70B, A10, seed=0)


def test_r_squared_is_of_the_forecasts_and_not_of_a_fitted_line():
    actual = [1.0, 2.0, 3.0]

    assert r_squared(actual, actual) == 1.0
    assert r_squared([2.0, 2.0, 2.0], actual) == 0.0
    assert r_squared([2.0, 4.0, 6.0], actual) < 0


def test_coverage_is_reported_with_and_without_corrections():
    narrow, wide = TimeDistribution.of(10.0, 0.01), TimeDistribution.of(10.0, 4.0)
    times = np.array([8.0, 10.0, 20.0])

    assert covered([(PredictedTime(narrow, wide), float(each)) for each in times]) == (2 / 3, 1 / 3)


@pytest.mark.parametrize("engine", ["simulated", "vllm"])
def test_each_model_of_the_mesh_has_its_own_agent(engine: str):
    """With a shared agent, a plan could move a measured queue to another agent."""
    specs = [each.values() for each in agents(engine)]

    assert [each["models"] for each in specs] == [[model] for model in MODELS]
    assert [each["engine"][engine]["policy"] for each in specs] == ["fcfs", "fcfs"]


@dataclass(frozen=True, slots=True)
class PredictingProducer:
    """A fake producer with known results."""

    timings: Timings

    async def submit(self, body: InferenceRequest, *, reply: ReplyMode) -> "PredictingProducer":
        assert reply is ReplyMode.FINAL
        assert body.model == MODELS[0]
        return self

    async def final(self) -> RequestCompleted:
        return RequestCompleted(
            request_id=RequestId("r"),
            run_id=RunId("run"),
            instance_id=InstanceId("i0"),
            model=MODELS[0],
            token_ids=(),
            text="",
            finish_reason=FinishReason.LENGTH,
            usage=Usage(prompt_tokens=0, completion_tokens=0, total_tokens=0),
            timings=self.timings,
            verdict=SloVerdict(attained=True),
            engine="",
        )


@pytest.mark.parametrize(("submitted_at", "begun_at"), [(5.0, 5.0), (7.5, 7.0)])
async def test_a_turn_comes_when_the_engine_gets_the_request(submitted_at: float, begun_at: float):
    """A request that is evicted after its first token keeps the begin of its first run."""
    timings = Timings(
        arrived_at=1.0,
        grouped_at=2.0,
        pulled_at=3.0,
        submitted_at=submitted_at,
        first_token_at=7.0,
        finished_at=9.0,
    )
    answer = await answer_of(timings)

    served = answer.served
    assert (served.begun_at, served.first_token_at, served.finished_at) == (begun_at, 7.0, 9.0)
    assert answer.wait_s == begun_at - 2.0
    assert answer.predicted_wait is None


async def test_an_answer_contains_its_groupers_forecast():
    timings = Timings(
        arrived_at=1.0,
        grouped_at=2.0,
        pulled_at=3.0,
        submitted_at=4.0,
        first_token_at=7.0,
        finished_at=9.0,
        predicted_wait=WaitForecast(mean_s=2.5, sd_s=0.5),
    )
    answer = await answer_of(timings)

    assert answer.predicted_wait is not None
    assert (answer.predicted_wait.mean_s, answer.predicted_wait.sd_s) == (2.5, 0.5)


async def answer_of(timings: Timings) -> Answer:
    producer: Any = PredictingProducer(timings)
    answer = await ModelLoad(producer=producer, model=MODELS[0], seed=0).ask()
    assert answer is not None
    return answer


def test_engine_option_is_rejected_by_benches_without_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr("sys.argv", ["bench", "quartz", "--engine", "vllm"])
    with pytest.raises(SystemExit):
        main()

    assert "--engine is only valid for completion" in capsys.readouterr().err
