"""What routers share about instances: monotone totals that merge in any order."""

import msgspec

from shared.contracts.base import InstanceId, Seconds, UnixTime, Value


class WorkTotals(Value, frozen=True, kw_only=True, omit_defaults=True):
    """
    Expected prefill work of one router on one instance since the router began, in seconds.

    Each total only grows; `finished_s` never exceeds `dispatched_s`, nor that `assigned_s`.
    """

    version: int = 0
    """One more with each change; the higher one is the later."""
    assigned_s: Seconds = 0.0
    dispatched_s: Seconds = 0.0
    finished_s: Seconds = 0.0
    """With a first token, or given up."""
    num_assigned: int = 0
    num_finished: int = 0


class InstanceLoad(Value, frozen=True, kw_only=True, omit_defaults=True):
    """One instance's own word about itself."""

    seq: int = 0
    """One more with each report; the higher one is the later."""
    at: UnixTime = 0.0
    running: int = 0
    prefill_backlog_tokens: int = 0
    """Not yet computed, of what the engine has been given."""
    kv_utilization: float = 0.0


class SoftState(Value, frozen=True, kw_only=True, omit_defaults=True):
    """Everything that routers tell each other; lost without harm, relearnt within seconds."""

    work: dict[str, dict[InstanceId, WorkTotals]] = msgspec.field(default_factory=dict)
    """By router."""
    loads: dict[InstanceId, InstanceLoad] = msgspec.field(default_factory=dict)


def merged(one: SoftState, other: SoftState) -> SoftState:
    """
    The later word about everything.

    Commutative, associative and idempotent, given that equal versions have equal content, which
    holds as only a router writes its own totals and only an instance its own load.
    """
    work = {router: dict(totals) for router, totals in one.work.items()}
    for router, totals in other.work.items():
        known = work.setdefault(router, {})
        for instance_id, each in totals.items():
            held = known.get(instance_id)
            if held is None or held.version < each.version:
                known[instance_id] = each
    loads = dict(one.loads)
    for instance_id, load in other.loads.items():
        told = loads.get(instance_id)
        if told is None or told.seq < load.seq:
            loads[instance_id] = load
    return msgspec.structs.replace(one, work=work, loads=loads)
