"""Counts of waiting requests from totals, and their correction by audits."""

import pytest

from solver.planning.problem.queue_counts import (
    FIRST_RECOUNT_S,
    SETTLE_S,
    SILENT_S,
    Passage,
    QueueCounts,
    QueueTotal,
)

LANE = "lane"


def reported(counts: QueueCounts, source: str, now: float, **totals: int) -> None:
    counts.observe(source, {LANE: QueueTotal(**totals)} if totals else {}, now)


def started(*sources: str) -> QueueCounts:
    """Queue counts with the given sources, none of which has put or pulled a request."""
    counts = QueueCounts()
    for source in sources:
        reported(counts, source, 0.0)
    return counts


def audited(counts: QueueCounts, count: int | None, now: float) -> None:
    counts.counted(counts.begin_audit([LANE], now), {LANE: count}, now)


def test_put_minus_pulled_requests_wait():
    counts = started("grouper", "agent")
    reported(counts, "grouper", 1.0, put=7)
    reported(counts, "agent", 1.0, pulled=3)
    assert counts.waiting() == {LANE: 4}
    reported(counts, "agent", 2.0, pulled=4, put=2)
    assert counts.waiting() == {LANE: 5}


def test_a_request_of_an_earlier_passage_waits_until_as_many_have_left():
    counts = started("grouper", "agent")
    reported(counts, "grouper", 1.0, put=3)
    assert counts.passages() == {LANE: Passage(left=0, last=3)}
    reported(counts, "agent", 2.0, pulled=2)
    reported(counts, "grouper", 2.0, put=5)
    assert counts.passages() == {LANE: Passage(left=2, last=5)}


def test_pull_that_is_reported_before_its_put_does_not_count_as_negative():
    counts = started("grouper", "agent")
    reported(counts, "agent", 1.0, pulled=1)
    assert counts.waiting() == {LANE: 0}
    reported(counts, "grouper", 1.1, put=3)
    assert counts.waiting() == {LANE: 2}


def test_notice_counts_before_the_report_that_includes_it():
    counts = started("grouper")
    counts.put("grouper", LANE, 3, 1.0)
    assert counts.waiting() == {LANE: 3}
    reported(counts, "grouper", 1.1, put=2)
    reported(counts, "grouper", 2.0, put=4)
    assert counts.waiting() == {LANE: 4}


def test_pull_notice_counts_before_the_report_that_includes_it():
    counts = started("grouper", "agent")
    reported(counts, "grouper", 1.0, put=9)
    counts.pulled("agent", {LANE: 3}, 1.2)
    assert counts.waiting() == {LANE: 6}
    reported(counts, "agent", 1.1, pulled=2)
    reported(counts, "agent", 2.0, pulled=4)
    assert counts.waiting() == {LANE: 5}


def test_pull_notice_of_a_source_without_a_report_makes_the_queue_due():
    counts = started("grouper")
    counts.pulled("agent", {LANE: 3}, 1.0)
    assert (counts.waiting(), counts.due) == ({}, {LANE})


def test_first_report_is_a_baseline_and_needs_an_audit():
    counts = QueueCounts()
    reported(counts, "grouper", 0.0, put=100)
    assert (counts.waiting(), counts.due) == ({}, {LANE})
    audited(counts, 40, 0.0)
    assert (counts.waiting(), counts.due, counts.drift) == ({LANE: 40}, set(), 0)
    reported(counts, "grouper", 1.0, put=101)
    assert counts.waiting() == {LANE: 41}


def test_all_totals_of_a_source_that_starts_later_are_changes():
    """An agent that replaces a killed one pulls before its first report."""
    counts = QueueCounts(0.0)
    reported(counts, "grouper", 0.0)
    reported(counts, "grouper", SILENT_S + 1.0, put=9)
    reported(counts, "agent", SILENT_S + 1.0, pulled=7)
    assert (counts.waiting(), counts.due) == ({LANE: 2}, {LANE})


def test_first_report_of_a_lost_source_that_returns_is_a_baseline():
    counts = QueueCounts(0.0)
    reported(counts, "agent", 0.0)
    reported(counts, "agent", 1.0, put=9)
    counts.forget("agent")
    reported(counts, "agent", SILENT_S + 1.0, put=9)
    assert (counts.waiting(), counts.due) == ({LANE: 9}, {LANE})


def test_audit_of_a_quiet_queue_corrects_exactly():
    counts = started("grouper")
    reported(counts, "grouper", 1.0, put=5)
    audited(counts, 5, 2.0)
    reported(counts, "grouper", 3.0, put=5)
    assert (counts.waiting(), counts.drift) == ({LANE: 5}, 0)

    audited(counts, 4, 4.0)
    assert counts.waiting() == {LANE: 5}
    reported(counts, "grouper", 4.0 + SETTLE_S, put=5)
    assert (counts.waiting(), counts.drift) == ({LANE: 4}, 1)


@pytest.mark.parametrize("count", range(5, 16))
def test_audit_during_traffic_corrects_only_what_traffic_cannot_explain(count: int):
    counts = started("grouper")
    reported(counts, "grouper", 1.0, put=5)
    audited(counts, 5, 2.0)
    reported(counts, "grouper", 3.0, put=5)
    audited(counts, count, 4.0)
    reported(counts, "grouper", 4.0 + SETTLE_S, put=15)
    assert counts.drift == 0
    assert counts.waiting() == {LANE: 15}


def test_audit_waits_for_all_sources_that_still_report():
    counts = started("grouper", "silent", "agent")
    reported(counts, "grouper", 20.0, put=5)
    audited(counts, 5, 20.0)
    reported(counts, "agent", 20.0)
    audited(counts, 4, 20.5)
    reported(counts, "grouper", 21.5, put=5)
    assert counts.waiting() == {LANE: 5}
    reported(counts, "agent", 21.5)
    assert counts.waiting() == {LANE: 4}


def test_a_queue_of_a_lost_source_is_counted_until_an_audit_is_exact():
    """Three requests return from the lost agent; others move, so the first audit is inexact."""
    counts = started("grouper", "agent")
    reported(counts, "grouper", 1.0, put=10)
    reported(counts, "agent", 1.0, pulled=10)
    audited(counts, 0, 1.0)
    reported(counts, "grouper", 1.9, put=10)
    reported(counts, "agent", 1.9, pulled=10)
    counts.forget("agent")
    audit = counts.begin_audit([LANE], 2.0)
    reported(counts, "grouper", 2.2, put=20)
    counts.counted(audit, {LANE: 8}, 2.2)
    reported(counts, "grouper", 3.0, put=20)
    assert (counts.waiting(), counts.due) == ({LANE: 10}, set())

    reported(counts, "grouper", 3.0 + FIRST_RECOUNT_S, put=20)
    assert counts.due == {LANE}
    audited(counts, 13, 5.5)
    reported(counts, "grouper", 6.5, put=20)
    assert (counts.waiting(), counts.due, counts.drift) == ({LANE: 13}, set(), 3)
    reported(counts, "grouper", 60.0, put=20)
    assert counts.due == set()


def test_first_counts_during_traffic_are_corrected_when_the_traffic_has_ended():
    """The agent pulls 8 requests between the first count and its first report, a baseline."""
    counts = QueueCounts(0.0)
    reported(counts, "grouper", 0.0)
    reported(counts, "grouper", 0.9, put=20)
    audited(counts, 20, 1.0)
    reported(counts, "agent", 1.2, pulled=8)
    audited(counts, 12, 1.5)
    for at in (2.0, 3.0):
        reported(counts, "agent", at, pulled=20)
        reported(counts, "grouper", at, put=20)
    assert (counts.waiting(), counts.due) == ({LANE: 8}, set())  # no request waits

    reported(counts, "agent", 2.0 + FIRST_RECOUNT_S, pulled=20)
    assert counts.due == {LANE}
    audited(counts, 0, 4.1)
    for source in ("agent", "grouper"):
        counts.observe(source, {}, 4.1 + SETTLE_S)
    assert counts.waiting() == {LANE: 0}
    for source in ("agent", "grouper"):
        counts.observe(source, {}, 60.0)
    assert counts.due == set()


def test_queue_that_does_not_exist_is_dropped_unless_it_was_used_meanwhile():
    counts = started("grouper")
    reported(counts, "grouper", 1.0, put=1)
    audited(counts, None, 2.0)
    assert counts.queues == set()

    audit = counts.begin_audit([LANE], 3.0)
    counts.put("grouper", LANE, 2, 3.0)
    counts.counted(audit, {LANE: None}, 3.1)
    assert (counts.waiting(), counts.due) == ({LANE: 1}, {LANE})


def test_queues_of_a_lost_source_are_due():
    counts = started("grouper", "agent")
    reported(counts, "grouper", 1.0, put=3)
    reported(counts, "agent", 1.0, pulled=2)
    counts.forget("grouper")
    assert counts.due == set()
    counts.forget("agent")
    assert (counts.waiting(), counts.due) == ({LANE: 1}, {LANE})


def test_queue_is_idle_while_it_is_audited_empty_and_unused():
    counts = started("grouper", "agent")
    reported(counts, "grouper", 1.0, put=1)
    reported(counts, "agent", 2.0, pulled=1)
    assert counts.idle_since(LANE) is None
    audited(counts, 0, 3.0)
    assert counts.idle_since(LANE) == 2.0
    counts.noticed(LANE, 5.0)
    assert counts.idle_since(LANE) == 5.0
    reported(counts, "grouper", 6.0, put=2)
    assert counts.idle_since(LANE) is None
    assert counts.idle_since("another lane") is None


class TestUnserved:
    def test_time_counts_from_the_first_arrival_in_an_empty_queue(self):
        counts = started("grouper", "agent")
        reported(counts, "grouper", 10.0, put=1)
        reported(counts, "grouper", 14.0, put=3)
        assert counts.unserved_s(20.0) == {LANE: 10.0}

    def test_each_pull_begins_the_time_again(self):
        counts = started("grouper", "agent")
        reported(counts, "grouper", 10.0, put=3)
        reported(counts, "agent", 15.0, pulled=1)
        assert counts.unserved_s(20.0) == {LANE: 5.0}

    def test_queue_without_waiting_requests_has_no_time(self):
        counts = started("grouper", "agent")
        reported(counts, "grouper", 10.0, put=1)
        reported(counts, "agent", 15.0, pulled=1)
        assert counts.unserved_s(20.0) == {}
        reported(counts, "grouper", 30.0, put=2)
        assert counts.unserved_s(31.0) == {LANE: 1.0}

    def test_time_of_requests_that_waited_before_the_counts_begins_with_the_first_count(self):
        counts = QueueCounts()
        reported(counts, "grouper", 0.0, put=100)
        audited(counts, 40, 5.0)
        assert counts.unserved_s(6.0) == {LANE: 1.0}

    def test_time_does_not_begin_again_when_an_audit_corrects_the_count(self):
        counts = started("grouper")
        reported(counts, "grouper", 1.0, put=5)
        audited(counts, 5, 2.0)
        reported(counts, "grouper", 3.0, put=5)
        audited(counts, 4, 4.0)
        reported(counts, "grouper", 4.0 + SETTLE_S, put=5)
        assert counts.waiting() == {LANE: 4}
        assert counts.unserved_s(11.0) == {LANE: 10.0}
