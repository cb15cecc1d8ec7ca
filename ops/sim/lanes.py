"""Lanes of a simulated mesh, and predictions of a request's work by groupers and agents."""

from collections import deque
from collections.abc import Sequence
from statistics import fmean

from ops.sim.request import SimRequest
from shared.contracts.base import ModelName, RequestId, Seconds, UnixTime
from shared.contracts.lanes import LaneLayout, relegated_name
from solver.planning.lanes import band_lower_edge_s, lane_for
from solver.prediction.latency.service_time import CHUNK_TOKENS
from solver.scheduling.engine.latency import LatencyTable
from solver.scheduling.pulling import Source, SourceKind
from solver.scheduling.relegation import busy_token_s, finishing_s

_MODEL = ModelName("simulated")


class Forecast:
    """
    Work of requests as predicted by a mesh that has learned the classes' answer lengths.

    Prompt lengths are known. Answer lengths are predicted by the mean of the class.

    Args:
        requests: The whole traffic.
    """

    def __init__(self, requests: Sequence[SimRequest], latency: LatencyTable) -> None:
        outputs: dict[str, list[int]] = {}
        for request in requests:
            outputs.setdefault(request.arrival.class_name, []).append(request.output_tokens)
        self._output_tokens = {name: fmean(values) for name, values in outputs.items()}
        self._latency = latency
        self._prefills: dict[int, Seconds] = {}

    def work_tokens(self, request: SimRequest) -> float:
        """Number of tokens of the prompt and of the expected answer."""
        return request.arrival.prompt_tokens + self._output_tokens[request.arrival.class_name]

    def prefill_s(self, request: SimRequest) -> Seconds:
        """TTFT of a request that runs alone in chunks, as predicted by agents."""
        prompt_tokens = request.arrival.prompt_tokens
        known = self._prefills.get(prompt_tokens)
        if known is None:
            known = self._prefills[prompt_tokens] = self._chunked_s(prompt_tokens)
        return known

    def is_infeasible(
        self, request: SimRequest, now: UnixTime, iteration_tokens: int, pace_s: Seconds
    ) -> bool:
        """
        True if the request would be late if it began now, with one full iteration for each token.
        """
        outputs = self._output_tokens[request.arrival.class_name]
        context = request.arrival.prompt_tokens + outputs / 2
        pairs = (iteration_tokens - 1) ** 2 / 2
        finish_s = finishing_s(
            request.arrival.slo.qos_class,
            prefill_s=self.prefill_s(request),
            decode_s=outputs
            * busy_token_s(
                predicted_s=self._latency.predict_s(iteration_tokens, pairs, context),
                pace_s=pace_s,
            ),
        )
        return now + finish_s > request.deadline_at

    def _chunked_s(self, prompt_tokens: int) -> Seconds:
        total_s, before = 0.0, 0
        while before < prompt_tokens:
            chunk = min(CHUNK_TOKENS, prompt_tokens - before)
            total_s += self._latency.predict_s(chunk, chunk * (before + chunk / 2), before)
            before += chunk
        return total_s


class LaneQueues:
    """
    FIFO lanes of one model, and the companion queue of its relegated requests.

    Args:
        layout: Rules that divide requests into lanes.
        forecast: Predicted work of requests.
    """

    def __init__(self, layout: LaneLayout, forecast: Forecast) -> None:
        self._layout = layout
        self._forecast = forecast
        self._relegated = relegated_name(_MODEL)
        self._queues: dict[str, deque[SimRequest]] = {self._relegated: deque()}
        self._relegated_ids: set[RequestId] = set()
        self.sources = [Source(queue=self._relegated, kind=SourceKind.RELEGATED, time_left_s=0.0)]
        """Sources for the `PullOrder` of every agent; a lane is added with its first request."""

    def put(self, request: SimRequest, now: UnixTime) -> str:
        """Put *request* into its lane; return the queue's name."""
        key = lane_for(
            model=_MODEL,
            importance=request.arrival.importance,
            time_left_s=request.deadline_at - now,
            work_tokens=self._forecast.work_tokens(request),
            layout=self._layout,
        )
        queue = key.queue_name
        if queue not in self._queues:
            self._queues[queue] = deque()
            time_left_s = band_lower_edge_s(key.band, self._layout)
            self.sources.append(Source(queue=queue, kind=SourceKind.LANE, time_left_s=time_left_s))
        self._queues[queue].append(request)
        return queue

    def relegate(self, request: SimRequest) -> str:
        """Put *request* into the companion queue of relegated requests; return the queue's name."""
        self._relegated_ids.add(request.request_id)
        self._queues[self._relegated].append(request)
        return self._relegated

    def is_relegated(self, request: SimRequest) -> bool:
        return request.request_id in self._relegated_ids

    def take(self, queue: str) -> SimRequest | None:
        """Remove and return the first request of *queue*; None if the queue is empty."""
        waiting = self._queues[queue]
        return waiting.popleft() if waiting else None
