"""Pulls of requests, and handling of pulled requests before they run."""

import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import msgspec
import pytest

from services.agent.holding import held_now, pull_state
from services.agent.settings import PullSettings
from shared.broker import topology
from shared.broker.protocol import OutMessage
from shared.contracts.base import Decoder, ModelName
from shared.contracts.errors import BrokerConflictError
from shared.contracts.estimates import Calibration, LatencyCoefficients, OutputTokens, Profile
from shared.contracts.lanes import relegated_name
from shared.contracts.requests import QueuedRequest
from shared.contracts.telemetry import LanesPulled
from shared.models.registry import ModelRegistry
from shared.models.tokenizer import Tokenizer
from solver.scheduling.pull_room import PullBounds
from solver.scheduling.pulling import SourceKind
from tests.brokers import eventually
from tests.clocks import NOW
from tests.queued import BATCH, BEST_EFFORT, MODEL, OTHER, a_request, lane_of, sampling
from tests.unit.agent.rig import REPLY, AgentRig, listen, open_agent
from tests.unit.agent.tasks import admitting, working

pytestmark = pytest.mark.virtual_time

decode: Decoder[LanesPulled] = Decoder(LanesPulled)
LANE, RESUME = lane_of().queue_name, lane_of().resume_name
SLOW = Profile(
    model=MODEL,
    engine="scripted",
    device="paper",
    version=1,
    at=0.0,
    latency=LatencyCoefficients(constant_s=10.0, linear_s=0.0),
    token_rate_per_s=10.0,
)


@asynccontextmanager
async def pulling(rig: AgentRig, *lanes: str) -> AsyncIterator[None]:
    """Run a worker that pulls from *lanes*, by default the lane of chat turns."""
    rig.sources(*(lanes or (LANE,)))
    async with working(rig.puller.work(rig.stop), rig):
        yield


async def quiet(rig: AgentRig, lane: str = LANE) -> None:
    """Wait until the worker has found *lane* empty."""

    async def empty() -> bool:
        return await rig.far.ready(lane) == 0 and rig.state.pulling == 0

    await eventually(empty)


async def test_waiting_requests_enter_the_window(rig: AgentRig):
    for name in ("a", "b"):
        await rig.put(a_request(name))
    async with pulling(rig):
        await eventually(lambda: len(rig.state.window) == 2)
    assert rig.state.totals.by_lane == {LANE: 2}
    assert await rig.back_in_lane(LANE) == 2


async def test_recent_pulls_are_reported_once_with_their_totals(rig: AgentRig):
    queue = await listen(rig, topology.TELEMETRY, topology.LANES_PULLED_KEY)
    rig.sources(LANE)
    for num, name in ((1, "a"), (2, "b")):
        await rig.put(a_request(name))
        assert await rig.puller.pull_now(1) == 1
        await rig.reporter.report_pulls()
        await rig.reporter.report_pulls()
        pulled = decode((await rig.far.take(queue)).body)
        assert pulled == LanesPulled(source=rig.reporter.status().source, pulled={LANE: num})
    assert await rig.far.ready(queue) == 0


async def test_missing_queue_is_tried_again_on_notice(rig: AgentRig):
    rig.sources(LANE)
    assert await rig.puller.pull_now(1) == 0
    now = rig.clock.now()
    assert rig.state.order.wake_at(now, best_effort_room=True) == now + 600.0
    async with pulling(rig):
        await rig.put(a_request("a"))
        assert rig.state.order.nonempty(LANE, rig.clock.now())
        rig.state.wake()
        await eventually(lambda: len(rig.state.window) == 1)


async def test_redelivered_duplicate_joins_the_known_request(rig: AgentRig):
    request = a_request("r", reply_to=REPLY)
    await rig.hold(request)
    await rig.put(request)
    async with pulling(rig):
        await eventually(lambda: len(rig.state.pulled[request.request_id].deliveries) == 2)
    assert len(rig.state.window) == 1
    await rig.residency.hand_back_window()
    assert await rig.back_in_lane(LANE) == 0


async def test_duplicate_of_a_running_request_joins_it(rig: AgentRig):
    request = a_request("r")
    run, task = await rig.running(request)
    await rig.put(request)
    async with pulling(rig):
        await eventually(lambda: len(run.pulled.deliveries) == 2)
    rig.engine.emit("r", 20)
    await rig.engine.abort(request.request_id)
    await task
    assert await rig.back_in_lane(LANE) == 0


async def test_other_producers_request_with_the_same_id_waits(rig: AgentRig):
    mine = a_request("r", reply_to=REPLY)
    theirs = a_request("r", reply_to="reply.of-another")
    await rig.hold(mine)
    await rig.put(theirs)
    async with pulling(rig):
        await quiet(rig)
    back = await rig.requeued(lane_of().resume_name)
    assert back.reply_to == "reply.of-another"
    assert len(rig.state.pulled[mine.request_id].deliveries) == 1


async def test_infeasible_request_is_relegated(rig: AgentRig):
    """A prefill of 10 s cannot meet a TTFT target of 5 s."""
    rig.state.profiles[MODEL] = SLOW
    await rig.put(a_request("r"))
    async with pulling(rig):
        await eventually(lambda: rig.state.totals.relegated == 1)
    assert (await rig.requeued(relegated_name(MODEL))).attempts.relegated
    assert len(rig.state.window) == 0


@pytest.mark.parametrize(("pace_s", "relegated"), [(0.15, 0), (6.0, 1), (math.inf, 1)])
async def test_infeasibility_of_batch_work_uses_the_pace_under_load(
    rig: AgentRig, pace_s: float, relegated: int
):
    """24 tokens in iterations of 10 s each (1024 tokens) would exceed 100 s."""
    rig.state.profiles[MODEL] = msgspec.structs.replace(
        SLOW, latency=LatencyCoefficients(constant_s=0.15, linear_s=0.01)
    )
    rig.state.pace_s = pace_s
    # Each request needs 190 ms of prefill; together they exceed half of the limit of held work.
    for number in range(3):
        await rig.hold(a_request(f"held-{number}"))
    lane = await rig.put(a_request("r", slo=BATCH))
    async with pulling(rig, lane):
        await eventually(lambda: len(rig.state.window) + rig.state.totals.relegated == 4)
    assert rig.state.totals.relegated == relegated


async def test_relegated_request_is_pulled(rig: AgentRig):
    rig.state.profiles[MODEL] = SLOW
    queue = relegated_name(MODEL)
    await rig.put(a_request("r", relegated=True), queue)
    rig.sources(queue, kind=SourceKind.RELEGATED)
    async with working(rig.puller.work(rig.stop), rig):
        await eventually(lambda: len(rig.state.window) == 1)


async def test_request_of_another_model_is_handed_back(rig: AgentRig):
    """The pull from the lane began just before a model swap."""
    request = a_request("r", base=OTHER)
    await rig.put(request, LANE)
    async with pulling(rig):
        await quiet(rig)
    back = await rig.requeued(lane_of(model=OTHER).resume_name)
    assert (back.request_id, back.attempts.hop) == ("r", 1)


@pytest.mark.parametrize("flag", ["swaps", "draining"])
async def test_requests_that_cannot_be_served_are_not_pulled(rig: AgentRig, flag: str):
    setattr(rig.state, flag, True)
    await rig.put(a_request("r"))
    async with pulling(rig):
        for _ in range(20):
            await rig.far.depth(LANE)
            rig.state.wake()
        assert await rig.far.ready(LANE) == 1


async def test_cancelled_request_ends_when_it_is_pulled(rig: AgentRig):
    request = a_request("r", reply_to=REPLY)
    rig.state.cancel(request.request_id, request.reply_to)
    await rig.put(request)
    async with pulling(rig):
        await eventually(lambda: rig.state.totals.failed == 1)
    assert (await rig.failed()).error.code == "cancelled"
    assert await rig.far.ready(topology.DEAD_LETTERS) == 0
    assert await rig.back_in_lane(LANE) == 0


@pytest.mark.parametrize(
    "body",
    [b"\xff", b"{}", b'{"kind": "request.queued.v9"}'],
    ids=["no JSON", "no kind", "unknown kind"],
)
async def test_undecodable_message_is_dead_lettered_with_a_reason(rig: AgentRig, body: bytes):
    await topology.declare_work_queue(rig.far, LANE)
    message = OutMessage(body=body, message_id="m1", reply_to=REPLY)
    await rig.far.publish(topology.LANES, LANE, message)
    async with pulling(rig):
        await quiet(rig)
        await eventually(lambda: topology.DEAD in rig.broker.attempts)
    letter = await rig.far.take(topology.DEAD_LETTERS)
    assert (letter.body, letter.message_id, letter.reply_to) == (body, "m1", REPLY)
    assert str(letter.headers[topology.REASON_HEADER]).startswith("undecodable")
    failure = await rig.failed()
    assert (failure.request_id, failure.error.code) == ("m1", "dead_lettered")
    assert await rig.back_in_lane(LANE) == 0


async def test_request_with_an_invalid_lane_is_dead_lettered(rig: AgentRig):
    await rig.put(a_request("r", lane="no lane at all"), LANE)
    async with pulling(rig):
        await eventually(lambda: topology.DEAD in rig.broker.attempts)
        await quiet(rig)
    assert await rig.far.ready(topology.DEAD_LETTERS) == 1


async def test_the_window_is_bounded(
    registry: ModelRegistry, tokenizers: dict[ModelName, Tokenizer]
):
    async with open_agent(registry, tokenizers, pull=PullSettings(window=3)) as rig:
        for _ in range(5):
            await rig.put(a_request())
        async with pulling(rig):
            await eventually(lambda: len(rig.state.window) == 3)
            assert await rig.far.ready(LANE) == 2
            head = rig.state.window.peek(NOW)
            assert head is not None
            rig.state.release(head.request_id)
            rig.state.wake()
            await eventually(lambda: len(rig.state.window) == 3)
        assert await rig.far.ready(LANE) == 1


async def test_pulls_beyond_free_slots_are_limited_to_work_starting_soon(rig: AgentRig):
    """Beyond eight slots, each waiting request is 2.8 s of work; the limit is 2 s."""
    rig.state.profiles[MODEL] = Profile(
        model=MODEL, engine="e", device="d", version=1, at=0.0, token_rate_per_s=10.0
    )
    for _ in range(12):
        await rig.put(a_request())
    async with pulling(rig):
        await eventually(lambda: len(rig.state.window) == rig.engine.max_running)
        assert await rig.far.ready(LANE) == 12 - rig.engine.max_running


async def test_one_request_may_always_wait_regardless_of_length(rig: AgentRig):
    rig.engine.max_running = 0
    for _ in range(2):
        await rig.put(a_request(sampling=sampling(2000)))
    async with pulling(rig):
        await eventually(lambda: len(rig.state.window) == 1)
        assert await rig.far.ready(LANE) == 1


async def test_best_effort_has_a_share_of_the_window(
    registry: ModelRegistry, tokenizers: dict[ModelName, Tokenizer]
):
    async with open_agent(registry, tokenizers, pull=PullSettings(best_effort_window=2)) as rig:
        lane = lane_of(BEST_EFFORT).queue_name
        for _ in range(4):
            await rig.put(a_request(slo=BEST_EFFORT))
        rig.sources(lane, kind=SourceKind.RELEGATED)
        async with working(rig.puller.work(rig.stop), rig):
            await eventually(lambda: len(rig.state.window) == 2)
            assert await rig.far.ready(lane) == 2


async def test_waiting_best_effort_does_not_block_urgent_requests(rig: AgentRig):
    """With one slot, the window has 4 s of best-effort work, twice the limit."""
    rig.engine.max_running = 1
    await rig.hold(a_request("dump", slo=BEST_EFFORT, sampling=sampling(2000)))
    await rig.put(a_request("urgent"))
    async with pulling(rig):
        await eventually(lambda: "urgent" in rig.state.window)


async def test_pull_worker_survives_a_broker_outage(rig: AgentRig, monkeypatch):
    monkeypatch.setattr("services.agent.puller.BROKER_RETRY_S", 0.01)
    await rig.put(a_request("r"))
    rig.broker.lose_connection()
    async with pulling(rig):
        for _ in range(5):
            await rig.far.depth(LANE)
        rig.broker.reconnect()
        await eventually(lambda: len(rig.state.window) == 1)


async def test_refused_queue_does_not_block_other_pulls(
    rig: AgentRig, monkeypatch: pytest.MonkeyPatch
):
    """A request that cannot be published to its lane is returned to the queue it came from."""
    mine, theirs = a_request("mine"), a_request("theirs", base=OTHER)
    await rig.put(theirs, queue=RESUME)
    await rig.put(mine)
    rig.sources(RESUME, LANE)

    async def refuse(_queue: str, _request: QueuedRequest) -> None:
        raise BrokerConflictError("access refused")

    monkeypatch.setattr(rig.endings._outbox, "queue", refuse)
    async with working(rig.puller.work(rig.stop), rig):
        await eventually(lambda: "mine" in rig.state.window)
    assert await rig.far.ready(RESUME) == 1


async def test_requests_waiting_inside_the_engine_count_as_held(
    registry: ModelRegistry, tokenizers: dict[ModelName, Tokenizer]
):
    """
    Two requests in an engine with eight slots fill a window of two until one has a first token.
    """
    async with open_agent(registry, tokenizers, pull=PullSettings(window=2)) as rig:
        for number in range(4):
            await rig.put(a_request(f"r{number}"))
        async with pulling(rig), admitting(rig):
            await rig.engine.began("r1")
            assert await rig.far.ready(LANE) == 2
            rig.engine.emit("r0", 20)
            await rig.engine.began("r2")
            assert await rig.far.ready(LANE) == 1
            rig.stop.set()


class TestBacklog:
    """Without a free slot, waiting requests count with prefill and answer."""

    PROFILE = Profile(
        model=MODEL,
        engine="scripted",
        device="paper",
        version=1,
        at=0.0,
        latency=LatencyCoefficients(constant_s=0.0, linear_s=0.001),
        latency_calibration=Calibration(count=50, bias=0.0, spread=0.3, at=0.0),
        token_rate_per_s=1000.0,
        output_tokens={"*": OutputTokens(mean=80.0, sd=40.0, count=100)},
    )

    async def backlog_s(self, rig: AgentRig, *, max_running: int, level: float) -> float:
        rig.state.profiles[MODEL] = self.PROFILE
        for name in "abcd":
            answer = sampling(5000, ignore_eos=False)
            await rig.hold(a_request(name, prompt_tokens=20, sampling=answer))
        engine = replace(rig.engine.snapshot(), max_running=max_running)
        return held_now(rig.state, engine, PullBounds(backlog_level=level)).regular_s

    @pytest.mark.parametrize(
        ("max_running", "level", "expected_s"),
        [
            (100, 0.5, 4 * 0.02),
            (100, 0.9, 4 * 0.02 + 1.2816 * 0.3 * 2 * 0.02),
            (0, 0.5, 4 * 0.1),
            (0, 0.9, 4 * 0.1 + 1.2816 * 2 * 0.04),
        ],
    )
    async def test_backlog_is_a_quantile_of_the_prediction(
        self, rig: AgentRig, max_running: int, level: float, expected_s: float
    ):
        seen_s = await self.backlog_s(rig, max_running=max_running, level=level)

        assert seen_s == pytest.approx(expected_s, rel=1e-4)
        await rig.residency.hand_back_window()

    async def test_long_prefills_count_partly_for_pulls_and_fully_for_plans(self, rig: AgentRig):
        rig.state.profiles[MODEL] = self.PROFILE
        for name in "abcd":
            await rig.hold(a_request(name, prompt_tokens=4000, sampling=sampling(1)))
        engine = replace(rig.engine.snapshot(), max_running=100)
        reported = pull_state(rig.state, engine, PullBounds(max_backlog_s=2.0))

        assert reported.backlog_s == pytest.approx(4 * 0.5)
        assert reported.whole_backlog_s == pytest.approx(4 * 4.0)
        await rig.residency.hand_back_window()
