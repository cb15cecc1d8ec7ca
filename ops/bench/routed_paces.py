"""Speed of a mesh's instances, computed from telemetry."""

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from services.mesh.processes import ProcessMesh
from shared.broker import topology
from shared.broker.listening import listening
from shared.contracts.base import Decoder, Seconds
from shared.contracts.estimates import LatencyCoefficients
from shared.contracts.telemetry import IterationsObserved
from solver.prediction.latency.latency_model import predict_s

_decode: Decoder[IterationsObserved] = Decoder(IterationsObserved)


@dataclass(slots=True)
class Paces:
    """Ratio of measured to predicted iteration times of each instance, by a latency model."""

    latency: LatencyCoefficients
    num_instances: int
    _took_s: dict[str, Seconds] = field(default_factory=dict)
    _expected_s: dict[str, Seconds] = field(default_factory=dict)

    def observe(self, observed: IterationsObserved) -> None:
        """Add the times of iterations of an instance."""
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
        """
        Pace of each instance, in order of instance numbers; 1 for an instance that served nothing.
        """
        names = [f"i{number}" for number in range(self.num_instances)]
        return tuple(
            self._took_s[name] / self._expected_s[name] if name in self._took_s else 1.0
            for name in names
        )


@contextlib.asynccontextmanager
async def measured_paces(
    mesh: ProcessMesh, latency: LatencyCoefficients, num_instances: int
) -> AsyncIterator[Paces]:
    """Listen to the telemetry of instances `i0`, `i1`, ... while the context is open."""
    paces = Paces(latency, num_instances)
    async with mesh.open_broker("headway-bench-paces") as broker:
        queue = topology.temporary_queue("paces")
        bindings = [(topology.TELEMETRY, topology.OBSERVED_ENGINE_KEY)]
        async with listening(broker, queue, _decode, bindings, paces.observe):
            yield paces
