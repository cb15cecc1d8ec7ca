"""The front's monitor of online requests, which triggers preemptions (ConServe alg. 2)."""

import time
from pathlib import Path

from services.agent.backends.base import EngineRequest
from services.agent.backends.vllm.shared.safepoints import (
    SafepointFront,
    Wish,
    demand_of,
)
from shared.contracts.base import RequestId, Seconds
from shared.contracts.qos import QosClass
from solver.prediction.latency.latency_model import predict_s
from solver.scheduling.engine.layer_preemption import preempts


class ArrivalMonitor(SafepointFront):
    """
    Monitor of one engine. It reads and writes shared memory, and never waits.

    Args:
        path: File that the monitor creates for the engine core.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._prefills_s: dict[RequestId, Seconds] = {}
        """Predicted prefill times of online requests that have no first token yet."""

    def arrived(self, request: EngineRequest, run: RequestId, num_tokens: int) -> None:
        """
        Register a request that was sent to the engine; demand a preemption if it would be late.

        Args:
            request: The request.
            run: Its run at the engine core, which is another one for each answer of a call.
            num_tokens: Number of tokens of the prompt and of the progress.
        """
        if request.slo.qos_class is QosClass.BEST_EFFORT:
            return
        now, slack_s = time.monotonic(), self._slack_s(request)
        coefficients = self.coefficients()
        predicted_s = predict_s(coefficients, compute_tokens=num_tokens, context_tokens=0)
        self._prefills_s[request.request_id] = predicted_s
        # Subtract the constant cost of an iteration, which the request pays even after a
        # preemption.
        prefill_s = predicted_s - coefficients.constant_s
        online_s = sum(self._prefills_s.values())
        self.announce(Wish(now, demand_of(run), now + slack_s, online_s, prefill_s))
        running = self.running()
        if running is not None and preempts(
            running[1], now=now, online_s=online_s, slack_s=slack_s, prefill_s=prefill_s
        ):
            self.want(running[0])

    def answered(self, request_id: RequestId) -> None:
        """Forget a request that has a first token or has ended."""
        self._prefills_s.pop(request_id, None)

    def preempt(self) -> bool:
        """Demand a preemption regardless of predictions; return whether best-effort work runs."""
        running = self.running()
        if running is None or not running[1].offline_tokens:
            return False
        self.want(running[0])
        return True

    def _slack_s(self, request: EngineRequest) -> Seconds:
        now = time.time()
        return request.slo.planning_deadline_at(request.arrived_at or now) - now
