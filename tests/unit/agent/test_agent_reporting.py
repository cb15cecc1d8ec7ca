"""Telemetry of an agent: iterations of its engine, and its pulls."""

import asyncio

import pytest

from services.agent.telemetry.reporting import MAX_ITERATIONS
from shared.broker import topology
from shared.contracts.base import Decoder
from shared.contracts.telemetry import EngineIteration, IterationsObserved, LanesPulled
from tests.agents.rig import LANE, AgentRig, listen
from tests.queued import a_request

pytestmark = pytest.mark.virtual_time

decode_iterations: Decoder[IterationsObserved] = Decoder(IterationsObserved)
decode_pulls: Decoder[LanesPulled] = Decoder(LanesPulled)


def iteration(tokens: int) -> EngineIteration:
    return EngineIteration(
        compute_tokens=tokens,
        context_tokens=7,
        num_decodes=1,
        duration_s=0.01,
        prefill_pairs=tokens * 10.5,
    )


async def reported(rig: AgentRig, *iterations: EngineIteration) -> IterationsObserved:
    queue = await listen(rig, topology.TELEMETRY, topology.OBSERVED_ENGINE_KEY)
    rig.engine.iterations = iterations
    await rig.status()
    return decode_iterations((await rig.far.take(queue)).body)


async def test_reported_iterations_have_the_pairs_of_their_prefills(rig: AgentRig):
    observed = await reported(rig, iteration(1), iteration(4))

    assert observed.iterations == (iteration(1).timed(), iteration(4).timed())
    # Numbers of pairs are rounded down; the pair of a token with itself counts as a half.
    assert observed.prefill_pairs == (10, 42)


async def test_sample_of_many_iterations_keeps_its_own_pairs(rig: AgentRig):
    observed = await reported(rig, *(iteration(2 * n) for n in range(3 * MAX_ITERATIONS)))

    assert len(observed.iterations) == len(observed.prefill_pairs) == MAX_ITERATIONS
    assert [21 * each.compute_tokens // 2 for each in observed.iterations] == list(
        observed.prefill_pairs
    )
    assert [each.compute_tokens for each in observed.iterations[:3]] == [0, 6, 12]


async def test_recent_pulls_are_reported_once_with_their_totals(rig: AgentRig):
    queue = await listen(rig, topology.TELEMETRY, topology.LANES_PULLED_KEY)
    source = (await rig.status()).source
    for num, name in enumerate("ab", start=1):
        await rig.running(a_request(name))
        await asyncio.sleep(1.0)
        pulled = decode_pulls((await rig.far.take(queue)).body)
        assert pulled == LanesPulled(source=source, pulled={LANE: num})
    assert await rig.far.ready(queue) == 0
