"""Medha's shrinking chunks."""

from ops.baselines.scheduling.shrinking_chunk import ShrinkingChunk
from ops.sim.engine import SimulatedReplica
from ops.sim.limits import EngineLimits
from ops.sim.request import Arrival, SimRequest
from shared.contracts.base import RequestId
from shared.contracts.qos import Slo
from solver.scheduling.engine.latency import LatencyTable

LATENCY = LatencyTable(tuple(0.005 + 1e-5 * n for n in range(4097)), pair_s=1e-8)


def test_chunks_shrink_as_the_computed_prompt_grows() -> None:
    replica = SimulatedReplica(
        ShrinkingChunk(LATENCY, limit_s=0.02), LATENCY, EngineLimits(), record=True
    )
    arrival = Arrival(
        arrived_at=0.0, prompt_tokens=6000, output_tokens=2, class_name="Q1", slo=Slo()
    )
    replica.run([SimRequest(RequestId("0"), arrival)])
    chunks = [tokens for tokens, _ in replica.totals.steps[:-2]]

    assert chunks == sorted(chunks, reverse=True)
    assert chunks[0] > 2 * chunks[-1]
