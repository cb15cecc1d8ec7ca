"""The demo's requests: model, class, arrival time and target, by seed and measured capacity."""

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass

from shared.contracts.base import Seconds
from shared.contracts.ingress import InferenceRequest
from shared.contracts.qos import Importance, QosClass, Slo

BURST = (0.3, 0.7)
"""Start and end of the burst, as shares of the duration of the load."""
BURST_FACTOR = 1.6
"""Arrival rate during the burst, as a multiple of the measured capacity of the fleet."""
CALM_FACTOR = 0.5
"""Arrival rate before and after the burst, as a multiple of the measured capacity of the fleet."""
KILL_AT = 0.5
"""Time at which one agent is killed, as a share of the duration of the load."""
SECOND_MODEL_SHARES = ((0.0, 0.0), (0.25, 0.5), (0.75, 0.9))
"""
Pairs (start, share of requests for the second model); a start is a share of the duration of the
load.
"""
MAX_REQUESTS = 3000
"""Maximum number of requests of one load; with more requests, the arrival rate is reduced."""
WORDS = tuple(
    "queue deadline token batch prefill decode engine model swap plan lane window agent "  # noqa: SIM905 - a list would take a page
    "broker latency slack budget tenant stream evict resume profile estimate group order".split()
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestClass:
    """One kind of traffic and its target."""

    name: str
    slo: Slo
    share: float
    """Share of all requests that belong to this class."""
    prompt_words: tuple[int, int]
    max_tokens: tuple[int, int]
    importance: Importance = Importance.HIGH

    @property
    def qos_class(self) -> QosClass:
        return self.slo.qos_class


CLASSES = (
    RequestClass(
        name="chat",
        slo=Slo(ttft_s=1.5, tbt_s=0.3),
        share=0.35,
        prompt_words=(8, 40),
        max_tokens=(16, 48),
    ),
    RequestClass(
        name="interactive",
        slo=Slo(ttft_s=3.0, tbt_s=0.5),
        share=0.25,
        prompt_words=(20, 120),
        max_tokens=(8, 32),
    ),
    RequestClass(
        name="relaxed",
        slo=Slo(ttlt_s=30.0),
        share=0.2,
        prompt_words=(50, 300),
        max_tokens=(16, 64),
    ),
    RequestClass(
        name="best effort",
        slo=Slo(),
        share=0.2,
        prompt_words=(50, 300),
        max_tokens=(96, 224),
        importance=Importance.LOW,
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """One request, its sending time in seconds from the start, and its target in `body.slo`."""

    at_s: Seconds
    request_class: RequestClass
    body: InferenceRequest


def mean_output_tokens() -> float:
    """Mean answer length of the request mix, in tokens."""
    return sum(c.share * sum(c.max_tokens) / 2 for c in CLASSES)


def load_factor(position: float) -> float:
    """
    Arrival rate as a multiple of the capacity, at *position* (share of the duration of the load).
    """
    return BURST_FACTOR if BURST[0] <= position < BURST[1] else CALM_FACTOR


def second_model_share(position: float) -> float:
    """Share of requests for the second model, at *position* (share of the duration of the load)."""
    return [share for start, share in SECOND_MODEL_SHARES if start <= position][-1]


def plan_workload(
    models: tuple[str, str], *, duration_s: Seconds, capacity_rps: float, seed: int
) -> list[Planned]:
    """
    Poisson arrivals of all classes, above the capacity during the burst, else below it.

    Args:
        models: Wire names of two models; the load moves from the first to the second.
        duration_s: Length of the load.
        capacity_rps: Requests of this mix per second that the fleet can serve.
        seed: Equal arguments give an equal workload.
    """
    chance = random.Random(seed)
    mean_factor = CALM_FACTOR + (BURST_FACTOR - CALM_FACTOR) * (BURST[1] - BURST[0])
    capacity_rps = min(capacity_rps, MAX_REQUESTS / (mean_factor * duration_s))
    peak_rps = BURST_FACTOR * capacity_rps
    planned: list[Planned] = []
    at_s = chance.expovariate(peak_rps)
    while at_s < duration_s and len(planned) < MAX_REQUESTS:
        position = at_s / duration_s
        if chance.random() < load_factor(position) / BURST_FACTOR:
            model = models[chance.random() < second_model_share(position)]
            planned.append(_request(chance, model, at_s, name=f"{seed}-{len(planned)}"))
        at_s += chance.expovariate(peak_rps)
    return planned


def endless_requests(model: str, *, seed: str) -> Iterator[Planned]:
    """Requests of the same mix for one model without arrival times, for a closed loop."""
    chance = random.Random(f"closed loop {seed}")
    for number in itertools.count():
        yield _request(chance, model, 0.0, name=f"loop-{seed}-{number}")


def _request(chance: random.Random, model: str, at_s: Seconds, *, name: str) -> Planned:
    request_class = chance.choices(CLASSES, [c.share for c in CLASSES])[0]
    words = chance.randint(*request_class.prompt_words)
    body = InferenceRequest(
        id=name,
        model=model,
        prompt=" ".join(chance.choices(WORDS, k=words)),
        max_tokens=chance.randint(*request_class.max_tokens),
        temperature=0.0,
        ignore_eos=True,
        slo=request_class.slo,
        application=request_class.name,
        importance=request_class.importance,
        tenant="demo",
    )
    return Planned(at_s=at_s, request_class=request_class, body=body)


MALFORMED: tuple[tuple[str, bytes, str], ...] = (
    ("not JSON", b"{ this is not json", "invalid_request"),
    ("unknown model", b'{"model": "no-such-model", "prompt": "x"}', "model_not_found"),
    (
        "impossible SLO",
        b'{"model": "%m", "prompt": "x", "slo": {"ttft_s": 0.0001}}',
        "slo_impossible",
    ),
    ("over-long output", b'{"model": "%m", "prompt": "x", "max_tokens": 99999999}',
     "context_length_exceeded"),
    ("expired deadline", b'{"model": "%m", "prompt": "x", "deadline": 1000000000}',
     "deadline_expired"),
)  # fmt: skip
"""Malformed requests: name, body, and the expected error code."""
