"""State that the estimator learns, stores and publishes."""

from typing import Any

import msgspec
import numpy as np
import pytest

from services.estimator.handlers import HANDLERS
from services.estimator.state import EstimatorState, Learner
from services.estimator.telemetry_adapters import time_multiples
from shared.broker.consumer import Dispatcher
from shared.broker.protocol import Settlement
from shared.contracts.base import InstanceId, Message, RequestId, TenantId, encode
from shared.contracts.estimates import LatencyCoefficients, OutputTokens, Profile
from shared.contracts.qos import QosClass
from shared.contracts.requests import FinishReason, WaitForecast
from shared.contracts.telemetry import (
    InstanceStatus,
    Iteration,
    IterationsObserved,
    ModelActivated,
    RequestObserved,
    Residency,
)
from solver.prediction.latency.latency_model import predict_batch_s, predict_s
from solver.prediction.lengths.decode_lengths import PRIOR as LENGTH_PRIOR
from tests.clocks import NOW
from tests.deliveries import LooseDelivery
from tests.unit.estimator.profiles import MODEL, PRIOR

I1 = InstanceId("i1")


def estimator() -> EstimatorState:
    return EstimatorState(iteration_memory=2000.0, request_memory=500.0, max_applications=2)


def learner(*earlier: Profile) -> Learner:
    state = estimator()
    state.restore(earlier)
    return state.learner(MODEL, "e", "d")


def request(application: str = "chat", **fields: Any) -> RequestObserved:
    values: dict[str, Any] = {
        "request_id": RequestId("r"),
        "instance_id": I1,
        "model": MODEL,
        "engine": "e",
        "device": "d",
        "application": application,
        "tenant": TenantId("t"),
        "qos_class": QosClass.INTERACTIVE,
        "prompt_tokens": 10,
        "output_tokens": 40,
        "arrived_at": 0.0,
        "pulled_at": 1.0,
        "submitted_at": 2.0,
        "first_token_at": 2.5,
        "finished_at": 9.0,
        "attained": True,
    }
    return RequestObserved(**(values | fields))


def iterations(count: int = 40) -> IterationsObserved:
    """Iterations of 10 ms plus 0.1 ms per token."""
    return IterationsObserved(
        instance_id=I1,
        model=MODEL,
        engine="e",
        device="d",
        at=0.0,
        iterations=tuple(
            Iteration(
                compute_tokens=tokens,
                context_tokens=100 * (tokens % 7),
                num_decodes=1,
                duration_s=0.01 + 1e-4 * tokens,
            )
            for tokens in range(1, 10 * count, 10)
        ),
    )


def activated(source: Residency, duration_s: float) -> ModelActivated:
    return ModelActivated(instance_id=I1, model=MODEL, source=source, duration_s=duration_s, at=0.0)


def test_latency_and_throughput_are_learnt_from_iterations():
    known = learner()
    known.on_iterations(iterations())
    profile = known.profile(NOW)
    assert profile.latency is not None
    assert predict_s(profile.latency, compute_tokens=100, context_tokens=0) == pytest.approx(
        0.02, rel=0.05
    )
    sample = iterations().iterations
    rate = sum(i.compute_tokens for i in sample) / sum(i.duration_s for i in sample)
    assert profile.token_rate_per_s == pytest.approx(rate)
    assert profile.num_iterations == 40


def test_restored_model_survives_the_first_second_of_decodes():
    known = learner()
    earlier = Profile(model=MODEL, engine="e", device="d", version=7, at=0.0, latency=TRUE)
    known.restore(earlier)
    known.on_iterations(
        IterationsObserved(
            instance_id=I1, model=MODEL, engine="e", device="d", at=0.0,
            iterations=tuple(
                Iteration(
                    compute_tokens=4, context_tokens=400, num_decodes=4,
                    duration_s=predict_s(TRUE, compute_tokens=4, context_tokens=400),
                )
                for _ in range(60)
            ),
        )
    )  # fmt: skip
    profile = known.profile(NOW)

    assert profile.num_iterations == 60
    assert profile.version > 7
    assert profile.latency is not None
    assert predict_s(profile.latency, compute_tokens=1024, context_tokens=0) == pytest.approx(
        predict_s(TRUE, compute_tokens=1024, context_tokens=0), rel=0.1
    )


TRUE = LatencyCoefficients(
    constant_s=0.005, linear_s=2e-5, attention_s=1e-9, cross_s=1e-9, context_s=5e-8
)


def mixed(count: int = 400) -> IterationsObserved:
    """Iterations of decodes with long contexts; half of them have a chunk with a context."""
    random = np.random.default_rng(5)
    sample, pairs = [], []
    for number in range(count):
        decodes, contexts = int(random.integers(1, 64)), int(random.integers(0, 100_000))
        chunk = int(random.integers(16, 2048)) if number % 2 else 0
        before = int(random.integers(0, 8000)) if chunk else 0
        pairs.append(int(chunk * (before + chunk / 2)))
        exact_s = predict_batch_s(
            TRUE,
            compute_tokens=decodes + chunk,
            context_tokens=contexts + before,
            prefill_pairs=pairs[-1],
        )
        sample.append(
            Iteration(
                compute_tokens=decodes + chunk,
                context_tokens=contexts + before,
                num_decodes=decodes,
                duration_s=exact_s * float(random.lognormal(0.0, 0.05)),
            )
        )
    message = msgspec.structs.replace(iterations(), iterations=tuple(sample))
    return msgspec.structs.replace(message, prefill_pairs=tuple(pairs))


def behind_40000_s(observed: IterationsObserved) -> float:
    """Predicted time of a chunk of 2048 tokens after 40,000 tokens, learnt from *observed*."""
    known = learner()
    known.on_iterations(observed)
    latency = known.profile(NOW).latency
    assert latency is not None
    return predict_s(latency, compute_tokens=2048, context_tokens=40_000)


def test_chunks_behind_long_contexts_are_learnt_from_pairs():
    exact_s = predict_s(TRUE, compute_tokens=2048, context_tokens=40_000)

    assert exact_s == pytest.approx(0.134, rel=0.01)
    assert behind_40000_s(mixed()) == pytest.approx(exact_s, rel=0.1)


@pytest.mark.parametrize("pairs", [(), (1, 2, 3)])
def test_other_terms_are_learnt_without_pairs_of_each_iteration(pairs: tuple[int, ...]):
    """Messages without pairs come from older agents or are malformed."""
    observed = msgspec.structs.replace(mixed(), prefill_pairs=pairs)
    known = learner()
    known.on_iterations(observed)
    profile = known.profile(NOW)

    assert profile.latency is not None
    assert profile.num_iterations == 400
    assert behind_40000_s(observed) < 0.1
    assert predict_s(profile.latency, compute_tokens=512, context_tokens=0) == pytest.approx(
        predict_s(TRUE, compute_tokens=512, context_tokens=0), rel=0.2
    )


def test_iterations_with_pairs_are_predicted_with_their_pairs():
    observed = mixed(40)
    multiples = time_multiples(observed, TRUE)

    assert np.median(np.abs(np.array(multiples) - 1)) < 0.05
    silent = msgspec.structs.replace(observed, prefill_pairs=())
    assert min(time_multiples(silent, TRUE)) < 0.6


async def test_published_latency_models_are_evaluated_on_later_iterations():
    state = estimator()
    handler = Dispatcher(HANDLERS, state)

    async def computed(times: float) -> None:
        slower = tuple(
            msgspec.structs.replace(each, duration_s=times * each.duration_s)
            for each in iterations().iterations
        )
        message = msgspec.structs.replace(iterations(), iterations=slower, at=NOW)
        await handler.handle(LooseDelivery(body=encode(message)))

    await computed(1.0)
    known = state.learner(MODEL, "e", "d")
    assert known.profile(NOW).latency_calibration is None, "nothing had been published"
    await computed(2.0)
    seen = known.profile(NOW).latency_calibration
    assert seen is not None
    assert (seen.count, seen.at) == (40, NOW)
    assert seen.bias == pytest.approx(-0.5, abs=0.02), "it was predicted to be twice as fast"
    assert seen.spread < 0.05


def test_profile_has_the_error_of_the_previous_profile():
    known = learner()
    known.on_iterations(iterations())
    assert known.profile(NOW).latency_error is None
    slower = [
        msgspec.structs.replace(each, duration_s=1.25 * each.duration_s)
        for each in iterations().iterations
    ]
    known.on_iterations(msgspec.structs.replace(iterations(), iterations=tuple(slower)))
    profile = known.profile(NOW + 1)
    assert profile.latency_error == pytest.approx(0.2, abs=0.02)
    assert profile.latency_error_p95 == pytest.approx(0.2, abs=0.05)
    assert profile.latency_bias == pytest.approx(-0.2, abs=0.02)


def test_lengths_by_application_and_prefill_times_are_learnt():
    known = learner()
    for _ in range(1000):
        known.on_request(request("chat", output_tokens=10))
        known.on_request(request("mail", output_tokens=30))
    profile = known.profile(NOW)
    lengths = profile.output_tokens
    means = {name: each.mean for name, each in lengths.items()}
    assert means == pytest.approx({"*": 20, "chat": 10, "mail": 30}, rel=0.15)
    assert lengths["mail"].quantiles[:2] == ((0.5, 30), (0.9, 30))
    assert profile.prefill_s is not None
    assert (profile.prefill_s.mean, profile.prefill_s.count) == (0.5, 2000)


def test_truncated_answers_count_as_longer_than_observed():
    ended, cut = learner(), learner()
    for _ in range(100):
        ended.on_request(request(output_tokens=40, finish_reason=FinishReason.STOP))
        cut.on_request(request(output_tokens=40, finish_reason=FinishReason.LENGTH, max_tokens=40))
    means = [known.profile(NOW).output_tokens["chat"].mean for known in (ended, cut)]
    assert means[0] == pytest.approx(40, rel=0.1)
    assert means[1] > LENGTH_PRIOR.mean


def test_answers_that_the_model_could_not_end_are_ignored():
    known = learner()
    known.on_request(request(ignore_eos=True))
    profile = known.profile(NOW)
    assert profile.output_tokens == {}
    assert profile.prefill_s is not None


def test_unreported_limits_count_as_none():
    known = learner()
    for _ in range(2):
        known.on_request(request(output_tokens=40, max_tokens=0))
    calibration = known.profile(NOW).output_tokens["chat"].calibration
    assert calibration is not None
    assert (calibration.count, calibration.at) == (1, 9.0)
    assert calibration.bias > 0


def test_answer_lengths_are_shared_across_devices():
    state = estimator()
    state.learner(MODEL, "e", "slow").on_request(request(output_tokens=40))
    for device, count in (("slow", 1), ("fast", 1)):
        profile = state.learner(MODEL, "e", device).profile(NOW)
        assert profile.output_tokens["chat"].count == count
    assert state.learner("other", "e", "slow").profile(NOW).output_tokens == {}


def test_requests_that_did_not_complete_are_not_learnt_from():
    known = learner()
    known.on_request(request(outcome="cancelled"))
    assert known.profile(NOW).output_tokens == {}


class TestWaits:
    """Waits of requests that were grouped at 1 s and passed to the engine at 2 s."""

    @staticmethod
    def reported(mean_s: float, **fields: Any) -> RequestObserved:
        predicted_wait = WaitForecast(mean_s=mean_s, sd_s=0.5)
        return request(**({"grouped_at": 1.0, "predicted_wait": predicted_wait} | fields))

    def test_wait_forecasts_are_compared_with_actual_waits(self):
        """Half of the forecasts are 3 s, the other half 0.5 s."""
        known = learner()
        for mean_s in (3.0, 0.5) * 15:
            known.on_request(self.reported(mean_s))
        seen = known.profile(NOW).wait_calibration

        assert seen is not None
        assert (seen.count, seen.at) == (30, 9.0)
        assert seen.bias == pytest.approx((2.0 - 0.5) / 2, abs=0.05)
        assert dict(seen.coverage)[0.5] == pytest.approx(0.5, abs=0.05)

    @pytest.mark.parametrize(
        "fields",
        [
            {"predicted_wait": None},
            {"grouped_at": 0.0},
            {"evictions": 1},
            {"crashes": 1},
            {"relegated": True},
            {"submitted_at": 3.0},
        ],
        ids=str,
    )
    def test_waits_without_a_forecast_or_repeated_are_ignored(self, fields: dict[str, Any]):
        known = learner()
        known.on_request(self.reported(3.0, **fields))

        assert known.profile(NOW).wait_calibration is None

    def test_quantiles_of_zero_waits_are_not_evaluated(self):
        known = learner()
        for _ in range(30):
            known.on_request(self.reported(0.0, grouped_at=1.99))
        seen = known.profile(NOW).wait_calibration

        assert seen is not None
        assert (seen.count, seen.coverage) == (30, ())
        assert seen.bias == pytest.approx(-0.01)


@pytest.mark.parametrize(
    "fields",
    [
        {"evictions": 1},
        {"crashes": 1},
        pytest.param({"submitted_at": 5.0}, id="swapped out after its first token"),
        pytest.param({"first_token_at": 0.0, "output_tokens": 0}, id="no token"),
    ],
)
def test_prefills_that_did_not_begin_exactly_once_are_ignored(fields: dict[str, Any]):
    known = learner()
    known.on_request(request(**fields))
    assert known.profile(NOW).prefill_s is None


def test_applications_beyond_the_limit_are_forgotten():
    known = learner()
    for name in ("a", "b", "a", "c"):
        known.on_request(request(name))
    lengths = known.profile(NOW).output_tokens
    assert {name: each.count for name, each in lengths.items()} == {"*": 4, "a": 2, "c": 1}


def test_swap_costs_are_learnt_by_origin():
    known = learner()
    for source, duration_s in ((Residency.COLD, 4.0), (Residency.WARM, 1.0)):
        known.on_activated(activated(source, duration_s))
    assert known.profile(NOW).swap_s == {"cold": 4.0, "warm": 1.0}


def test_prior_is_used_before_anything_is_learnt():
    profile = learner(PRIOR).profile(NOW)
    for name in ("latency", "token_rate_per_s", "prefill_s", "output_tokens", "swap_s"):
        assert getattr(profile, name) == getattr(PRIOR, name)


def test_each_learnt_term_replaces_its_prior():
    known = learner(PRIOR)
    known.on_request(request(output_tokens=10))
    known.on_activated(activated(Residency.WARM, 1.0))
    profile = known.profile(NOW)
    assert profile.latency == PRIOR.latency
    assert 10 < profile.output_tokens["*"].mean < 60
    assert profile.output_tokens["old"] == PRIOR.output_tokens["old"]
    assert profile.swap_s == {"cold": 12.0, "warm": 1.0}


def test_latest_stored_lengths_of_a_model_are_used():
    older = msgspec.structs.replace(
        PRIOR,
        device="d2",
        at=PRIOR.at - 5,
        output_tokens={"*": OutputTokens(mean=1, sd=0, count=9)},
    )
    for stored in ((PRIOR, older), (older, PRIOR)):
        assert learner(*stored).profile(NOW).output_tokens["*"] == PRIOR.output_tokens["*"]


def test_versions_grow_even_if_the_clock_does_not():
    known = learner()
    versions = [known.profile(at).version for at in (NOW, NOW, NOW - 50, NOW + 1)]
    assert versions == sorted(set(versions))


def test_new_estimator_overrules_the_previous_one():
    """Versions of profiles begin with the estimator's start time instead of 1."""
    assert learner().profile(NOW).version > PRIOR.version


def test_published_profiles_are_unchanged_without_new_messages():
    known = learner()
    assert known.changed
    known.profile(NOW)
    assert not known.changed
    known.on_request(request())
    assert known.changed


async def test_messages_reach_the_learner_of_their_key():
    state = EstimatorState(iteration_memory=2000, request_memory=500, max_applications=9)
    handler = Dispatcher(HANDLERS, state)

    async def deliver(message: Message) -> None:
        delivery = LooseDelivery(body=encode(message))
        await handler.handle(delivery)
        assert delivery.settlements == [Settlement.ACK]

    await deliver(activated(Residency.COLD, 3.0))
    assert state.learners == {}, "the instance's engine is not known yet"
    await deliver(
        InstanceStatus(instance_id=I1, incarnation="x", seq=1, at=0.0, engine="e", device="d")
    )
    await deliver(activated(Residency.COLD, 4.0))
    await deliver(request())
    await deliver(iterations())
    await deliver(request(device="other"))
    assert set(state.learners) == {(MODEL, "e", "d"), (MODEL, "e", "other")}
    profile = state.learners[MODEL, "e", "d"].profile(NOW)
    assert (profile.swap_s, profile.num_iterations) == ({"cold": 4.0}, 40)
    assert profile.output_tokens["chat"].count == 2
