"""Requests survive the retirement of their queues, whatever processes die meanwhile."""

import asyncio
from enum import Enum

from hypothesis import given
from hypothesis import strategies as st

from ops.sim.virtual_time import run_virtually
from services.planner.leader.retirement import PATIENCE_S, SETTLE_S
from shared.broker.protocol import Settlement
from tests.brokers import eventually
from tests.properties.planning.retiring_mesh import (
    LANES,
    NUM_AGENTS,
    NUM_PUBLISHERS,
    SETTINGS,
    Mesh,
)

TWO_AUDITS_S = 2 * SETTINGS.audit_period_s + 2.0
"""Time of two audits, with the network's delays."""
RETIREMENT_S = SETTINGS.retire_idle_s + SETTLE_S + TWO_AUDITS_S


class Step(Enum):
    PUBLISH = "publish"
    STRIKE = "publish while the queue's deletion is on its way to the broker"
    STRIKE_LATE = "same, with a publish that begins when the retirement begins"
    HOLD = "pull and hold"
    ACK = "acknowledge what is held"
    REQUEUE = "requeue what is held"
    SERVE_ALL = "serve all"
    DEAFEN = "lose notices of retirements to a publisher"
    HEAR = "lose no more notices"
    KILL_PUBLISHER = "kill a publisher"
    KILL_AGENT = "kill an agent"
    KILL_LEADER = "kill the leader"
    DISTURB = "make a count wrong"
    REST = "rest until queues are retired"


Taken = tuple[Step, int, int, float]
"""Step, index of the process, index of the queue, and pause after the step."""
PAUSES_S = (0.0, 0.05, 0.5, 1.2, 2.0)
SCENES = (
    # A publish to a queue that is being deleted.
    (Step.PUBLISH, Step.HEAR, Step.SERVE_ALL, Step.STRIKE, Step.REST),
    (Step.PUBLISH, Step.DEAFEN, Step.SERVE_ALL, Step.STRIKE, Step.REST),
    (Step.PUBLISH, Step.HEAR, Step.SERVE_ALL, Step.STRIKE_LATE, Step.REST),
    # An election while the queue is new, or was retired.
    (Step.SERVE_ALL, Step.REST, Step.PUBLISH, Step.KILL_LEADER),
    (Step.SERVE_ALL, Step.REST, Step.PUBLISH, Step.KILL_LEADER, Step.KILL_PUBLISHER),
)
"""Steps of one publisher, one agent and one queue, which random steps would seldom make."""


@st.composite
def scenes(draw: st.DrawFn) -> list[Taken]:
    """The steps of a scene, with pauses in which most publishes end."""
    index = draw(st.integers(0, NUM_PUBLISHERS - 1))
    queue = draw(st.integers(0, len(LANES) - 1))
    pause_s = draw(st.sampled_from(PAUSES_S[-2:]))
    return [(step, index, queue, pause_s) for step in draw(st.sampled_from(SCENES))]


single_steps = st.tuples(
    st.sampled_from(Step),
    st.integers(0, NUM_PUBLISHERS - 1),
    st.integers(0, len(LANES) - 1),
    st.sampled_from(PAUSES_S),
)


def joined(parts: list[list[Taken]]) -> list[Taken]:
    """All steps of *parts*."""
    return [taken for part in parts for taken in part]


async def take(mesh: Mesh, step: Step, index: int, queue: str) -> None:
    """Execute *step* with the process *index* and *queue*."""
    agent = mesh.agents[index % NUM_AGENTS]
    match step:
        case Step.PUBLISH:
            mesh.publish(index, queue)
        case Step.STRIKE:
            mesh.strikes[queue] = index
        case Step.STRIKE_LATE:
            mesh.late_strikes[queue] = index
        case Step.HOLD:
            await agent.pull(queue)
        case Step.ACK:
            await agent.settle(Settlement.ACK)
        case Step.REQUEUE:
            await agent.settle(Settlement.REQUEUE)
        case Step.SERVE_ALL:
            await mesh.serve()
        case Step.REST:
            await asyncio.sleep(RETIREMENT_S)
        case _:
            await fail(mesh, step, index, queue)


async def fail(mesh: Mesh, step: Step, index: int, queue: str) -> None:
    """Cause the failure that *step* names."""
    match step:
        case Step.DEAFEN | Step.HEAR:
            mesh.publishers[index].deaf = step is Step.DEAFEN
        case Step.KILL_PUBLISHER:
            await mesh.restart(mesh.publishers, index)
        case Step.KILL_AGENT:
            await mesh.restart(mesh.agents, index % NUM_AGENTS)
        case Step.KILL_LEADER:
            await mesh.kill_leader()
        case Step.DISTURB:
            mesh.disturb(queue, 3 if index else -3)


async def run(seed: int, taken: list[Taken]) -> Mesh:
    """
    Execute all steps, then check that no request is lost or stuck, and that all queues can be used.
    """
    mesh = Mesh(seed)
    await mesh.start()
    for step, index, queue, pause_s in taken:
        await take(mesh, step, index, LANES[queue])
        await asyncio.sleep(pause_s)
    mesh.strikes.clear()
    mesh.late_strikes.clear()
    for agent in mesh.agents:
        await agent.settle(Settlement.REQUEUE)
    await published(mesh)
    await mesh.all_served(TWO_AUDITS_S)
    for queue in LANES:
        for index in range(NUM_PUBLISHERS):
            mesh.publish(index, queue)
    await published(mesh)
    await mesh.all_served(TWO_AUDITS_S)
    await mesh.stop()
    return mesh


async def published(mesh: Mesh) -> None:
    """Wait until all publishes have ended; a retirement delays them for a few seconds at most."""
    await eventually(
        lambda: all(publisher.num_entering == 0 for publisher in mesh.publishers),
        within_s=PATIENCE_S + TWO_AUDITS_S,
    )


@given(
    st.integers(0, 2**16),
    st.lists(scenes() | single_steps.map(lambda step: [step]), max_size=20).map(joined),
)
def test_no_request_is_lost_or_stuck(seed: int, taken: list[Taken]):
    run_virtually(run(seed, taken))


@given(st.integers(0, 2**16), st.lists(scenes(), min_size=2, max_size=4).map(joined))
def test_no_request_is_lost_or_stuck_in_the_selected_scenes(seed: int, taken: list[Taken]):
    run_virtually(run(seed, taken))


def test_idle_queues_are_retired_in_the_mesh_of_these_tests():
    begin = [(Step.PUBLISH, 0, 0, 0.0), (Step.PUBLISH, 1, 1, 2.0), (Step.SERVE_ALL, 0, 0, 0.0)]
    mesh = run_virtually(run(1, [*begin, (Step.REST, 0, 0, 10.0)]))
    assert mesh.num_retired == len(LANES)
