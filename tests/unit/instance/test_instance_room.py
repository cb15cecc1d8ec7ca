"""Room: quantiles of predicted work, as running sums."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.contracts.base import ModelName, RunId
from shared.contracts.estimates import Calibration, LatencyCoefficients, OutputTokens, Profile
from shared.contracts.requests import QueuedRequest
from solver.instance.events import EngineView
from solver.instance.request import Held, Run
from solver.instance.room import Room
from solver.scheduling.pull_room import Held as HeldWork
from solver.scheduling.pull_room import PullBounds
from tests.clocks import NOW
from tests.queued import BEST_EFFORT, a_request, sampling

SCORE = 1.2815515655446004
"""The 0.9 quantile of the standard normal distribution."""
PROFILE = Profile(
    model=ModelName("m"),
    engine="e",
    device="d",
    version=1,
    at=0.0,
    latency=LatencyCoefficients(constant_s=0.1, linear_s=0.0),
    latency_calibration=Calibration(count=50, bias=0.0, spread=0.2, at=0.0),
    output_tokens={"*": OutputTokens(mean=60.0, sd=30.0, count=9)},
)
FREE, FULL = EngineView(max_running=100), EngineView(max_running=0)


def room_of(
    *requests: QueuedRequest, level: float = 0.9, profile: Profile | None = PROFILE
) -> Room:
    room = Room(PullBounds(backlog_level=level))
    room.set_profile(profile, ())
    for number, request in enumerate(requests):
        room.update(Held(number=number, request=request, tags=[], pulled_at=NOW))
    return room


def test_prefills_have_the_spread_of_iterations():
    room = room_of(*(a_request() for _ in range(4)))

    assert room.held(FREE, 0).regular_s == pytest.approx(0.4 + SCORE * 0.2 * (4 * 0.1**2) ** 0.5)


def test_without_known_errors_predictions_are_not_corrected():
    profile = msgspec.structs.replace(PROFILE, latency_calibration=None)

    assert room_of(a_request(), a_request(), profile=profile).held(FREE, 0).regular_s == 0.2


@pytest.mark.parametrize(
    ("prompt_tokens", "limit", "count", "tokens"),
    [(10, 4000, 4, 4 * 70 + SCORE * 30 * 2), (10, 71, 1, 81.0)],
    ids=["the spread of a sum is less than the sum of spreads", "answers respect their limits"],
)
def test_answers_have_the_lengths_of_their_application(
    prompt_tokens: int, limit: int, count: int, tokens: float
):
    """Without a latency model, a full engine computes tokens at the default rate."""
    profile = msgspec.structs.replace(PROFILE, latency=None)
    asked = [
        a_request(prompt_tokens=prompt_tokens, sampling=sampling(limit, ignore_eos=False))
        for _ in range(count)
    ]
    one = room_of(a_request(prompt_tokens=1, sampling=sampling(1)), profile=profile)
    per_token_s = one.held(FULL, 0).regular_s / 2

    held = room_of(*asked, profile=profile).held(FULL, 0)

    assert held.regular_s == pytest.approx(tokens * per_token_s, rel=1e-3)


@given(low=st.floats(0.01, 0.99), high=st.floats(0.01, 0.99))
def test_a_higher_level_never_gives_less(low: float, high: float):
    low, high = sorted((low, high))
    asked = [a_request() for _ in range(3)]

    less, more = (room_of(*asked, level=level).held(FULL, 0).regular_s for level in (low, high))

    assert 0.0 <= less <= more


@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["hold", "submit", "begin", "leave"]), st.integers(0, 9)),
        max_size=40,
    ),
    running=st.integers(0, 4),
)
def test_running_sums_equal_sums_from_scratch(steps: list[tuple[str, int]], running: int):
    """The order of holds, runs and departures does not matter; only what is held now."""
    room, held = room_of(), dict[int, Held]()
    for number, (step, which) in enumerate(steps):
        waiting = [each for each in held.values() if each.run is None]
        submitted = [each for each in held.values() if each.run is not None]
        if step == "hold":
            slo = {"slo": BEST_EFFORT} if which % 3 == 0 else {}
            request = a_request(f"r{number}", prompt_tokens=1 + 9 * which, **slo)
            each = held[number] = Held(number=number, request=request, tags=[], pulled_at=NOW)
        elif step == "submit" and waiting:
            each = waiting[which % len(waiting)]
            run = Run(run_id=RunId(str(number)), submitted_at=0.0, room_tokens=which)
            each.submit(run)
        elif step == "begin" and submitted:
            each = submitted[which % len(submitted)]
            assert each.run is not None
            each.run.begun = True
        elif step == "leave" and held:
            each = held.pop(sorted(held)[which % len(held)])
            each.leave()
        else:
            continue
        room.update(each)
    fresh = room_of()
    for each in held.values():
        fresh.update(each)
    engine = EngineView(max_running=running)

    assert as_tuple(room.held(engine, 1)) == pytest.approx(as_tuple(fresh.held(engine, 1)))
    assert room.reserved_tokens == fresh.reserved_tokens
    assert room.prefilling_s == pytest.approx(fresh.prefilling_s)


def as_tuple(held: HeldWork) -> tuple[float, ...]:
    return (
        held.num_regular,
        held.num_best_effort,
        held.regular_s,
        held.best_effort_s,
        held.regular_tokens,
        held.best_effort_tokens,
    )
