"""A grouper's router of one model: changes of instances, prefix lookups, shared state."""

from msgspec.structs import replace

from services.planner.routed.model_router import LEFT_MEMORY_S, ModelRouter
from services.planner.state import identity
from shared.contracts.base import InstanceId, RequestId, encode
from shared.contracts.requests import QueuedRequest
from shared.contracts.routing import InstanceLoad, RouterState, SoftState, WorkTotals
from solver.prediction.prefill.features import FEATURES, SCHEMA_VERSION
from solver.routing.backlog import LOST_AFTER_S
from solver.routing.options import VARIANTS
from solver.routing.prefix_hashes import PART_TOKENS, prefix_hashes
from tests.clocks import NOW
from tests.queued import MODEL, a_request
from tests.routed import routed as a_routed
from tests.unit.planner.routed_rig import ONE, TWO, prefill_of, status


def model_router(sender: str = "grouper-1", policy: str = "default") -> ModelRouter:
    made = ModelRouter(MODEL, VARIANTS[policy], sender)
    for instance_id in (ONE, TWO):
        made.on_status(status(instance_id), NOW)
    return made


def long_request(first: int, **fields: object) -> QueuedRequest:
    prompt = (first, *range(11, 410)) * 2
    request = a_request(prompt=prompt, prompt_tokens=len(prompt), **fields)
    return replace(request, prefix=prefix_hashes(prompt, None))


def sent_to(routed: ModelRouter, request: QueuedRequest, now: float = NOW) -> InstanceId:
    key = RequestId(identity(request.tenant, request.request_id))
    routed.submit(key, request, now)
    (assignment,) = routed.router.dispatch(now)
    return assignment.instance_id


def test_prompt_is_routed_to_the_instance_that_computed_it_before():
    routed = model_router()
    first = long_request(1)
    where = sent_to(routed, first)
    routed.on_prefill(where, prefill_of(first), NOW)
    other = next(each for each in (ONE, TWO) if each != where)

    again = long_request(1)
    key = RequestId(identity(again.tenant, again.request_id))
    routed.submit(key, again, NOW + 1)
    (assignment,) = routed.router.dispatch(NOW + 1)

    assert assignment.instance_id == where
    most = again.prompt_tokens
    assert most - 2 * PART_TOKENS < assignment.candidate.cached_tokens < most
    assert routed._cached_tokens(long_request(2)) == {}
    assert other not in routed._cached_tokens(again)


def test_reports_of_a_host_with_a_fast_clock_are_dated_now():
    """With a later date, recently sent work would count as lost, and later reports as older."""
    routed = model_router()
    where = sent_to(routed, long_request(1), NOW - 0.5)
    ahead = NOW + 8.0
    load = InstanceLoad(seq=round(ahead * 1000), at=ahead)
    routed.adopt(
        RouterState(sender="x", model=MODEL, at=ahead, work=SoftState(loads={where: load})), NOW
    )
    assert routed.router.backlog.num_outstanding(where) == 1

    routed.on_status(replace(status(where), at=NOW + 1.0, running=7), NOW + 1.0)
    assert routed.router.backlog.load(where).running == 7


def test_prefixes_routed_by_others_are_found():
    routed = model_router()
    routed.on_prefill(TWO, prefill_of(long_request(1, request_id="of another grouper")), NOW)

    assert sent_to(routed, long_request(1)) == TWO


def test_restarted_engine_has_an_empty_cache():
    routed = model_router()
    routed.on_prefill(TWO, prefill_of(long_request(1)), NOW)
    routed.on_status(status(TWO, incarnation="second", at=NOW + 1), NOW + 1)

    assert routed._cached_tokens(long_request(1)) == {}


def test_briefly_silent_instance_keeps_its_cache():
    routed = model_router()
    routed.on_prefill(TWO, prefill_of(long_request(1)), NOW)
    routed.lose(TWO, NOW + 3)
    assert routed._cached_tokens(long_request(1)) == {}
    routed.on_status(status(TWO, at=NOW + 8), NOW + 8)
    assert TWO in routed._cached_tokens(long_request(1))

    routed.lose(TWO, NOW + 11)
    routed.on_status(status(TWO, incarnation="second", at=NOW + 12), NOW + 12)
    assert routed._cached_tokens(long_request(1)) == {}


def test_cache_is_forgotten_when_the_engine_ended_or_left_long_ago():
    routed = model_router()
    for instance_id in (ONE, TWO):
        routed.on_prefill(instance_id, prefill_of(long_request(1)), NOW)
        routed.lose(instance_id, NOW)
    routed.forget_cache(ONE)
    routed.on_status(status(ONE, at=NOW + 1), NOW + 1)
    routed.shared_state(NOW + LEFT_MEMORY_S + 1, {})
    routed.on_status(status(TWO, at=NOW + 90), NOW + LEFT_MEMORY_S + 2)

    assert routed._cached_tokens(long_request(1)) == {}


def test_requests_of_a_lost_instance_are_returned():
    routed = ModelRouter(MODEL, VARIANTS["default"], "grouper-1")
    routed.on_status(status(ONE), NOW)
    sent_to(routed, long_request(1))
    waiting = long_request(2)
    key = RequestId(identity(waiting.tenant, waiting.request_id))
    routed.submit(key, waiting, NOW)

    assert routed.num_waiting == 1
    assert routed.lose(ONE, NOW) == [key]
    assert routed.lose(ONE, NOW) == []
    assert routed.router.instances == []


def test_prefill_is_learnt_once_and_becomes_a_sample():
    routed = model_router()
    request = long_request(1)
    where = sent_to(routed, request)
    for _ in range(2):
        routed.on_prefill(where, prefill_of(request, 0.25), NOW)
    (sampled,) = routed.take_samples(NOW)

    assert (sampled.engine, sampled.device, sampled.schema_version) == ("e", "d", SCHEMA_VERSION)
    assert [each.prefill_s for each in sampled.samples] == [0.25]
    assert len(sampled.samples[0].features) == len(FEATURES)
    assert routed.take_samples(NOW) == []


def test_prefills_without_an_engine_time_are_not_learnt():
    routed = model_router()
    request = long_request(1)
    routed.on_prefill(sent_to(routed, request), prefill_of(request, 0.0), NOW)

    assert routed.take_samples(NOW) == []
    assert routed.router.backlog.is_idle(ONE)
    assert routed.router.backlog.is_idle(TWO)


def test_work_is_shared_and_forgotten_with_its_router():
    reporter, listener = model_router("grouper-1"), model_router("grouper-2")
    where = sent_to(reporter, long_request(1))
    state = reporter.shared_work(NOW)
    assert state is not None
    listener.adopt(state, NOW)

    assert reporter.shared_work(NOW) is None
    assert not listener.router.backlog.is_idle(where)
    listener.forget("grouper-1")
    assert listener.router.backlog.is_idle(where)


def test_residuals_are_published_once():
    reporter, listener = model_router("grouper-1"), model_router("grouper-2")
    for number in range(80):
        request = long_request(number)
        reporter.on_prefill(sent_to(reporter, request, NOW + number), prefill_of(request, 3.0), NOW)
    whole = reporter.shared_state(NOW, {})
    (snapshot,) = whole.calibrations
    later = reporter.shared_state(NOW, {snapshot.model_version: snapshot.residuals[-1].number})
    before = listener.router.submit(a_routed(1), NOW).estimate.mean_s
    listener.adopt(whole, NOW)

    assert later.calibrations[0].residuals == ()
    assert listener.router.submit(a_routed(2), NOW).estimate.mean_s > 2 * before
    (trust,) = whole.trusts
    assert (trust.trusted, trust.count) == (False, 80)
    assert trust.residual_s < 0


def test_router_with_a_fast_clock_loses_no_work():
    routed = ModelRouter(MODEL, VARIANTS["default"], "grouper-1")
    routed.on_status(status(ONE), NOW)
    sent_to(routed, long_request(1))
    routed.on_status(status(ONE, at=NOW + 2 * LOST_AFTER_S, running=1), NOW)
    assert not routed.router.backlog.is_idle(ONE)
    routed.on_status(status(ONE, at=1e30, running=2), NOW + 1)
    routed.on_status(status(ONE, at=NOW + 2, running=3), NOW + 2)

    assert routed.router.backlog.load(ONE).running == 3
    assert encode(routed.shared_state(NOW + 2, {}))


def test_router_state_covers_only_its_sender_and_known_instances():
    routed = model_router()
    work = {
        each: WorkTotals(version=9, assigned_s=5.0, dispatched_s=5.0, num_assigned=1)
        for each in (ONE, InstanceId("gone"))
    }
    loads = {InstanceId("gone"): InstanceLoad(seq=1, running=1)}
    reported = SoftState(work={"grouper-2": work, "grouper-3": work}, loads=loads)
    routed.adopt(RouterState(sender="grouper-2", model=MODEL, at=NOW, work=reported), NOW)
    known = routed.router.backlog.snapshot()

    assert known.work["grouper-2"].keys() == {ONE}
    assert "grouper-3" not in known.work
    assert known.loads.keys() == {ONE, TWO}


def test_no_state_of_instances_that_left_long_ago_is_kept():
    reporter, listener = model_router("grouper-1"), model_router("grouper-2")
    first = sent_to(reporter, long_request(1))
    listener.adopt(reporter.shared_state(NOW, {}), NOW)
    for each in (reporter, listener):
        each.lose(first, NOW)
        each.shared_state(NOW + 2 * LEFT_MEMORY_S, {})
        listener.adopt(reporter.shared_state(NOW + 2 * LEFT_MEMORY_S, {}), NOW + 2 * LEFT_MEMORY_S)

    for each in (reporter, listener):
        known = each.router.backlog.snapshot()
        assert first not in known.loads
        assert all(first not in work for work in known.work.values())


def test_instance_that_returns_after_a_long_time_counts_in_all_routers():
    """All routers count the instance, even a router that did not notice its absence."""
    reporter, listener = model_router("grouper-1"), model_router("grouper-2")
    for number in range(5):
        request = long_request(number)
        reporter.on_prefill(sent_to(reporter, request), prefill_of(request), NOW)
    later = NOW + 2 * LEFT_MEMORY_S
    for at in (NOW, later):
        for each in (ONE, TWO):
            reporter.lose(each, NOW)
        listener.adopt(reporter.shared_state(at, {}), at)
    for each in (ONE, TWO):
        reporter.on_status(status(each, at=later), later)
    where = sent_to(reporter, long_request(9), later)
    listener.adopt(reporter.shared_state(later, {}), later)

    assert not listener.router.backlog.is_idle(where)
