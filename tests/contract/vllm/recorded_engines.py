"""Parameters that a recorded engine and its replay share."""

from dataclasses import replace

from shared.contracts.estimates import LatencyCoefficients
from solver.scheduling.baselines import FixedChunkEdf, FixedChunkFcfs
from solver.scheduling.engine.decision import SchedulingPolicy
from solver.scheduling.engine.latency import LatencyTable
from solver.scheduling.engine.options import DEFAULT
from solver.scheduling.engine.qoserve import QoServePolicy

MAX_TOKENS = 512
"""Token budget of one iteration."""
MAX_RUNNING = 12
BLOCK_TOKENS = 32
NUM_BLOCKS = 60
"""Number of KV blocks; vLLM reserves one of them."""

_TABLE = LatencyTable.from_coefficients(
    LatencyCoefficients(
        constant_s=0.006, linear_s=1e-5, attention_s=8e-8, cross_s=4e-8, context_s=4e-7
    ),
    max_tokens=MAX_TOKENS,
)


def recorded_policy(name: str) -> SchedulingPolicy:
    """The policy, with a latency model that does not learn."""
    if name == "fcfs":
        return FixedChunkFcfs(200)
    if name == "edf":
        return FixedChunkEdf(200)
    return QoServePolicy(_TABLE, replace(DEFAULT, max_chunk_tokens=MAX_TOKENS))
