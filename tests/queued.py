"""Requests as they wait in lanes, with defaults for irrelevant fields."""

import math
from itertools import count
from typing import Any

from shared.contracts.base import ModelName, RequestId, TenantId
from shared.contracts.lanes import LaneKey, LaneLayout
from shared.contracts.qos import Importance, Slo
from shared.contracts.requests import Attempts, ModelRef, Progress, QueuedRequest, Sampling
from solver.planning.lanes import lane_for
from tests.clocks import NOW

MODEL = ModelName("tiny-llama")
OTHER = ModelName("tiny-llama-b")
CHAT = Slo(ttft_s=5.0, tbt_s=1.0)
BATCH = Slo(ttlt_s=100.0)
BEST_EFFORT = Slo()
LAYOUT = LaneLayout()

_numbers = count()


def sampling(max_tokens: int = 24, **fields: Any) -> Sampling:
    """Greedy sampling of exactly *max_tokens*, unless *fields* override it."""
    return Sampling(max_tokens=max_tokens, **({"temperature": 0.0, "ignore_eos": True} | fields))


def lane_of(slo: Slo = CHAT, *, model: ModelName = MODEL, arrived_at: float = NOW) -> LaneKey:
    """Lane of a short, important request with *slo*."""
    deadline_at = slo.planning_deadline_at(arrived_at)
    return lane_for(
        model=model,
        importance=Importance.HIGH,
        time_left_s=deadline_at - arrived_at if math.isfinite(deadline_at) else math.inf,
        work_tokens=32,
        layout=LAYOUT,
    )


def a_request(request_id: str | None = None, **fields: Any) -> QueuedRequest:
    """A chat turn that arrived at `NOW`; *fields* override defaults."""
    model = ModelName(fields.pop("base", MODEL))
    attempts = Attempts(
        **{name: fields.pop(name) for name in ("hop", "crashes", "relegated") if name in fields}
    )
    slo = fields.get("slo", CHAT)
    arrived_at = fields.get("arrived_at", NOW)
    values: dict[str, Any] = {
        "request_id": RequestId(request_id or f"q{next(_numbers)}"),
        "model": ModelRef(name=model, base=model),
        "prompt": (10, 11, 12, 13),
        "prompt_tokens": 4,
        "sampling": sampling(),
        "slo": slo,
        "arrived_at": arrived_at,
        "grouped_at": arrived_at,
        "tenant": TenantId("acme"),
        "lane": lane_of(slo, model=model, arrived_at=arrived_at).queue_name,
        "attempts": attempts,
        "progress": Progress(),
    }
    return QueuedRequest(**(values | fields))
