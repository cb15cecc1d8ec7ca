"""A leader that stalled does not declare peers lost because of messages that it has not read."""

from shared.runtime.stall_detector import StallDetector
from tests.unit.planner.leader_rig import LeaderRig, settled, status


class Stalling:
    """Fake of a process's stall detector."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


async def test_stalled_leader_declares_no_instance_lost(cluster: LeaderRig):
    leader = await settled(cluster, instance_timeout_s=5.0)
    own = Stalling()
    leader.attention = StallDetector(own)
    await cluster.hear(status())
    cluster.clock.advance(30.0)
    own.now += 30.0
    await leader.plan()

    assert leader.state.instances
    assert not leader.claims.lost
    # From the end of the stall on, silence counts.
    for _ in range(6):
        cluster.clock.advance(1.0)
        own.now += 1.0
        await leader.attend()
    await leader.plan()
    assert not leader.state.instances
