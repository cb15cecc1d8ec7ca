"""Requests, instances and a predictor for tests of routing."""

from collections.abc import Sequence

import numpy as np

from shared.contracts.base import InstanceId, RequestId, TenantId
from shared.contracts.qos import Slo
from solver.routing.backlog import Backlog
from solver.routing.options import RoutingOptions
from solver.routing.request import Candidate, PrefillEstimate, RoutedRequest
from solver.routing.router import Router

INSTANCES = tuple(InstanceId(name) for name in "wxyz")
TOKEN_S = 1e-4


class ExactPredictor:
    """Predictor: a prefill takes 0.1 ms per uncached token, and 1.5 times this at the quantile."""

    def predict(
        self, request: RoutedRequest, candidates: Sequence[Candidate]
    ) -> list[PrefillEstimate]:
        missing = [request.prompt_tokens - each.cached_tokens for each in candidates]
        return [
            PrefillEstimate(
                quantile_s=1.5 * TOKEN_S * tokens,
                mean_s=TOKEN_S * tokens,
                watched_s=1.4 * TOKEN_S * tokens,
            )
            for tokens in missing
        ]


def routed(
    number: int,
    *,
    at: float = 0.0,
    tokens: int = 1000,
    tenant: str = "a",
    ttft_s: float = 2.0,
    cached: dict[InstanceId, int] | None = None,
) -> RoutedRequest:
    return RoutedRequest(
        request_id=RequestId(str(number)),
        tenant=TenantId(tenant),
        arrived_at=at,
        prompt_tokens=tokens,
        max_tokens=100,
        slo=Slo(ttft_s=ttft_s),
        cached_tokens=cached or {},
    )


def router(
    options: RoutingOptions, instances: Sequence[InstanceId] = INSTANCES, *, name: str = "r"
) -> Router:
    return Router(
        instances,
        options,
        ExactPredictor(),
        random=np.random.default_rng(0),
        backlog=Backlog(name),
    )
