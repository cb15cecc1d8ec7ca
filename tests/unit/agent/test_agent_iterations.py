"""Reports of an engine's iterations by its agent."""

from collections.abc import AsyncIterator

import pytest

from services.agent.reporting import MAX_ITERATIONS
from shared.broker import topology
from shared.contracts.base import Decoder, ModelName
from shared.contracts.telemetry import EngineIteration, IterationsObserved
from shared.models.registry import ModelRegistry
from shared.models.tokenizer import Tokenizer
from tests.unit.agent.rig import AgentRig, listen, open_agent
from tests.unit.agent.scripted_engine import AbleEngine

decode: Decoder[IterationsObserved] = Decoder(IterationsObserved)


def iteration(tokens: int) -> EngineIteration:
    return EngineIteration(
        compute_tokens=tokens,
        context_tokens=7,
        num_decodes=1,
        duration_s=0.01,
        prefill_pairs=tokens * 10.5,
    )


@pytest.fixture
async def rig(
    registry: ModelRegistry, tokenizers: dict[ModelName, Tokenizer], engine: AbleEngine
) -> AsyncIterator[AgentRig]:
    async with open_agent(registry, tokenizers, engine=engine) as opened:
        yield opened


async def reported(rig: AgentRig, *iterations: EngineIteration) -> IterationsObserved:
    queue = await listen(rig, topology.TELEMETRY, topology.OBSERVED_ENGINE_KEY)
    rig.engine.iterations = iterations
    await rig.reporter.report()
    return decode((await rig.far.take(queue)).body)


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
