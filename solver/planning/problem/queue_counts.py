"""Number of waiting requests of each queue, from totals that are corrected by audits."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from shared.contracts.base import Seconds, UnixTime

SETTLE_S = 0.5
"""Time after a count until each report includes all operations from before the count."""
FIRST_RECOUNT_S, MOST_RECOUNT_S = 2.0, 30.0
"""
Time from an audit to the next count of a queue whose number is in doubt; it doubles each time,
up to the second value. A queue without traffic for the first value is counted at once.
"""
SILENT_S = 10.0
"""
Age of a source's last report from which an audit does not wait for another report of the source.
"""


@dataclass(frozen=True, slots=True)
class QueueTotal:
    """Requests that one source has put into and pulled from one queue since the source started."""

    put: int = 0
    pulled: int = 0


@dataclass(frozen=True, slots=True)
class Passage:
    """Requests of one queue, numbered in the order in which they leave it."""

    left: int
    """Requests that have left the queue so far."""
    last: int
    """Number of the last request that waits; equal to `left` if none waits."""


@dataclass(slots=True)
class _Queue:
    expected: int = 0
    pulled: int = 0
    """Number of requests that all sources have pulled from the queue."""
    moved: int = 0
    """Number of requests that the source has put into and pulled from the queue."""
    changed_at: UnixTime = 0.0
    audited: bool = False
    doubt_s: float = 0.0
    """
    Time from the next inexact audit to a recount; 0 if nothing is known that could falsify the
    number.
    """
    unserved_since: UnixTime = 0.0
    """Time of the last pull, or of the first arrival in the empty queue if that is later."""

    def expect(self, change: int, now: UnixTime) -> None:
        """Add *change* to the expected number of requests."""
        if self.expected <= 0:
            self.unserved_since = now
        self.expected += change


@dataclass(slots=True)
class _Source:
    totals: dict[str, QueueTotal]
    at: UnixTime


@dataclass(slots=True)
class Audit:
    """
    Counts of queues by the broker.

    When every source has sent a report that includes its operations before the counts, the counts
    correct the expected numbers.
    """

    began_at: UnixTime
    before: dict[str, tuple[int, int]]
    """Queue -> expected and moved requests before the queue was counted."""
    counted: dict[str, int] = field(default_factory=dict)
    at: UnixTime = math.inf
    """Time at which the queues of the audit were counted."""


class QueueCounts:
    """
    Waiting requests of each queue that exists, without counting the queues.

    Every process that publishes to queues or pulls from them is a source. A source reports monotone
    totals, so that lost reports are harmless. The expected number of waiting requests is the sum of
    all changes of these totals. The first totals of a source that existed before these counts are a
    baseline, since it is unknown how much of them earlier counts include. A source that is first
    seen later than `SILENT_S` after the begin is new, so all of its totals are changes. In both
    cases its queues are `due` for an audit, and their numbers in doubt.

    An audit is a real count. Operations of sources continue meanwhile: *u* requests that move
    between the reports before and after the count make the expectation at the time of the count
    uncertain by u / 2. A larger difference is drift and is corrected; a queue without traffic is
    corrected exactly. A number in doubt, also that of a queue from which a lost source pulled, is
    counted again at growing intervals, and when the queue has no more traffic, until an audit is
    exact.

    Args:
        began_at: Time from which all reports and notices are processed here.
    """

    def __init__(self, began_at: UnixTime = math.inf) -> None:
        self._began_at = began_at
        self.due: set[str] = set()
        """Queues that need an audit, i.e. a real count."""
        self.drift: int = 0
        """Sum of the absolute corrections by audits, in requests; first counts are left out."""
        self.audits: int = 0
        self.num_removed: int = 0
        """Number of queues that were deleted."""
        self._queues: dict[str, _Queue] = {}
        self._sources: dict[str, _Source] = {}
        self._forgotten: set[str] = set()
        """Names of lost sources, which may return."""
        self._recounts: dict[str, UnixTime] = {}
        """Queue in doubt -> time of its next count."""
        self._audits: list[Audit] = []
        """Audits that wait for reports; no two audits contain the same queue."""

    @property
    def queues(self) -> frozenset[str]:
        """Queues that exist."""
        return frozenset(self._queues)

    def waiting(self) -> dict[str, int]:
        """Requests that wait in each queue that exists."""
        return {name: max(0, queue.expected) for name, queue in self._queues.items()}

    def passages(self) -> dict[str, Passage]:
        """Requests that have left each queue that exists, and that wait there."""
        return {
            name: Passage(queue.pulled, queue.pulled + max(0, queue.expected))
            for name, queue in self._queues.items()
        }

    def unserved_s(self, now: UnixTime) -> dict[str, Seconds]:
        """
        Time for which requests have waited in each queue with waiting requests, and none has left.

        The time counts at most from the begin of these counts.
        """
        return {
            name: max(0.0, now - queue.unserved_since)
            for name, queue in self._queues.items()
            if queue.expected > 0
        }

    def idle_since(self, queue: str) -> UnixTime | None:
        """
        Time since which *queue* has been empty and unused; None if requests wait or a count is in
        progress.
        """
        known = self._queues.get(queue)
        if known is None or known.expected > 0 or not known.audited or queue in self.due:
            return None
        return known.changed_at

    def observe(self, source: str, totals: Mapping[str, QueueTotal], now: UnixTime) -> None:
        """
        Process a report of *source*; newer notices of *source* may have arrived before the report.
        """
        known = self._sources.get(source)
        if known is None:
            is_new = now - self._began_at > SILENT_S and source not in self._forgotten
            known = _Source({} if is_new else dict(totals), now)
            self._sources[source] = known
            for queue in totals:
                self._doubt(queue)
        for queue, total in totals.items():
            self._change(known, queue, total, now)
        known.at = now
        self._settle(now)

    def put(self, source: str, queue: str, total: int, now: UnixTime) -> None:
        """
        Process a notice that *source* has put *total* requests into *queue* so far.

        Notices of a source without a report only make the queue due.
        """
        self.noticed(queue, now)
        known = self._sources.get(source)
        if known is None:
            self._doubt(queue)
        else:
            self._change(known, queue, QueueTotal(put=total), now)

    def pulled(self, source: str, totals: Mapping[str, int], now: UnixTime) -> None:
        """
        Process a notice that *source* has pulled *totals* requests from each queue so far.

        Notices of a source without a report only make the queues due.
        """
        known = self._sources.get(source)
        if known is None:
            for queue in totals:
                self._doubt(queue)
            return
        for queue, total in totals.items():
            self._change(known, queue, QueueTotal(pulled=total), now)

    def noticed(self, queue: str, now: UnixTime) -> None:
        """Record that *queue* exists and is in use."""
        self._queues.setdefault(queue, _Queue()).changed_at = now

    def suspect(self, source: str) -> None:
        """
        Doubt the numbers of the queues from which *source* pulled, as unsettled requests may have
        returned.
        """
        if (known := self._sources.get(source)) is None:
            return
        for name in (name for name, total in known.totals.items() if total.pulled):
            self._doubt(name)

    def forget(self, source: str) -> None:
        """Drop a lost source; the numbers that it reported stay in the counts."""
        self.suspect(source)
        if self._sources.pop(source, None) is not None:
            self._forgotten.add(source)

    def removed(self, queue: str) -> None:
        """Record that *queue* was deleted."""
        self.num_removed += self._queues.pop(queue, None) is not None
        self.due.discard(queue)

    def begin_audit(self, queues: Iterable[str], now: UnixTime) -> Audit:
        """
        Start an audit of *queues* before they are counted; the audit replaces earlier audits of
        these queues.
        """
        before = {
            name: (queue.expected, queue.moved) if (queue := self._queues.get(name)) else (0, 0)
            for name in queues
        }
        audit = Audit(now, before)
        for earlier in self._audits:
            for name in before:
                earlier.before.pop(name, None)
                earlier.counted.pop(name, None)
        self._audits = [each for each in self._audits if each.counted]
        self.due -= before.keys()
        return audit

    def counted(self, audit: Audit, counts: Mapping[str, int | None], now: UnixTime) -> None:
        """
        Process the counts of *audit*; the count None is a queue that does not exist.

        A first count of a queue is used as it is; the end of the audit, or the next audit, corrects
        it.
        """
        self.audits += 1
        audit.at = now
        self._audits.append(audit)
        for name, count in counts.items():
            expected, moved = audit.before[name]
            known = self._queues.get(name)
            if count is None:
                if known is not None and known.changed_at >= audit.began_at:
                    self.due.add(name)  # the queue was created after the broker was queried
                else:
                    self._queues.pop(name, None)
                continue
            queue = self._queues.setdefault(name, _Queue(changed_at=now))
            if not queue.audited:
                queue.audited, queue.doubt_s = True, FIRST_RECOUNT_S
                queue.expect(count - expected, now)
                audit.before[name] = (count, moved)
            if name not in self.due:  # else its number came in doubt after the begin of the audit
                audit.counted[name] = count
        self._settle(now)

    def _doubt(self, name: str) -> None:
        """
        Make a queue due, and if it is known, count it again until an audit is exact. Audits from
        before do not correct it.
        """
        self.due.add(name)
        for audit in self._audits:
            audit.counted.pop(name, None)
        if (queue := self._queues.get(name)) is not None:
            queue.doubt_s = FIRST_RECOUNT_S

    def _change(self, source: _Source, queue: str, total: QueueTotal, now: UnixTime) -> None:
        before = source.totals.get(queue, QueueTotal())
        put, pulled = max(0, total.put - before.put), max(0, total.pulled - before.pulled)
        if not put and not pulled:
            return
        source.totals[queue] = QueueTotal(before.put + put, before.pulled + pulled)
        known = self._queues.setdefault(queue, _Queue())
        known.expect(put - pulled, now)
        if pulled:
            known.unserved_since = now
        known.moved += put + pulled
        known.pulled += pulled
        known.changed_at = now
        if source.at <= now - SILENT_S:
            # Audits have not waited for this source, so their counts may include its operations.
            self._doubt(queue)

    def _settle(self, now: UnixTime) -> None:
        """Finish the audits for which every active source has sent a report after the counts."""
        reported_at = min(
            (source.at for source in self._sources.values() if source.at > now - SILENT_S),
            default=now,
        )
        settled = [audit for audit in self._audits if reported_at >= audit.at + SETTLE_S]
        self._audits = [audit for audit in self._audits if audit not in settled]
        for audit in settled:
            self._correct(audit, now)
        for name in [name for name, at in self._recounts.items() if self._is_due(name, at, now)]:
            del self._recounts[name]
            if name in self._queues:
                self.due.add(name)

    def _is_due(self, name: str, recount_at: UnixTime, now: UnixTime) -> bool:
        """True if the time of a queue's next count has come, or its traffic has ended."""
        known = self._queues.get(name)
        quiet_at = math.inf if known is None else known.changed_at + FIRST_RECOUNT_S
        return min(recount_at, quiet_at) <= now

    def _correct(self, audit: Audit, now: UnixTime) -> None:
        for name, count in audit.counted.items():
            if (queue := self._queues.get(name)) is None:
                continue
            expected, moved = audit.before[name]
            difference = count - (expected + queue.expected) / 2
            if abs(difference) > (queue.moved - moved) / 2:
                correction = round(difference)
                queue.expect(correction, now)
                self.drift += abs(correction)
            if queue.moved == moved:
                queue.doubt_s = 0.0
                self._recounts.pop(name, None)
            elif queue.doubt_s:
                self._recounts[name] = now + queue.doubt_s
                queue.doubt_s = min(MOST_RECOUNT_S, 2 * queue.doubt_s)
