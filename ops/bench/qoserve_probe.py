"""Simulations that stop once their result is certain, and simulations that record iterations."""

from collections.abc import Sequence
from dataclasses import dataclass

from ops.sim.engine import SimulatedReplica
from ops.sim.limits import EngineLimits
from ops.sim.policies import policy_factory
from ops.sim.request import SimRequest
from ops.sim.scenario import Scenario
from ops.sim.summary import violation_share
from shared.contracts.base import RequestId, Seconds, UnixTime
from solver.scheduling.engine.decision import SchedulingPolicy
from solver.scheduling.engine.latency import LatencyTable


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One recorded iteration of a simulated replica."""

    prefill_tokens: int
    tokens: int
    """Number of tokens computed in the iteration, decodes included."""
    duration_s: Seconds


def probed_share(scenario: Scenario, *, allowed: float) -> float:
    """
    Share of violations; exact up to *allowed*.

    The simulation ends as soon as certain violations exceed *allowed* times the number of requests;
    the result is then the share of violations among requests whose deadline has passed.

    Args:
        scenario: Scenario with round robin; scenarios with pulls are simulated to their end.
        allowed: Share of violations above which the result need not be exact.
    """
    if scenario.pull is not None or scenario.silo or scenario.drain:
        return violation_share(scenario.run().requests)
    requests = _requests(scenario)
    tally = _Tally(most=allowed * len(requests))
    try:
        for index in range(scenario.replicas):
            shard = requests[index :: scenario.replicas]
            # A replica ends when the last deadline has passed, as in `ops.sim.cluster`.
            _Probed(scenario, shard, tally).run(shard, until=_last_deadline_at(shard))
    except _DecidedError:
        return tally.missed / tally.judged
    return violation_share(requests)


def recorded(scenario: Scenario) -> list[Step]:
    """Simulate one replica; return every iteration computed while requests arrived."""
    requests = _requests(scenario)
    replica = _Recording(scenario)
    replica.run(requests, until=scenario.duration_s)
    return replica.steps


class _DecidedError(Exception):
    """The simulation has more violations than allowed, so it stops."""


class _Tally:
    """
    Counts requests whose deadlines have passed, over replicas that are simulated one after another.
    """

    def __init__(self, *, most: float) -> None:
        self._most = most
        self.missed = self.judged = 0

    def count(self, run: SimRequest) -> None:
        """Count the request *run*, whose deadline has passed."""
        self.judged += 1
        self.missed += run.violated
        if self.missed > self._most:
            raise _DecidedError


class _Probed(SimulatedReplica):
    """A simulated replica that reports each passed deadline to a tally."""

    def __init__(self, scenario: Scenario, shard: Sequence[SimRequest], tally: _Tally) -> None:
        super().__init__(*_parts(scenario))
        self._due = sorted(shard, key=lambda run: run.deadline_at, reverse=True)
        self._tally = tally

    def iterate(self, now: UnixTime) -> Seconds:
        due = self._due
        while due and due[-1].deadline_at < now:
            self._tally.count(due.pop())
        return super().iterate(now)


class _Recording(SimulatedReplica):
    """A simulated replica that records its iterations."""

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(*_parts(scenario))
        self.steps: list[Step] = []

    def iterate(self, now: UnixTime) -> Seconds:
        totals = self.totals
        tokens, prefill_tokens = totals.tokens, totals.prefill_tokens
        duration_s = super().iterate(now)
        if totals.tokens > tokens:
            step = Step(
                prefill_tokens=totals.prefill_tokens - prefill_tokens,
                tokens=totals.tokens - tokens,
                duration_s=duration_s,
            )
            self.steps.append(step)
        return duration_s


def _parts(scenario: Scenario) -> tuple[SchedulingPolicy, LatencyTable, EngineLimits]:
    profile = scenario.profile
    return policy_factory(scenario.policy)(profile.latency), profile.latency, scenario.limits


def _requests(scenario: Scenario) -> list[SimRequest]:
    return [
        SimRequest(RequestId(str(number)), arrival)
        for number, arrival in enumerate(scenario.workload())
    ]


def _last_deadline_at(shard: Sequence[SimRequest]) -> UnixTime | None:
    return max((r.deadline_at for r in shard if r.deadline_at != float("inf")), default=None)
