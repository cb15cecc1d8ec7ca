"""Profiles as text for operators."""

import msgspec
import pytest

from services.estimator.profile_report import MOST_APPLICATIONS, lines_of
from shared.contracts.base import ModelName
from shared.contracts.estimates import (
    Calibration,
    LatencyCoefficients,
    Moments,
    OutputTokens,
    Profile,
    TreesInForce,
)
from shared.contracts.routing import RouterState, RoutingTrust
from tests.clocks import NOW

SEEN = Calibration(count=30, bias=-1.25, spread=4.0, at=NOW - 90, coverage=((0.9, 0.875),))
CHAT = OutputTokens(
    mean=20.04, sd=5.0, count=31, quantiles=((0.5, 19.0), (0.9, 28.0)), calibration=SEEN
)
PROFILE = Profile(
    model=ModelName("tiny"),
    engine="vllm",
    device="cpu",
    version=1,
    at=NOW - 0.5,
    latency=LatencyCoefficients(constant_s=0.004, linear_s=0.0001, cross_s=1e-8),
    latency_calibration=Calibration(count=300, bias=0.012, spread=0.05, at=NOW - 3 * 3600),
    num_iterations=320,
    token_rate_per_s=220.5,
    prefill_s=Moments(mean=0.2, sd=0.05, count=40),
    output_tokens={"*": OutputTokens(mean=64.0, sd=20.0, count=40), "mail": CHAT, "chat": CHAT},
    swap_s={"cold": 3.25, "warm": 0.5},
)


def shown(profile: Profile = PROFILE) -> list[str]:
    return list(lines_of([profile], [], now=NOW))


def test_profile_is_shown_as_a_table():
    assert shown() == [
        "residuals are predicted minus actual: negative is optimistic",
        "",
        "tiny on vllm cpu, 0.5 s ago",
        "  iterations  320 learnt",
        "  model       4 + 0.1·P + 1e-05·P·C ms",
        "  residual    +1.2 ± 5.0 % of 300 iterations, 3.0 h ago",
        "  busy        220.5 tokens/s",
        "  first token 0.200 ± 0.050 s of 40 requests",
        "  swaps       warm 0.50 s, cold 3.25 s",
        (
            "  answers of  requests  mean    sd  p50  p90  p99    residual  in p50  in p90  in p99"
            "      latest"
        ),
        (
            "  *                 40  64.0  20.0    -    -    -           -       -       -       -"
            "           -"
        ),
        (
            "  chat              31  20.0   5.0   19   28    -  -1.2 ± 4.0       -    88 %       -"
            "  90.0 s ago"
        ),
        (
            "  mail              31  20.0   5.0   19   28    -  -1.2 ± 4.0       -    88 %       -"
            "  90.0 s ago"
        ),
    ]


def test_unknown_values_are_left_out():
    bare = Profile(model=ModelName("m"), engine="e", device="d", version=1, at=NOW)

    assert shown(bare)[1:] == ["", "m on e d, 0.0 s ago", "  iterations  0 learnt"]


def test_most_recent_of_many_applications_are_shown():
    many = {"*": CHAT} | {f"a{n}": CHAT for n in range(MOST_APPLICATIONS + 7)}
    lines = shown(msgspec.structs.replace(PROFILE, output_tokens=many))
    named = [line.split()[0] for line in lines if "31" in line]

    assert named == ["*", *(f"a{n}" for n in range(MOST_APPLICATIONS + 6, 6, -1))]
    assert lines[-1] == "  and 7 more applications: --json has them all"


@pytest.mark.parametrize(
    ("age_s", "reported"),
    [(-2.0, "0.0 s"), (0.04, "0.0 s"), (119.0, "119.0 s"), (120.0, "2.0 min"), (7200.0, "2.0 h")],
)
def test_ages_are_shown_in_the_largest_unit_that_fits(age_s: float, reported: str):
    profile = msgspec.structs.replace(PROFILE, at=NOW - age_s)

    assert shown(profile)[2] == f"tiny on vllm cpu, {reported} ago"


def test_bias_rounded_to_zero_is_shown_without_a_minus_sign():
    tiny = Calibration(count=30, bias=-0.0001, spread=0.0, at=NOW)

    assert "  residual    +0.0 ± 0.0 % of 30 iterations, 0.0 s ago" in shown(
        msgspec.structs.replace(PROFILE, latency_calibration=tiny)
    )


def test_trees_are_shown_with_their_quality():
    trees = TreesInForce(
        version=3, at=NOW - 3 * 86400, samples=1600, coverage=((0.5, 0.513), (0.9, 0.895))
    )

    assert shown(msgspec.structs.replace(PROFILE, prefill_trees=trees))[8] == (
        "  trees       v3, 3.0 d ago, of 1600 samples; 51 % in p50, 90 % in p90 when fitted"
    )


def test_waits_are_shown_with_the_errors_of_forecasts():
    assert shown(msgspec.structs.replace(PROFILE, wait_calibration=SEEN))[8] == (
        "  waits       -1.25 ± 4.00 s of 30 requests, 88 % in p90, 90.0 s ago"
    )


def test_several_profiles_are_shown_in_order():
    lines = list(lines_of([PROFILE, msgspec.structs.replace(PROFILE, device="gpu")], [], now=NOW))

    assert [line for line in lines if line.startswith("tiny")] == [
        "tiny on vllm cpu, 0.5 s ago",
        "tiny on vllm gpu, 0.5 s ago",
    ]


def test_routers_are_shown_with_the_profile_of_their_predictions():
    trust = RoutingTrust(
        engine=PROFILE.engine,
        device=PROFILE.device,
        version="trees v3",
        trusted=False,
        level=0.9,
        count=200,
        covered=0.815,
        residual_s=-0.0123,
    )
    elsewhere = msgspec.structs.replace(trust, device="gpu")
    state = RouterState(sender="planner-1", model=PROFILE.model, at=NOW, trusts=(trust, elsewhere))
    (line,) = [each for each in lines_of([PROFILE], [state], now=NOW) if "router" in each]

    assert "planner-1: not trusted" in line
    assert "81.5 % of 200 prefills within p90, residual -12.3 ms; by trees v3" in line
