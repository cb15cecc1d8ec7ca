"""OpenAI's headers about limits, and what a policy clamps at the gateway."""

from pathlib import Path
from typing import Any

import pytest

from services.gateway.errors import error_body, error_headers
from services.gateway.rate_limits import MEMORY_S, RateLimits, duration
from shared.contracts.base import TenantId
from shared.contracts.qos import Clamp, Importance, QosClass, Slo
from shared.contracts.requests import ErrorInfo
from shared.contracts.tenants.policies import (
    LimitKind,
    MeterGrant,
    RateLimit,
    TenantGrants,
    TenantPolicy,
)
from shared.models.tiny import make_tiny_models
from shared.tenants.policies import Policies
from tests.clocks import FakeClock
from tests.unit.gateway.rig import DoorRig, tenants_of

ACME = TenantId("acme")
POLICY = TenantPolicy(requests_per_minute=10, tokens_per_minute=500)


def grants(**fields: float) -> TenantGrants:
    meter = MeterGrant(**({"limit": 10} | fields))  # type: ignore[arg-type]
    return TenantGrants(
        to="g", term=1.0, answers=1, answers_at=0.0, meters={ACME: {LimitKind.REQUESTS: meter}}
    )


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0ms"), (0.0165, "17ms"), (1.0, "1s"), (59.2, "1m0s"), (125, "2m5s")],
)
def test_durations_are_written_as_openai_writes_them(seconds: float, text: str):
    assert duration(seconds) == text


def test_an_unused_limit_is_whole():
    limits = RateLimits(FakeClock())

    assert limits.headers(ACME, POLICY) == {
        "x-ratelimit-limit-requests": "10",
        "x-ratelimit-remaining-requests": "10",
        "x-ratelimit-reset-requests": "0ms",
        "x-ratelimit-limit-tokens": "500",
        "x-ratelimit-remaining-tokens": "500",
        "x-ratelimit-reset-tokens": "0ms",
    }
    assert limits.headers(ACME, TenantPolicy()) == {}


def test_the_allocators_last_answer_counts_for_a_minute():
    clock = FakeClock()
    limits = RateLimits(clock)
    limits.on_grants(grants(remaining=4, reset_s=50.0))
    clock.advance(10.0)
    soon = limits.headers(ACME, POLICY)
    clock.advance(MEMORY_S)
    later = limits.headers(ACME, POLICY)

    assert soon["x-ratelimit-remaining-requests"] == "4"
    assert soon["x-ratelimit-reset-requests"] == "40s"
    assert later["x-ratelimit-remaining-requests"] == "10"


def test_a_refusal_has_the_headers_of_its_limits():
    info = ErrorInfo(
        message="no",
        code="rate_limit_exceeded",
        status=429,
        retry_after_s=1.2,
        requests_limit=RateLimit(limit=10, remaining=0, reset_s=60.0),
    )

    assert error_headers(info) == {
        "x-ratelimit-limit-requests": "10",
        "x-ratelimit-remaining-requests": "0",
        "x-ratelimit-reset-requests": "1m0s",
        "retry-after": "2",
    }
    assert b'"type":"rate_limit_error"' in error_body(info)


def test_a_spent_budget_has_its_own_type():
    info = ErrorInfo(message="no", code="insufficient_quota", status=429)

    assert b'"type":"insufficient_quota"' in error_body(info)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_models(tmp_path_factory.mktemp("models"), weights=False)


def rig_of(models: Path, **fields: Any) -> DoorRig:
    """A gateway whose tenants all have one policy."""
    policies = Policies(default=TenantPolicy(**fields))
    return DoorRig(models, tenants=tenants_of(policies=policies))


def test_the_gateway_clamps_and_says_so(models: Path):
    rig = rig_of(models, classes=(QosClass.NON_INTERACTIVE,), high_importance=False)
    published = rig.completion(slo={"ttft_s": 0.05}, importance="high")

    assert published.slo == Slo(ttlt_s=300.0)
    assert published.importance is Importance.LOW
    assert published.clamped == (
        Clamp(field="class", asked="interactive", given="non_interactive"),
        Clamp(field="importance", asked="high", given="low"),
    )


def test_a_default_is_lowered_without_a_word(models: Path):
    published = rig_of(models, classes=(QosClass.BEST_EFFORT,)).completion(stream=True)

    assert (published.slo, published.clamped) == (Slo(), ())


def test_a_strict_policy_refuses_with_403(models: Path):
    rig = rig_of(models, min_ttft_s=1.0, strict=True)
    refused = rig.refusal({"x-slo-ttft-ms": "50"})

    assert (refused.status, refused.code) == (403, "target_not_allowed")
