"""Fixed-chunk scheduling: the order of waiting requests."""

from hypothesis import given
from hypothesis import strategies as st

from shared.contracts.base import RequestId
from shared.contracts.qos import Slo
from shared.contracts.telemetry import Iteration
from solver.scheduling.baselines import FixedChunk, FixedChunkEdf, FixedChunkFcfs
from solver.scheduling.engine.decision import BatchState, IterationOutcome, RequestView

BATCH = BatchState(
    running=(), num_waiting=0, max_running=8, max_budget_tokens=256, free_kv_tokens=4096
)
ITERATION = Iteration(compute_tokens=1, context_tokens=0, num_decodes=0, duration_s=0.01)


def view(name: str, *, arrived_at: float = 0.0, slo: Slo | None = None) -> RequestView:
    return RequestView(
        request_id=RequestId(name),
        arrived_at=arrived_at,
        prompt_tokens=10,
        max_tokens=10,
        slo=slo or Slo(),
    )


def order(policy: FixedChunk) -> list[str]:
    return list(policy.decide(0.0, BATCH).order)


def outcome(*, admitted: tuple[str, ...] = (), preempted: tuple[str, ...] = ()) -> IterationOutcome:
    return IterationOutcome(
        iteration=ITERATION,
        admitted=tuple(map(RequestId, admitted)),
        preempted=tuple(map(RequestId, preempted)),
    )


def test_requests_are_served_in_order_of_arrival() -> None:
    policy = FixedChunkFcfs(64)
    for name, arrived_at in (("late", 2.0), ("early", 1.0), ("late too", 2.0)):
        policy.add(view(name, arrived_at=arrived_at))

    assert order(policy) == ["early", "late", "late too"]


def test_edf_serves_the_earliest_deadline_first_and_best_effort_last() -> None:
    policy = FixedChunkEdf(64)
    policy.add(view("best effort", arrived_at=0.0))
    policy.add(view("batch", arrived_at=1.0, slo=Slo(ttlt_s=100)))
    policy.add(view("chat", arrived_at=2.0, slo=Slo(ttft_s=1, ttlt_s=500)))
    policy.add(view("best effort, later", arrived_at=3.0))

    assert order(policy) == ["chat", "batch", "best effort", "best effort, later"]


def test_a_preempted_request_gets_its_old_place_back() -> None:
    policy = FixedChunkFcfs(64)
    for name in "abc":
        policy.add(view(name))
    policy.observe(0.0, outcome(admitted=("a", "b")))
    assert order(policy) == ["c"]
    policy.observe(0.0, outcome(preempted=("b",)))

    assert order(policy) == ["b", "c"]


def test_removed_requests_are_forgotten_in_any_state() -> None:
    policy = FixedChunkFcfs(64)
    for name in "abc":
        policy.add(view(name))
    policy.observe(0.0, outcome(admitted=("a",)))
    for name in ("a", "b", "unknown"):
        policy.remove(RequestId(name))

    assert order(policy) == ["c"]


def test_the_budget_is_fixed_within_the_engines_limit() -> None:
    assert FixedChunkFcfs(64).decide(0.0, BATCH).token_budget == 64
    assert FixedChunkFcfs(1024).decide(0.0, BATCH).token_budget == 256


@given(st.lists(st.sampled_from(["add", "admit", "preempt", "remove"]), max_size=60), st.data())
def test_the_order_is_always_the_waiting_requests_sorted_by_key(
    steps: list[str], data: st.DataObject
) -> None:
    policy = FixedChunkEdf(64)
    waiting: dict[str, tuple[float, float, int]] = {}
    running: dict[str, tuple[float, float, int]] = {}
    for number, step in enumerate(steps):
        if step == "add":
            ttlt_s = data.draw(st.sampled_from([1.0, 2.0, 3.0]))
            arrived_at = data.draw(st.sampled_from([0.0, 1.0]))
            policy.add(view(f"r{number}", arrived_at=arrived_at, slo=Slo(ttlt_s=ttlt_s)))
            waiting[f"r{number}"] = (arrived_at + ttlt_s, arrived_at, number)
        elif step == "admit" and waiting:
            name = min(waiting, key=lambda each: waiting[each])
            running[name] = waiting.pop(name)
            policy.observe(0.0, outcome(admitted=(name,)))
        elif step == "preempt" and running:
            name = data.draw(st.sampled_from(sorted(running)))
            waiting[name] = running.pop(name)
            policy.observe(0.0, outcome(preempted=(name,)))
        elif step == "remove" and waiting | running:
            name = data.draw(st.sampled_from(sorted(waiting | running)))
            waiting.pop(name, None)
            running.pop(name, None)
            policy.remove(RequestId(name))

        assert order(policy) == sorted(waiting, key=lambda each: waiting[each])
