"""The front's watch over online arrivals: who cuts the running iteration (ConServe alg. 2)."""

import time
from pathlib import Path

from services.agent.backends.base import EngineRequest
from services.agent.backends.vllm.safepoints import (
    CutTotals,
    SafepointFront,
    Wish,
    demand_of,
)
from shared.contracts.base import RequestId, Seconds
from shared.contracts.qos import QosClass
from solver.prediction.latency_model import predict_s
from solver.scheduling.layer_preemption import preempts


class ArrivalMonitor:
    """
    One engine's. Reads and writes shared memory, never waits.

    Args:
        path: Of the file that it makes for the engine core.
    """

    def __init__(self, path: Path) -> None:
        self._safepoints = SafepointFront(path)
        self._prefills_s: dict[RequestId, Seconds] = {}
        """Predicted, of online requests that have no first token yet."""

    def arrived(self, request: EngineRequest) -> None:
        """*request* has been sent to the engine; demands a cut if it would be late without."""
        if request.slo.qos_class is QosClass.BEST_EFFORT:
            return
        now, slack_s = time.monotonic(), self._slack_s(request)
        coefficients = self._safepoints.coefficients()
        tokens = len(request.prompt) + len(request.progress)
        predicted_s = predict_s(coefficients, compute_tokens=tokens, context_tokens=0)
        self._prefills_s[request.request_id] = predicted_s
        # Without what every iteration costs: late in any case is who is late by its tokens alone.
        prefill_s = predicted_s - coefficients.constant_s
        online_s = sum(self._prefills_s.values())
        self._safepoints.announce(
            Wish(now, demand_of(request.request_id), now + slack_s, online_s, prefill_s)
        )
        running = self._safepoints.running()
        if running is not None and preempts(
            running[1], now=now, online_s=online_s, slack_s=slack_s, prefill_s=prefill_s
        ):
            self._safepoints.want(running[0])

    def answered(self, request_id: RequestId) -> None:
        """It has its first token, or will have none."""
        self._prefills_s.pop(request_id, None)

    def preempt(self) -> bool:
        """Demand a cut whatever the prediction; whether there is best-effort work to drop."""
        running = self._safepoints.running()
        if running is None or not running[1].offline_tokens:
            return False
        self._safepoints.want(running[0])
        return True

    def totals(self) -> CutTotals:
        """What came of the demands."""
        return self._safepoints.totals()

    def yields_s(self, since: int = 0) -> list[Seconds]:
        """From demand to safepoint, of the cuts from number *since* on that are still known."""
        return self._safepoints.yields_s(since)

    def close(self) -> None:
        """The engine is gone."""
        self._safepoints.close()

    def _slack_s(self, request: EngineRequest) -> Seconds:
        now = time.time()
        return request.slo.planning_deadline_at(request.arrived_at or now) - now
