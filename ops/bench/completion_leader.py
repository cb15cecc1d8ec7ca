"""What the leader of a mesh under measurement foretells of lanes."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from services.mesh.processes import ProcessMesh
from shared.broker import topology
from shared.broker.consumer import Dispatcher
from shared.broker.protocol import BindingSpec, Delivery
from shared.contracts.base import ModelName, Seconds, UnixTime
from shared.contracts.lanes import LaneKey
from shared.contracts.plans import LaneForecast, LanesForecast
from solver.prediction.time_distribution import TimeDistribution

OLD_S = 5.0
"""An older forecast says nothing of now."""


@dataclass(slots=True)
class LeaderForecasts:
    """The latest ones, by model; each has one lane here."""

    waits: dict[ModelName, LaneForecast] = field(default_factory=dict)
    at: UnixTime = 0.0

    def wait(self, model: ModelName, now: UnixTime) -> TimeDistribution | None:
        """Of who comes to the model's lane *now*; none while that is not known."""
        found = self.waits.get(model)
        age_s: Seconds = now - self.at
        if found is None or found.wait_s is None or found.wait_sd_s is None or age_s > OLD_S:
            return None
        return TimeDistribution.of(found.wait_s, found.wait_sd_s**2)


async def _on_forecast(message: LanesForecast, told: LeaderForecasts, _delivery: Delivery) -> None:
    told.at = message.at
    told.waits = {LaneKey.parse(each.lane).model: each for each in message.lanes}


@asynccontextmanager
async def leader_forecasts(mesh: ProcessMesh) -> AsyncIterator[LeaderForecasts]:
    """Follow the leader's forecasts, as groupers do."""
    told = LeaderForecasts()
    async with mesh.open_broker("headway-bench-leader") as broker:
        queue = topology.private_queue("bench.forecasts")
        await broker.declare_queue(queue)
        await broker.bind(
            BindingSpec(
                exchange=topology.TELEMETRY, queue=queue.name, routing_key=topology.FORECAST_KEY
            )
        )
        dispatcher = Dispatcher({LanesForecast: _on_forecast}, told)
        subscription = await broker.consume(queue.name, dispatcher.handle, prefetch=8)
        try:
            yield told
        finally:
            await subscription.cancel()
