"""The demo's requests: who asks for what, when, and how soon."""

import random
from dataclasses import dataclass
from enum import Enum

from shared.contracts.ingress import InferenceRequest
from shared.contracts.qos import Importance, Slo

DUMP_S = 15.0
"""Seconds of ordinary arrivals that the dump is worth."""
WORDS = tuple(
    "queue deadline token batch prefill decode engine model swap plan lane window agent "  # noqa: SIM905 - a list would take a page
    "broker latency slack budget tenant stream evict resume profile estimate group order".split()
)


class Via(Enum):
    """How a request enters the mesh."""

    HTTP_STREAM = "HTTP, streamed"
    AMQP_STREAM = "AMQP, streamed"
    AMQP_FINAL = "AMQP, final only"


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestClass:
    """One kind of traffic."""

    name: str
    via: Via
    slo: Slo
    share: float
    """Of all requests."""
    prompt_words: tuple[int, int]
    max_tokens: tuple[int, int]
    importance: Importance = Importance.HIGH


BEST_EFFORT = RequestClass(
    name="best effort",
    via=Via.AMQP_FINAL,
    slo=Slo(),
    share=0.2,
    prompt_words=(50, 300),
    max_tokens=(64, 192),
    importance=Importance.LOW,
)
CLASSES = (
    RequestClass(
        name="chat",
        via=Via.HTTP_STREAM,
        slo=Slo(ttft_s=2.0, tbt_s=0.5),
        share=0.3,
        prompt_words=(8, 40),
        max_tokens=(16, 48),
    ),
    RequestClass(
        name="interactive",
        via=Via.AMQP_STREAM,
        slo=Slo(ttft_s=3.0, tbt_s=0.5),
        share=0.25,
        prompt_words=(20, 120),
        max_tokens=(8, 32),
    ),
    RequestClass(
        name="relaxed",
        via=Via.AMQP_FINAL,
        slo=Slo(ttlt_s=30.0),
        share=0.25,
        prompt_words=(50, 300),
        max_tokens=(16, 64),
    ),
    BEST_EFFORT,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """One request and when it is to be sent, seconds from the start."""

    at_s: float
    request_class: RequestClass
    body: InferenceRequest


def plan_workload(
    models: tuple[str, ...], *, duration_s: float, rate_rps: float, seed: int
) -> list[Planned]:
    """
    Poisson arrivals of all classes, and a dump of best-effort work after a third of the time.

    Args:
        models: Wire names; the favourite of three quarters of the requests changes half-way,
            the dump is all for the first.
        duration_s: Length.
        rate_rps: Mean arrivals per second, without the dump.
        seed: The same seed gives the same workload.
    """
    chance = random.Random(seed)
    arrivals: list[tuple[float, RequestClass, str]] = []
    at_s = chance.expovariate(rate_rps)
    while at_s < duration_s:
        request_class = chance.choices(CLASSES, [c.share for c in CLASSES])[0]
        favourite = models[int(2 * at_s / duration_s) % len(models)]
        model = favourite if chance.random() < 0.75 else chance.choice(models)
        arrivals.append((at_s, request_class, model))
        at_s += chance.expovariate(rate_rps)
    dump = int(DUMP_S * rate_rps)
    arrivals += [(duration_s / 3, BEST_EFFORT, models[0])] * dump
    arrivals.sort(key=lambda arrival: arrival[0])
    return [
        Planned(at_s=at_s, request_class=c, body=_body(f"demo-{seed}-{number}", model, c, chance))
        for number, (at_s, c, model) in enumerate(arrivals)
    ]


def _body(
    request_id: str, model: str, request_class: RequestClass, chance: random.Random
) -> InferenceRequest:
    words = chance.randint(*request_class.prompt_words)
    return InferenceRequest(
        id=request_id,
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
"""What a few careless producers send: name, body, and the error code they must get."""
