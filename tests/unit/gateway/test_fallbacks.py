"""Fallbacks of splits over HTTP, by the leader's forecasts."""

from pathlib import Path

import msgspec
import pytest

from services.gateway.fallbacks import FORECAST_MEMORY_S, Fallbacks
from shared.contracts.base import ModelName
from shared.contracts.lanes import LaneLayout
from shared.contracts.models import TrafficSplit
from shared.contracts.plans import LaneForecast, LanesForecast
from shared.contracts.qos import Importance, Slo
from shared.contracts.requests import ModelRef
from shared.models.registry import ModelRegistry
from shared.models.tiny import make_tiny_models
from solver.planning.lanes import all_lanes
from tests.clocks import NOW, FakeClock
from tests.queued import MODEL, OTHER
from tests.unit.gateway.rig import DoorRig

FALLBACK = "tiny-qwen"
SPLIT = TrafficSplit(name=ModelName("chat"), weights={MODEL: 1.0}, fallback=FALLBACK)
TARGET = ModelRef(name=MODEL, base=MODEL)
SOON = Slo(ttft_s=2.0, tbt_s=1.0)


@pytest.fixture
def models(tmp_path: Path) -> Path:
    return make_tiny_models(tmp_path, weights=False)


@pytest.fixture
def registry(models: Path) -> ModelRegistry:
    registry = ModelRegistry.load(models)
    registry.set_splits([SPLIT])
    return registry


def forecast(wait_s: float, model: ModelName = MODEL) -> LanesForecast:
    """A forecast of *wait_s* for all lanes of *model*."""
    lanes = tuple(
        LaneForecast(lane=lane.queue_name, wait_s=wait_s, wait_sd_s=0.1, request_s=0.1)
        for lane in all_lanes((model,), LaneLayout())
    )
    return LanesForecast(epoch=1, at=NOW, lanes=lanes)


def fallbacks_of(registry: ModelRegistry, clock: FakeClock) -> Fallbacks:
    return Fallbacks(registry=registry, layout=LaneLayout(), clock=clock, answer_tokens=16)


def chosen(fallbacks: Fallbacks, name: str = "chat", slo: Slo = SOON) -> str:
    return fallbacks.chosen(
        name, TARGET, slo=slo, importance=Importance.HIGH, arrived_at=NOW, num_bytes=100
    ).name


@pytest.mark.parametrize(("wait_s", "expected"), [(60.0, FALLBACK), (0.1, MODEL)])
def test_request_that_would_be_late_goes_to_the_fallback(
    registry: ModelRegistry, wait_s: float, expected: str
) -> None:
    fallbacks = fallbacks_of(registry, FakeClock())
    fallbacks.on_forecast(forecast(wait_s))

    assert chosen(fallbacks) == expected


def test_requests_without_a_known_wait_stay_on_their_target(registry: ModelRegistry) -> None:
    clock = FakeClock()
    fallbacks = fallbacks_of(registry, clock)
    assert chosen(fallbacks) == MODEL

    fallbacks.on_forecast(forecast(60.0, OTHER))
    assert chosen(fallbacks) == MODEL

    fallbacks.on_forecast(forecast(60.0))
    clock.advance(FORECAST_MEMORY_S + 0.1)
    assert chosen(fallbacks, slo=Slo(ttlt_s=60.0)) == MODEL


def test_best_effort_and_named_models_stay_on_their_target(registry: ModelRegistry) -> None:
    fallbacks = fallbacks_of(registry, FakeClock())
    fallbacks.on_forecast(forecast(60.0))

    assert chosen(fallbacks, slo=Slo()) == MODEL
    assert chosen(fallbacks, name=MODEL) == MODEL


def test_gateway_publishes_a_late_request_under_the_name_of_the_fallback(models: Path) -> None:
    rig = DoorRig(models)
    rig.registry.set_splits([SPLIT])
    assert rig.completion(model="chat", slo={"ttft_s": 2.0}).model == MODEL

    rig.fallbacks.on_forecast(forecast(60.0))
    late = rig.completion(model="chat", slo={"ttft_s": 2.0})

    assert late.model == FALLBACK
    assert msgspec.json.decode(late.body)["model"] == FALLBACK
