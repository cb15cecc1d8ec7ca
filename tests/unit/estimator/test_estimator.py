"""What the estimator learns, keeps and publishes."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from services.estimator.handlers import HANDLERS
from services.estimator.profiles import ProfileStore
from services.estimator.state import EstimatorState, Learner
from shared.broker.consumer import Dispatcher
from shared.broker.protocol import Settlement
from shared.contracts.base import InstanceId, Message, ModelName, RequestId, TenantId, encode
from shared.contracts.errors import SettingsError
from shared.contracts.estimates import LatencyCoefficients, Moments, Profile
from shared.contracts.qos import QosClass
from shared.contracts.telemetry import (
    InstanceStatus,
    Iteration,
    IterationsObserved,
    ModelActivated,
    RequestObserved,
    Residency,
)
from solver.prediction.latency_model import predict_s
from tests.clocks import NOW
from tests.deliveries import LooseDelivery

M, I1 = ModelName("org/model.v1"), InstanceId("i1")
PRIOR = Profile(
    model=M,
    engine="e",
    device="d",
    version=5,
    at=NOW - 100,
    latency=LatencyCoefficients(constant_s=0.5, linear_s=0.001),
    token_rate_per_s=77.0,
    prefill_s=Moments(mean=0.3, sd=0.1, count=50),
    output_tokens={
        "*": Moments(mean=60.0, sd=5.0, count=50),
        "old": Moments(mean=9, sd=1, count=4),
    },
    swap_s={"cold": 12.0},
)


def learner(**fields: Any) -> Learner:
    values: dict[str, Any] = {
        "key": (M, "e", "d"),
        "iteration_memory": 2000.0,
        "request_memory": 500.0,
        "max_applications": 2,
    }
    return Learner(**(values | fields))


def request(application: str = "chat", **fields: Any) -> RequestObserved:
    values: dict[str, Any] = {
        "request_id": RequestId("r"),
        "instance_id": I1,
        "model": M,
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
    """10 ms and 0.1 ms a token."""
    return IterationsObserved(
        instance_id=I1,
        model=M,
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
    return ModelActivated(instance_id=I1, model=M, source=source, duration_s=duration_s, at=0.0)


def test_iterations_teach_latency_and_throughput():
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


def test_a_profile_tells_how_wrong_the_one_before_was():
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


def test_requests_teach_lengths_by_application_and_prefill_time():
    known = learner()
    known.on_request(request("chat", output_tokens=10))
    known.on_request(request("mail", output_tokens=30))
    profile = known.profile(NOW)
    means = {name: moments.mean for name, moments in profile.output_tokens.items()}
    assert means == {"*": pytest.approx(20.0, rel=0.01), "chat": 10.0, "mail": 30.0}
    assert profile.prefill_s is not None
    assert (profile.prefill_s.mean, profile.prefill_s.count) == (0.5, 2)


def test_requests_that_did_not_end_well_teach_nothing():
    known = learner()
    known.on_request(request(outcome="cancelled"))
    assert known.profile(NOW).output_tokens == {}


def test_the_first_token_of_an_evicted_request_says_nothing_of_prefill():
    known = learner()
    known.on_request(request(evictions=1))
    assert known.profile(NOW).prefill_s is None


def test_applications_beyond_the_limit_count_as_all_only():
    known = learner()
    for name in ("a", "b", "c", "a", "d"):
        known.on_request(request(name))
    lengths = known.profile(NOW).output_tokens
    assert {name: moments.count for name, moments in lengths.items()} == {"*": 5, "a": 2, "b": 1}


def test_swaps_teach_what_they_cost_from_where():
    known = learner()
    for source, duration_s in ((Residency.COLD, 4.0), (Residency.WARM, 1.0)):
        known.on_activated(activated(source, duration_s))
    assert known.profile(NOW).swap_s == {"cold": 4.0, "warm": 1.0}


def test_before_anything_is_learnt_the_prior_stands():
    profile = learner(prior=PRIOR).profile(NOW)
    for name in ("latency", "token_rate_per_s", "prefill_s", "output_tokens", "swap_s"):
        assert getattr(profile, name) == getattr(PRIOR, name)


def test_what_is_learnt_replaces_the_prior_term_by_term():
    known = learner(prior=PRIOR)
    known.on_request(request(output_tokens=10))
    known.on_activated(activated(Residency.WARM, 1.0))
    profile = known.profile(NOW)
    assert profile.latency == PRIOR.latency
    assert profile.output_tokens["*"].mean == 10.0
    assert profile.output_tokens["old"] == PRIOR.output_tokens["old"]
    assert profile.swap_s == {"cold": 12.0, "warm": 1.0}


def test_versions_grow_even_if_the_clock_does_not():
    known = learner()
    versions = [known.profile(at).version for at in (NOW, NOW, NOW - 50, NOW + 1)]
    assert versions == sorted(set(versions))


def test_a_fresh_estimator_overrules_the_one_before():
    """Its versions begin with the time, not with one."""
    assert learner().profile(NOW).version > PRIOR.version


def test_profiles_that_were_published_are_not_changed_until_something_comes():
    known = learner()
    assert known.changed
    known.profile(NOW)
    assert not known.changed
    known.on_request(request())
    assert known.changed


async def test_messages_reach_the_learner_of_their_model_engine_and_device():
    state = EstimatorState(iteration_memory=2000, request_memory=500, max_applications=9)
    handler = Dispatcher(HANDLERS, state)

    async def tell(message: Message) -> None:
        delivery = LooseDelivery(body=encode(message))
        await handler.handle(delivery)
        assert delivery.settlements == [Settlement.ACK]

    await tell(activated(Residency.COLD, 3.0))
    assert state.learners == {}, "whose engine it was is not known yet"
    await tell(
        InstanceStatus(instance_id=I1, incarnation="x", seq=1, at=0.0, engine="e", device="d")
    )
    await tell(activated(Residency.COLD, 4.0))
    await tell(request())
    await tell(iterations())
    await tell(request(device="other"))
    assert set(state.learners) == {(M, "e", "d"), (M, "e", "other")}
    profile = state.learners[M, "e", "d"].profile(NOW)
    assert (profile.swap_s, profile.num_iterations) == ({"cold": 4.0}, 40)
    assert profile.output_tokens["chat"].count == 1


def test_a_stored_profile_is_read_back(tmp_path: Path):
    store = ProfileStore(tmp_path / "made")
    assert store.load() == ()
    store.save(PRIOR)
    assert ProfileStore(tmp_path / "made").load() == (PRIOR,)


def test_a_profile_replaces_its_predecessor_and_no_other(tmp_path: Path):

    store = ProfileStore(tmp_path)
    store.load()
    newer = msgspec.structs.replace(PRIOR, version=6)
    other = msgspec.structs.replace(PRIOR, device="d2")
    for profile in (PRIOR, other, newer):
        store.save(profile)
    assert sorted(store.load(), key=lambda profile: profile.device) == [newer, other]


@pytest.mark.parametrize(
    "content", [b"", b"{", b"\xff\xfe", b'{"kind": "\xff"}', b'{"kind": "profile.published.v1"}']
)
def test_a_corrupt_file_is_refused_by_name(tmp_path: Path, content: bytes):
    (tmp_path / "broken.json").write_bytes(content)
    with pytest.raises(SettingsError, match=r"broken\.json"):
        ProfileStore(tmp_path).load()


def test_what_a_crash_left_half_written_is_no_profile(tmp_path: Path):
    (tmp_path / "half.part").write_bytes(b"{")
    assert ProfileStore(tmp_path).load() == ()


def test_without_a_directory_nothing_is_kept():
    store = ProfileStore(None)
    store.save(PRIOR)
    assert store.load() == ()
