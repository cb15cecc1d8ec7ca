"""
Totals of an instance's situation, which fit into a message, and a typical situation with given
totals.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

from shared.contracts.base import RequestId
from shared.contracts.estimates import LatencyCoefficients
from shared.contracts.situations import LsoFacts, RunningFacts
from shared.contracts.telemetry import InstanceStatus
from solver.planning.lso.evict_or_swap import KvCosts
from solver.planning.lso.situation import Demand, RunningWork, Situation, SwappedWork, WarmSet
from solver.planning.problem.grouping import RequestGroup


def facts_of(situation: Situation) -> LsoFacts:
    """Totals of *situation* by lane, without the data that a status contains anyway."""
    return LsoFacts(
        running=_running_facts(situation.running),
        swapped=len(situation.swapped),
        swapped_tokens=sum(work.needed_tokens for work in situation.swapped),
        resting=sum(not work.rested for work in situation.swapped),
        demand_tokens=situation.demand.tokens,
        demand_slots=situation.demand.slots,
        free_tokens=situation.free_tokens,
        free_slots=situation.free_slots,
        kv_bytes_per_token=situation.costs.bytes_per_token,
        transfer_bytes_per_s=situation.costs.transfer_bytes_per_s,
        host_checkpoints=situation.costs.host_checkpoints,
        host_kv_free_bytes=situation.host_kv_free_bytes,
        warm_budget_bytes=situation.warm_set.budget_bytes,
        drain_limit_s=situation.drain_limit_s,
        return_s=situation.return_s,
        pull_room=situation.pull_room,
        resumes=situation.resumes,
    )


def typical_situation(
    status: InstanceStatus,
    *,
    latency: LatencyCoefficients | None,
    coming: Sequence[RequestGroup] = (),
) -> Situation:
    """
    Typical situation of the instance of *status*, from the published totals.

    Args:
        status: The last status received.
        latency: Coefficients of an iteration of the active model; none when not measured.
        coming: Groups from which the instance will pull next, in order.

    Decided: one typical request represents all running requests of its lane, with their mean
    context, room, time left and slack. Counts and costs are approximate; the preview does not
    predict which request is chosen.
    Decided: requests of *coming* with deadlines count as waiting in the window, up to its room.
    Agents make room for these requests one by one when they come.
    """
    facts = status.lso or _unknown(status)
    return Situation(
        active=status.model,
        costs=KvCosts(
            latency=latency,
            bytes_per_token=facts.kv_bytes_per_token,
            transfer_bytes_per_s=facts.transfer_bytes_per_s or math.inf,
            host_checkpoints=facts.host_checkpoints,
        ),
        running=tuple(work for lane in facts.running for work in _typical(lane)),
        swapped=tuple(_swapped(facts)),
        demand=_demand(facts, coming),
        free_tokens=facts.free_tokens,
        free_slots=facts.free_slots,
        host_kv_free_bytes=facts.host_kv_free_bytes,
        warm_set=WarmSet(
            residency={entry.model: entry.residency for entry in status.models},
            num_bytes={entry.model: entry.warm_bytes for entry in status.models},
            budget_bytes=facts.warm_budget_bytes,
        ),
        activate_s={entry.model: entry.activate_s for entry in status.models},
        drain_limit_s=facts.drain_limit_s,
        return_s=facts.return_s,
        pull_room=facts.pull_room,
        resumes=facts.resumes,
    )


def _running_facts(running: Iterable[RunningWork]) -> tuple[RunningFacts, ...]:
    def lane(work: RunningWork) -> tuple[str, bool]:
        return work.lane, work.gives_way

    facts = []
    for (name, gives_way), members in groupby(sorted(running, key=lane), key=lane):
        works = list(members)
        known = [work.remaining_s for work in works if work.remaining_s is not None]
        slack_s = sum(work.slack_s for work in works)
        facts.append(
            RunningFacts(
                lane=name,
                requests=len(works),
                context_tokens=sum(work.context_tokens for work in works),
                held_tokens=sum(work.held_tokens for work in works),
                gives_way=gives_way,
                remaining_s=sum(known) if len(known) == len(works) else None,
                slack_s=slack_s if math.isfinite(slack_s) else None,
            )
        )
    return tuple(facts)


def _unknown(status: InstanceStatus) -> LsoFacts:
    """Totals for an agent that publishes only the number of running requests."""
    running = (RunningFacts(lane="", requests=status.running),) if status.running else ()
    return LsoFacts(running=running, swapped=status.swapped_out)


def _typical(facts: RunningFacts) -> Iterator[RunningWork]:
    for number in range(facts.requests):
        yield RunningWork(
            request_id=RequestId(f"{facts.lane}#{number}{'~' * facts.gives_way}"),
            lane=facts.lane,
            context_tokens=round(facts.context_tokens / facts.requests),
            held_tokens=round(facts.held_tokens / facts.requests),
            gives_way=facts.gives_way,
            remaining_s=None if facts.remaining_s is None else facts.remaining_s / facts.requests,
            slack_s=math.inf if facts.slack_s is None else facts.slack_s / facts.requests,
        )


def _swapped(facts: LsoFacts) -> Iterator[SwappedWork]:
    for number in range(facts.swapped):
        yield SwappedWork(
            request_id=RequestId(f"#{number}"),
            needed_tokens=round(facts.swapped_tokens / facts.swapped),
            rested=number >= facts.resting,
        )


def _demand(facts: LsoFacts, coming: Sequence[RequestGroup]) -> Demand:
    tokens, room = 0.0, facts.pull_room
    for group in coming:
        if math.isfinite(group.oldest_deadline_at):
            pulled = min(room, group.num_requests)
            tokens += pulled * (group.prompt_tokens.mean + group.output_tokens.mean)
            room -= pulled
    return Demand(
        tokens=facts.demand_tokens + round(tokens),
        slots=facts.demand_slots + facts.pull_room - room,
    )
