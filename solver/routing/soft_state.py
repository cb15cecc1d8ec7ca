"""What routers share about instances: monotone totals that merge in any order."""

import msgspec

from shared.contracts.routing import SoftState


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
