"""Fallbacks of splits for requests that would probably be late on their target."""

import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from shared.broker import topology
from shared.broker.listening import listening
from shared.broker.protocol import Broker
from shared.contracts.base import Decoder, Seconds, UnixTime
from shared.contracts.lanes import LaneLayout
from shared.contracts.plans import LanesForecast
from shared.contracts.qos import Importance, Slo
from shared.contracts.requests import ModelRef
from shared.models.registry import ModelRegistry
from shared.runtime.clock import Clock
from solver.planning.forecast import LATE_PROBABILITY, late_with
from solver.planning.lanes import lane_for

FORECAST_MEMORY_S: Seconds = 10.0
"""Age from which a forecast does not count any more."""
_decode: Decoder[LanesForecast] = Decoder(LanesForecast)


class Fallbacks:
    """
    Chooses between the target and the fallback of a split.

    Differs from the choice of a grouper: the lane is that of an estimated length of the prompt, and
    requests that came or were served after the forecast are not counted.

    Args:
        registry: Splits and models.
        layout: Layout of lanes.
        clock: Unix time.
        answer_tokens: Assumed length of answers.
    """

    def __init__(
        self, *, registry: ModelRegistry, layout: LaneLayout, clock: Clock, answer_tokens: int
    ) -> None:
        self._registry = registry
        self._layout = layout
        self._clock = clock
        self._answer_tokens = answer_tokens
        self._forecast: LanesForecast | None = None
        self._heard_at: UnixTime = 0.0

    def on_forecast(self, forecast: LanesForecast) -> None:
        """Record the leader's forecasts."""
        self._forecast, self._heard_at = forecast, self._clock.now()

    def chosen(
        self,
        name: str,
        target: ModelRef,
        *,
        slo: Slo,
        importance: Importance,
        arrived_at: UnixTime,
        num_bytes: int,
    ) -> ModelRef:
        """
        The model of a request.

        Args:
            name: Name that the client sent.
            target: The model that the name resolves to.
            slo: Targets of the request.
            importance: Importance of the request.
            arrived_at: Arrival of the request.
            num_bytes: Size of its prompt.

        Returns:
            The fallback if the name is that of a split with a fallback, and the request would
            probably be late on its target; else the target.
        """
        split = self._registry.split(name)
        if split is None or split.fallback is None:
            return target
        left_s = slo.planning_deadline_at(arrived_at) - self._clock.now()
        if math.isinf(left_s) or not self._is_late(target, left_s, importance, num_bytes):
            return target
        return self._registry.resolve(split.fallback)

    def _is_late(
        self, target: ModelRef, left_s: Seconds, importance: Importance, num_bytes: int
    ) -> bool:
        age_s = self._clock.now() - self._heard_at
        if self._forecast is None or age_s > FORECAST_MEMORY_S:
            return False
        entry = self._registry.entry(target.base)
        lane = lane_for(
            model=target.base,
            importance=importance,
            time_left_s=left_s,
            work_tokens=num_bytes / entry.bytes_per_token + self._answer_tokens,
            layout=self._layout,
        ).queue_name
        forecast = next((each for each in self._forecast.lanes if each.lane == lane), None)
        if forecast is None:
            return False
        return late_with(forecast, left_s) >= LATE_PROBABILITY


@asynccontextmanager
async def forecasts_heard(broker: Broker, fallbacks: Fallbacks) -> AsyncIterator[None]:
    """Context in which *fallbacks* gets every forecast."""
    queue = topology.temporary_queue("gateway.forecasts")
    bindings = [(topology.TELEMETRY, topology.FORECAST_KEY)]
    async with listening(broker, queue, _decode, bindings, fallbacks.on_forecast):
        yield
