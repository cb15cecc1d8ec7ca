"""
Order of prefills at engines that compute them in the order of their arrival.

Such an engine, a server of others, neither preempts a prefill nor chooses its chunks by the slack
of the answers. So what would delay more urgent work waits here, or in its queue.
"""

from collections.abc import Iterator

from shared.contracts.base import Seconds, UnixTime
from shared.contracts.lanes import relegated_name
from shared.contracts.qos import QosClass
from solver.instance import end
from solver.instance.commands import Command
from solver.instance.load import decode_s, is_late, prefill_pace, unimportant_delay_s
from solver.instance.request import Held
from solver.instance.state import InstanceState
from solver.scheduling.engine.entry import Rank

_LEFT_S: Seconds = 0.5
"""Time for which no relegated request is pulled after one had to wait for answers."""


def leaves_to_others(instance: InstanceState) -> bool:
    """
    True if regular requests stay in their queues, since an interactive one would have to wait here.

    A server that does not order prefills computes those that it has to their ends. Another instance
    may begin an interactive request meanwhile, as long as none has pulled it. Best-effort work is
    pulled in any case, so that it begins as soon as the prefills have ended.
    """
    if not instance.orders_prefills:
        return False
    return instance.is_crowded or instance.requests.has_interactive_waiting


def relegate_late(instance: InstanceState, now: UnixTime) -> Iterator[Command]:
    """Relegate interactive requests that became late while they waited for answers of others."""
    if not instance.orders_prefills:
        return
    delay_s = unimportant_delay_s(instance, now)
    while (head := instance.requests.head(now, unimportant_delay_s=delay_s)) is not None:
        if not _is_interactive(head) or not is_late(instance, head, now):
            return
        yield from end.relegate(instance, head)


def is_paced(instance: InstanceState, held: Held) -> bool:
    """
    True if the engine gets no more prefill than it should have at once.

    An engine that orders prefills by arrival makes an urgent request wait for all of them; what
    waits must wait here, in the order of the window.
    """
    prefilling_s = instance.room.prefilling_s
    if not prefilling_s or not instance.orders_prefills:
        return True
    total_s = prefilling_s + instance.room.prefill_s_of(held)
    return total_s <= instance.settings.max_prefill_s


def delays_answers(instance: InstanceState, held: Held, now: UnixTime) -> bool:
    """
    True if the prefill of *held* should wait, because it would make interactive answers late.

    Work that has time waits for a single answer, an interactive request for two: it would be late
    itself.

    Differs: QoServe §3.3 chooses the tokens of each chunk by the slack of the answers. A server of
    others chooses its chunks itself, so the instance compares the slack with whole prefills.
    """
    if not instance.orders_prefills:
        return False
    if _has_time(instance, held, now):
        most_late = 0
    elif _is_interactive(held):
        most_late = 1
    else:
        return False
    total_s = instance.room.prefilling_s + instance.room.prefill_s_of(held)
    until = now + prefill_pace(instance) * total_s
    return sum(now <= each < until for each in _next_deadlines(instance)) > most_late


def leave_relegated(instance: InstanceState, head: Held, now: UnixTime) -> None:
    """Pull no more relegated requests while one waits, so that they do not fill the window."""
    if head.rank is Rank.RELEGATED:
        queue = relegated_name(head.request.model.base)
        instance.order.hold(queue, now + _LEFT_S)


def _has_time(instance: InstanceState, held: Held, now: UnixTime) -> bool:
    """True if *held* may begin after all other requests that the instance has pulled."""
    request = held.request
    if held.rank is not Rank.REGULAR:
        return now < request.arrived_at + instance.settings.aging_bound_s
    if request.slo.qos_class is QosClass.INTERACTIVE or instance.requests.has_interactive_waiting:
        return False  # a regular head must not stop an interactive request
    rest_s = instance.room.prefill_s() + decode_s(instance, held, now)
    return now + rest_s <= request.deadline_at


def _next_deadlines(instance: InstanceState) -> Iterator[UnixTime]:
    """Deadlines of the next tokens of interactive answers (QoServe eq. 2)."""
    for held in instance.requests.runs:
        if _is_interactive(held) and held.run is not None and held.run.begun:
            request = held.request
            num_tokens = instance.requests.generated(held) // request.num_answers
            yield request.slo.token_deadline_at(request.arrived_at, num_tokens + 1)


def _is_interactive(held: Held) -> bool:
    """True if a request has a target for its first token that it may still meet."""
    return held.rank is Rank.REGULAR and held.request.slo.qos_class is QosClass.INTERACTIVE
