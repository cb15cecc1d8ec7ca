"""Counts from totals agree with the queue, whatever the order of reports, notices and audits."""

from collections import Counter
from enum import Enum

from hypothesis import given
from hypothesis import strategies as st

from solver.planning.problem.queue_counts import SETTLE_S, SILENT_S, Audit, QueueCounts, QueueTotal

LANE = "lane"
SOURCES = ("grouper", "agent one", "agent two")


class Step(Enum):
    PUT = "put"
    PULL = "pull"
    REPORT = "report"
    PUT_NOTICE = "put notice"
    PULL_NOTICE = "pull notice"
    COUNT = "count"
    TAKE_IN = "take in"


steps = st.lists(
    st.tuples(st.sampled_from(Step), st.sampled_from(SOURCES), st.floats(0.0, 2.0)), max_size=60
)


class World:
    """
    A queue with its sources, and a leader's counts of it.

    Args:
        known: Sources that report before they use the queue.
    """

    def __init__(self, known: tuple[str, ...] = SOURCES) -> None:
        self.ready = 0
        self.put: Counter[str] = Counter()
        self.pulled: Counter[str] = Counter()
        self.now = 0.0
        self.counts = QueueCounts(self.now)
        self.pending: tuple[Audit, int] | None = None
        for source in known:
            self.report(source)

    def report(self, source: str) -> None:
        total = QueueTotal(self.put[source], self.pulled[source])
        self.counts.observe(source, {LANE: total} if total != QueueTotal() else {}, self.now)

    def take(self, step: Step, source: str) -> None:
        match step:
            case Step.PUT:
                self.ready += 1
                self.put[source] += 1
            case Step.PULL if self.ready:
                self.ready -= 1
                self.pulled[source] += 1
            case Step.REPORT:
                self.report(source)
            case Step.PUT_NOTICE if self.put[source]:
                self.counts.put(source, LANE, self.put[source], self.now)
            case Step.PULL_NOTICE if self.pulled[source]:
                self.counts.pulled(source, {LANE: self.pulled[source]}, self.now)
            case Step.COUNT if self.pending is None:
                self.pending = self.counts.begin_audit([LANE], self.now), self.ready
            case Step.TAKE_IN if self.pending is not None:
                audit, count = self.pending
                self.pending = None
                self.counts.counted(audit, {LANE: count}, self.now)

    def run(self, taken: list[tuple[Step, str, float]]) -> None:
        for step, source, after_s in taken:
            self.now += after_s
            self.take(step, source)

    def all_report(self) -> None:
        self.now += 2 * SETTLE_S
        for source in SOURCES:
            self.report(source)

    def quiet_audit(self) -> None:
        audit = self.counts.begin_audit([LANE], self.now)
        self.counts.counted(audit, {LANE: self.ready}, self.now)
        self.all_report()

    def wait(self, seconds: int) -> None:
        """Let time pass in which the leader counts the queue whenever it is due."""
        for _ in range(seconds):
            if LANE in self.counts.due:
                self.quiet_audit()
            self.all_report()

    @property
    def waiting(self) -> int:
        return self.counts.waiting().get(LANE, 0)


@given(steps)
def test_counts_are_right_once_all_sources_have_reported(taken: list[tuple[Step, str, float]]):
    world = World()
    world.run([each for each in taken if each[0] not in (Step.COUNT, Step.TAKE_IN)])
    world.all_report()
    assert world.waiting == world.ready


@given(steps, st.integers(-20, 20), steps)
def test_two_audits_without_traffic_correct_any_wrong_count(
    before: list[tuple[Step, str, float]],
    fault: int,
    after: list[tuple[Step, str, float]],
):
    world = World()
    world.run(before)
    # e.g. requests were redelivered, or an operator dropped them
    world.ready = max(0, world.ready + fault)
    world.run(after)
    world.all_report()
    for _ in range(2):
        world.quiet_audit()
    assert world.waiting == world.ready


@given(steps)
def test_counts_are_right_soon_after_traffic_that_began_before_the_first_reports(
    taken: list[tuple[Step, str, float]],
):
    world = World(known=())
    world.run(taken)
    world.take(Step.TAKE_IN, "")
    world.wait(10)
    assert world.waiting == world.ready


def test_operations_of_a_source_that_was_silent_during_an_audit_are_counted_once():
    world = World(known=("agent one",))
    world.now += SILENT_S
    world.take(Step.PUT, "agent one")
    world.report("grouper")
    world.take(Step.COUNT, "")
    world.take(Step.TAKE_IN, "")
    world.now += 2 * SETTLE_S
    world.report("grouper")  # ends the audit without the silent source
    world.report("agent one")
    assert LANE in world.counts.due
    world.wait(10)
    assert world.waiting == world.ready == 1


def test_audit_from_before_a_doubt_does_not_end_it():
    world = World(known=())
    world.take(Step.COUNT, "")
    world.take(Step.TAKE_IN, "")
    world.take(Step.PUT, "grouper")
    world.now += 2 * SETTLE_S
    world.report("grouper")  # settles the audit, and is the first report of the source
    world.take(Step.PUT, "grouper")
    world.wait(10)
    assert world.waiting == world.ready == 2


@given(steps)
def test_idle_queues_are_empty(taken: list[tuple[Step, str, float]]):
    world = World()
    world.run(taken)
    world.all_report()
    for _ in range(2):
        world.quiet_audit()
    assert world.counts.idle_since(LANE) is None or world.ready == 0
