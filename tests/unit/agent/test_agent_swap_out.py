"""An instance keeps a swapped-out request until it resumes or is evicted; none is lost."""

import asyncio

import pytest

from services.agent.lso.situation import ModelSizes
from services.agent.settings import LsoSettings
from services.agent.state import Ending
from shared.contracts.base import ModelName, RequestId
from shared.contracts.control import LsoOutcome, RequestCancel
from shared.contracts.estimates import LatencyCoefficients, Profile
from shared.contracts.requests import FinishReason, QueuedRequest, RunStarted
from shared.models.registry import ModelRegistry
from shared.models.tokenizer import Tokenizer
from solver.planning.lso.operations import Activate, Evict, Lso, SwapIn, SwapOut
from tests.brokers import eventually
from tests.queued import BEST_EFFORT, MODEL, OTHER, a_request, lane_of
from tests.unit.agent.parts import LEASE_S
from tests.unit.agent.rig import REPLY, AgentRig, open_agent
from tests.unit.agent.scripted_engine import AbleEngine
from tests.unit.agent.streamed import streamed_tokens
from tests.unit.agent.tasks import admitting, run_lso

pytestmark = pytest.mark.virtual_time

DONE, ALREADY = LsoOutcome.DONE, LsoOutcome.ALREADY
REFUSED = LsoOutcome.REFUSED
LANE, RESUME = lane_of().queue_name, lane_of().resume_name
R = RequestId("r")


async def outcome(rig: AgentRig, lso: Lso) -> LsoOutcome:
    return (await run_lso(rig, lso)).outcome


async def begun(rig: AgentRig, request: QueuedRequest, *tokens: int) -> None:
    """Run a request of the window until it has generated *tokens*; return the request."""
    await rig.hold(request)
    await rig.engine.began(request.request_id)
    rig.engine.emit(request.request_id, *tokens)
    run = rig.state.runs[request.request_id]
    await eventually(lambda: run.answer.token_ids == list(tokens))


async def test_swapped_out_request_stays_unacknowledged_and_resumes(able: AgentRig):
    async with admitting(able):
        await begun(able, a_request("r", reply_to=REPLY), 20, 21)
        assert await outcome(able, SwapOut(request_id=R, rest_s=1.0)) is DONE
        assert (able.engine.running, set(able.state.swapped_out)) == (set(), {R})
        assert await able.far.ready(RESUME) + await able.far.ready(LANE) == 0

        assert await outcome(able, SwapIn(request_id=R)) is DONE
        assert (await able.engine.began("r")).progress == (20, 21)
        assert able.state.swapped_out == {}
        able.engine.emit("r", 22, finish=FinishReason.LENGTH)
        await eventually(lambda: able.state.totals.completed == 1)
    replies = await able.replies()
    starts = [reply for reply in replies if isinstance(reply, RunStarted)]
    assert [(start.hop, start.offset) for start in starts] == [(0, 0), (0, 2)]
    assert streamed_tokens(replies) == (20, 21, 22)
    assert await able.back_in_lane(LANE) == 0


async def test_rest_longer_than_its_lease_is_refused(able: AgentRig):
    """The lease would end, and evict the request, before it could resume."""
    async with admitting(able):
        await begun(able, a_request("r", reply_to=REPLY), 20)
        result = await run_lso(able, SwapOut(request_id=R, rest_s=LEASE_S + 1))

        assert (result.outcome, able.engine.running) == (REFUSED, {R})
        assert "cannot rest for 31 s: its lease ends after 30 s" in result.message


async def test_rested_request_resumes_when_there_is_room(able: AgentRig):
    async with admitting(able):
        await begun(able, a_request("r"), 20)
        await outcome(able, SwapOut(request_id=R, rest_s=5.0))
        await able.leases.check()
        await asyncio.sleep(0.2)
        assert able.engine.running == set()
        able.clock.advance(5.0)
        await able.leases.check()
        assert (await able.engine.began("r")).progress == (20,)
    sample = able.metrics.get_sample_value(
        "headway_agent_lsos_total", {"kind": "swap_in", "outcome": "done"}
    )
    assert sample == 1


async def test_request_is_evicted_when_its_lease_ends(able: AgentRig):
    async with admitting(able):
        await begun(able, a_request("r"), 20)
        await outcome(able, SwapOut(request_id=R, rest_s=LEASE_S))
        able.clock.advance(LEASE_S)
        await able.leases.check()
        back = await able.requeued(RESUME)
    assert (back.progress.token_ids, back.attempts.hop, back.attempts.evictions) == ((20,), 1, 1)
    assert able.state.num_waiting == 0
    assert await able.back_in_lane(LANE) == 0


async def test_swapped_out_request_leaves_with_its_model(able: AgentRig):
    async with admitting(able):
        await begun(able, a_request("r"), 20)
        await outcome(able, SwapOut(request_id=R, rest_s=9.0))
        assert await outcome(able, Activate(model=OTHER)) is DONE
        assert (await able.requeued(RESUME)).progress.token_ids == (20,)


async def test_drain_evicts_a_swapped_out_request(able: AgentRig):
    async with admitting(able):
        await begun(able, a_request("r"), 20)
        await outcome(able, SwapOut(request_id=R, rest_s=9.0))
        able.state.draining = True
        await able.residency.empty(drain_s=0.0)
        back = await able.requeued(RESUME)
    assert (back.progress.token_ids, back.attempts.evictions) == ((20,), 1)


async def test_swapped_out_request_can_be_evicted(able: AgentRig):
    async with admitting(able):
        await begun(able, a_request("r"), 20)
        await outcome(able, SwapOut(request_id=R, rest_s=9.0))
        assert await outcome(able, Evict(request_ids=(R,))) is DONE
        assert (await able.requeued(RESUME)).progress.token_ids == (20,)


async def test_swapped_out_request_can_be_cancelled(able: AgentRig):
    async with admitting(able):
        await begun(able, a_request("r", reply_to=REPLY), 20)
        await outcome(able, SwapOut(request_id=R, rest_s=9.0))
        await able.deliver(RequestCancel(request_id=R, reply_to=REPLY))
        assert (await able.failed()).error.code == "cancelled"
    assert able.state.num_waiting == 0
    assert await able.back_in_lane(LANE) == 0


async def test_cancel_during_a_swap_out_is_applied(able: AgentRig):
    async with admitting(able):
        await begun(able, a_request("r", reply_to=REPLY), 20)
        run = able.state.runs[R]
        run.ending = Ending.SWAPPED_OUT  # as a swap-out does before the engine has ended the run
        await able.deliver(RequestCancel(request_id=R, reply_to=REPLY))
        await able.engine.abort(run.engine_id)
        assert (await able.failed()).error.code == "cancelled"
    assert (able.state.num_waiting, able.state.swapped_out) == (0, {})


async def test_second_copy_of_a_swapped_out_request_is_served_with_it(able: AgentRig):
    """After a lost connection, the broker redelivers the message of a swapped-out request."""
    request = a_request("r")
    able.sources(LANE)
    async with admitting(able):
        await begun(able, request, 20)
        await outcome(able, SwapOut(request_id=R, rest_s=9.0))
        await able.put(request)
        assert await able.puller.pull_now(1) == 1
        assert (len(able.state.window), len(able.state.swapped_out[R].pulled.deliveries)) == (0, 2)
        await outcome(able, SwapIn(request_id=R))
        await able.engine.began("r")
        able.engine.emit("r", 21, finish=FinishReason.LENGTH)
        await eventually(lambda: able.state.totals.completed == 1)
    assert await able.back_in_lane(LANE) == 0


async def test_crash_of_the_agent_redelivers_a_swapped_out_request(able: AgentRig):
    """The broker still has the request's message, because the agent did not acknowledge it."""
    async with admitting(able):
        await begun(able, a_request("r"), 20)
        await outcome(able, SwapOut(request_id=R, rest_s=9.0))
    assert await able.back_in_lane(LANE) == 1


@pytest.mark.parametrize("kind", [SwapOut, SwapIn])
async def test_unknown_request_is_refused(able: AgentRig, kind: type[SwapOut | SwapIn]):
    assert await outcome(able, kind(request_id=R)) is REFUSED


async def test_repeated_swap_out_changes_nothing(able: AgentRig):
    async with admitting(able):
        await begun(able, a_request("r"), 20)
        assert await outcome(able, SwapIn(request_id=R)) is ALREADY
        assert await outcome(able, SwapOut(request_id=R, rest_s=9.0)) is DONE
        assert await outcome(able, SwapOut(request_id=R, rest_s=9.0)) is ALREADY


async def test_request_that_never_ran_is_neither_swapped_out_nor_in(able: AgentRig):
    await able.hold(a_request("r"))
    assert await outcome(able, SwapOut(request_id=R)) is REFUSED
    assert await outcome(able, SwapIn(request_id=R)) is REFUSED


async def test_draining_instance_refuses_to_swap_out(able: AgentRig):
    async with admitting(able):
        await begun(able, a_request("r"), 20)
        able.state.draining = True
        assert await outcome(able, SwapOut(request_id=R)) is REFUSED


async def test_swap_in_without_room_is_refused(able: AgentRig):
    async with admitting(able):
        await begun(able, a_request("r"), 20)
        await outcome(able, SwapOut(request_id=R, rest_s=9.0))
        able.engine.max_running = 1
        await begun(able, a_request("another"), 20)
        (result,) = await able.executor.run(SwapIn(request_id=R))
        assert result.outcome is REFUSED
        assert "1 of 1 requests run" in result.message
        assert set(able.state.swapped_out) == {R}


@pytest.mark.parametrize(
    ("transfer_bytes_per_s", "swapped"), [(1e12, {"dump"}), (1.0, set())], ids=["fast", "slow"]
)
async def test_best_effort_is_displaced_in_the_cheaper_way(
    registry: ModelRegistry,
    tokenizers: dict[ModelName, Tokenizer],
    engine: AbleEngine,
    sizes: ModelSizes,
    *,
    transfer_bytes_per_s: float,
    swapped: set[str],
):
    lso = LsoSettings(transfer_bytes_per_s=transfer_bytes_per_s)
    engine.max_running = 1
    async with open_agent(registry, tokenizers, engine=engine, lso=lso, sizes=sizes) as rig:
        rig.state.profiles[MODEL] = Profile(
            model=MODEL,
            engine="scripted",
            device="paper",
            version=1,
            at=0.0,
            latency=LatencyCoefficients(constant_s=0.01, linear_s=1e-3),
        )
        async with admitting(rig):
            await begun(rig, a_request("dump", slo=BEST_EFFORT), 20)
            await rig.hold(a_request("urgent"))
            await rig.engine.began("urgent")
            assert set(rig.state.swapped_out) == swapped
            rig.engine.emit("urgent", 20, finish=FinishReason.LENGTH)
            if swapped:
                assert (await rig.engine.began("dump")).progress == (20,)


async def test_each_run_has_a_unique_id_on_the_engine(able: AgentRig):
    """Late outputs of the previous run must not reach the new run."""
    async with admitting(able):
        await begun(able, a_request("r"), 20)
        first = able.engine.requests[R].request_id
        await outcome(able, SwapOut(request_id=R, rest_s=9.0))
        await outcome(able, SwapIn(request_id=R))
        assert (await able.engine.began("r")).request_id != first
