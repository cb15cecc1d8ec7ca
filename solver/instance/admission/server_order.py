"""
Order of work at engines that compute it in the order of its arrival, or by one number.

Such an engine, a server that others run, neither preempts a prefill nor chooses its chunks by the
slack of the answers, and gives a slot away for a whole answer. So urgent work begins at once, and
work that can wait begins where it delays no urgent one: in slots that urgent arrivals will not
need, and behind a short prefill only.
"""

import math
from collections.abc import Iterator

from shared.contracts.base import Seconds, UnixTime
from shared.contracts.qos import QosClass
from solver.instance import end
from solver.instance.commands import Command
from solver.instance.load import (
    decode_s,
    is_crowded,
    is_late,
    num_free,
    prefill_pace,
    unimportant_delay_s,
)
from solver.instance.request import Held
from solver.instance.state import InstanceState
from solver.scheduling.engine.entry import Rank
from solver.scheduling.keys import FAR_S

_PATIENT_S: Seconds = 10.0
"""Time to a deadline from which work can wait, if it is also `_PATIENT_STAYS` answers away."""
_PATIENT_STAYS = 1.5
"""Multiple of the usual time of a run, by which work that can wait must precede its deadline."""
_PREFILL_SHARE = 0.05
"""
Prefill that may be at a server when work that can wait begins, as a share of the usual target for
first tokens.
"""
_RESERVED = 0.5
"""Slots that stay free for urgent arrivals, per square root of the urgent requests that run."""
_LEAST_URGENT = 0.1
"""Mean number of urgent requests from which slots are reserved."""


def patience_s(instance: InstanceState) -> Seconds:
    """Time to a deadline from which work in a queue yields to urgent work."""
    if not instance.orders_prefills:
        return FAR_S
    return min(FAR_S, max(_PATIENT_S, _PATIENT_STAYS * instance.urgent.stay_s))


def patience_s_per_token(instance: InstanceState) -> Seconds:
    """Time to a deadline from which work in a queue yields, per token of the work."""
    pace_s = instance.engine.pace_s
    return _PATIENT_STAYS * pace_s if pace_s < math.inf else 0.0


def is_patient(instance: InstanceState, held: Held, now: UnixTime) -> bool:
    """True if *held* yields to urgent work at a server that does not order it."""
    request = held.request
    if held.rank is not Rank.REGULAR:
        return now < request.arrived_at + instance.settings.aging_bound_s
    if request.slo.qos_class is QosClass.INTERACTIVE or not instance.urgent.stay_s:
        return request.deadline_at - now > patience_s(instance)
    own_s = instance.room.prefill_s_of(held) + decode_s(instance, held, now)
    return request.deadline_at - now > _PATIENT_STAYS * max(instance.urgent.stay_s, own_s)


def num_reserved(instance: InstanceState, now: UnixTime) -> int:
    """
    Slots that work that can wait leaves free.

    The number of urgent requests varies by about the square root of its mean, as that of Poisson
    arrivals does; the servers of a model share the variation.
    """
    mean = instance.urgent.mean_running(now, instance.room.num_interactive)
    if mean < _LEAST_URGENT or math.isinf(instance.urgent.target_s(now)):
        return 0
    return min(instance.engine.max_running - 1, math.ceil(_RESERVED * math.sqrt(mean)))


def has_patient_room(instance: InstanceState, now: UnixTime, *, taken: int = 0) -> bool:
    """
    True if one more request that can wait may begin.

    Args:
        instance: An instance whose engine does not order prefills.
        now: Unix seconds.
        taken: Free slots that are already counted as taken by this request.
    """
    free = num_free(instance) + taken
    if free <= 0:
        return free + instance.engine.spare_running > 0
    if instance.holding.passes:
        return True
    if free <= num_reserved(instance, now):
        return False
    target_s = instance.urgent.target_s(now)
    if math.isinf(target_s):
        return True
    return prefill_pace(instance) * instance.room.prefilling_s <= _PREFILL_SHARE * target_s


def relegate_late(instance: InstanceState, now: UnixTime) -> Iterator[Command]:
    """Relegate interactive requests that became late while they waited for a slot."""
    if not instance.orders_prefills:
        return
    delay_s = unimportant_delay_s(instance, now)
    while (head := instance.requests.head(now, unimportant_delay_s=delay_s)) is not None:
        if not _is_interactive(head) or not is_late(instance, head, now):
            return
        yield from end.relegate(instance, head)


def waits_for_urgent(instance: InstanceState, held: Held, now: UnixTime) -> bool:
    """True if *held* should wait, because it would delay more urgent work."""
    if not instance.orders_prefills or instance.holding.passes:
        return False
    if is_patient(instance, held, now):
        return not has_patient_room(instance, now, taken=1) or _num_delayed(instance, held, now) > 0
    if is_crowded(instance, now):
        return True
    return _is_interactive(held) and _num_delayed(instance, held, now) > 1


def _num_delayed(instance: InstanceState, held: Held, now: UnixTime) -> int:
    """
    Number of interactive answers whose next token the prefill of *held* would make late.

    Differs: QoServe §3.3 chooses the tokens of each chunk by the slack of the answers. A server
    chooses its chunks itself: in its longest iteration of late, each answer has one token.
    """
    prefill_s = instance.room.prefilling_s + instance.room.prefill_s_of(held)
    prefill_s *= prefill_pace(instance)
    gap_s = min(prefill_s, instance.engine.longest_gap_s)
    num_more = prefill_s / gap_s - 1 if gap_s > 0 else 0.0
    num_delayed = 0
    for run in instance.requests.runs:
        if not _is_interactive(run) or run.run is None or not run.run.begun:
            continue
        request, pace_s = run.request, run.request.slo.tbt_s or 0.0
        num_tokens = instance.requests.generated(run) // request.num_answers
        slack_s = request.slo.token_deadline_at(request.arrived_at, num_tokens + 1) - now
        delay_s = gap_s + max(0.0, gap_s - pace_s) * num_more
        num_delayed += 0 <= slack_s < delay_s
    return num_delayed


def _is_interactive(held: Held) -> bool:
    """True if a request has a target for its first token that it may still meet."""
    return held.rank is Rank.REGULAR and held.request.slo.qos_class is QosClass.INTERACTIVE
