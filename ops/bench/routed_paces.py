"""How fast instances of a mesh were, by their own telemetry."""

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from services.mesh.processes import ProcessMesh
from shared.broker import topology
from shared.broker.consumer import Dispatcher, Handler
from shared.broker.protocol import BindingSpec, Delivery
from shared.contracts.base import Message, Seconds
from shared.contracts.estimates import LatencyCoefficients
from shared.contracts.telemetry import IterationsObserved
from solver.prediction.latency_model import predict_s


@dataclass(slots=True)
class Paces:
    """Times of iterations as multiples of what a latency model says, for each instance."""

    latency: LatencyCoefficients
    num_instances: int
    _took_s: dict[str, Seconds] = field(default_factory=dict)
    _expected_s: dict[str, Seconds] = field(default_factory=dict)

    def observe(self, observed: IterationsObserved) -> None:
        """Some iterations of an instance."""
        name = observed.instance_id
        for each in observed.iterations:
            expected_s = predict_s(
                self.latency,
                compute_tokens=each.compute_tokens,
                context_tokens=each.context_tokens,
            )
            self._took_s[name] = self._took_s.get(name, 0.0) + each.duration_s
            self._expected_s[name] = self._expected_s.get(name, 0.0) + expected_s

    @property
    def by_instance(self) -> tuple[float, ...]:
        """In order of their numbers; 1 of an instance that served nothing."""
        names = [f"i{number}" for number in range(self.num_instances)]
        return tuple(
            self._took_s[name] / self._expected_s[name] if name in self._took_s else 1.0
            for name in names
        )


async def _on_iterations(message: IterationsObserved, paces: Paces, _delivery: Delivery) -> None:
    paces.observe(message)


@contextlib.asynccontextmanager
async def measured_paces(
    mesh: ProcessMesh, latency: LatencyCoefficients, num_instances: int
) -> AsyncIterator[Paces]:
    """Listen to the telemetry of instances `i0`, `i1`, ... while the context is open."""
    paces = Paces(latency, num_instances)
    async with mesh.open_broker("headway-bench-paces") as broker:
        queue = topology.passing_queue("paces")
        await broker.declare_queue(queue)
        key = topology.OBSERVED_ENGINE_KEY
        await broker.bind(
            BindingSpec(exchange=topology.TELEMETRY, queue=queue.name, routing_key=key)
        )
        handlers: dict[type[Message], Handler[Paces]] = {IterationsObserved: _on_iterations}
        handle = Dispatcher(handlers, paces).handle
        subscription = await broker.consume(queue.name, handle, prefetch=64)
        yield paces
        await subscription.cancel()
