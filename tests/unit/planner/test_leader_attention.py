"""A leader that stood still has not heard others, which were not silent for that."""

from shared.runtime.attention import Attention
from tests.unit.planner.leader_rig import LeaderRig, settled, status


class Stalling:
    """A process's own time."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


async def test_a_leader_that_stood_still_calls_nobody_lost(cluster: LeaderRig):
    leader = await settled(cluster, instance_timeout_s=5.0)
    own = Stalling()
    leader.attention = Attention(own)
    await cluster.hear(status())
    cluster.clock.advance(30.0)
    own.now += 30.0
    await leader.plan()

    assert leader.state.instances
    assert not leader.claims.lost
    # From then on silence is silence.
    for _ in range(6):
        cluster.clock.advance(1.0)
        own.now += 1.0
        await leader.attend()
    await leader.plan()
    assert not leader.state.instances
