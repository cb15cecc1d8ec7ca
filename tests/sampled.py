"""Samples of prefill times as routers publish them."""

from shared.contracts.base import ModelName
from shared.contracts.routing import PrefillSample, PrefillsSampled
from solver.prediction.prefill.features import FEATURES, SCHEMA_VERSION
from tests.clocks import NOW
from tests.prefill_times import Request

MODEL = ModelName("org/model.v1")
KEY = (str(MODEL), "simulated", "cpu")
BATCH = 50


def sample_of(request: Request, *, times: float = 1.0) -> PrefillSample:
    """A router's sample of *request* on an engine that is slower by the factor *times*."""
    features = tuple(float(each) for each in request.features[0])
    return PrefillSample(features=features, prefill_s=times * request.prefill_s)


def plain(prefill_s: float = 0.1, **features: float) -> PrefillSample:
    """A sample with *features*; other features are 0."""
    return PrefillSample(
        features=tuple(features.get(name, 0.0) for name in FEATURES), prefill_s=prefill_s
    )


def sampled(
    *samples: PrefillSample,
    sender: str = "planner-1",
    model: str = MODEL,
    at: float = NOW,
    schema_version: int = SCHEMA_VERSION,
) -> PrefillsSampled:
    """One message with samples."""
    return PrefillsSampled(
        sender=sender,
        model=ModelName(model),
        engine="simulated",
        device="cpu",
        at=at,
        schema_version=schema_version,
        samples=samples,
    )


def messages_of(
    requests: list[Request], *, times: float = 1.0, model: str = MODEL
) -> list[PrefillsSampled]:
    """Messages with samples of all *requests*, a few per message, one second apart."""
    samples = [sample_of(each, times=times) for each in requests]
    return [
        sampled(*samples[start : start + BATCH], model=model, at=NOW + start / BATCH)
        for start in range(0, len(samples), BATCH)
    ]
