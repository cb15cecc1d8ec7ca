"""How loaded an instance is, and how much longer its requests take therefore."""

import math

from shared.contracts.base import Seconds, UnixTime
from solver.instance.admission.urgent import DEFAULT_TARGET_S
from solver.instance.request import Held
from solver.instance.state import InstanceState
from solver.prediction.latency.latency_model import predict_s
from solver.prediction.latency.service_time import (
    predicted_decode_s,
    predicted_output_tokens,
    predicted_prefill_s,
)
from solver.scheduling.keys import UNIMPORTANT_DELAY_S
from solver.scheduling.pull_room import Held as HeldWork
from solver.scheduling.pull_room import PullBounds, is_loaded
from solver.scheduling.relegation import BUSY_TOKENS, busy_token_s, is_infeasible

_CROWDED_S: Seconds = 1.0
"""Time for which an instance counts as loaded after its server had much to prefill."""
_CROWDED_SHARE, _STALLING_SHARE = 0.8, 0.2
"""
Most prefill at a server as a share of the usual target for first tokens; the second where its
iterations with prefills take longer than the usual target for the next token.
"""


def work(instance: InstanceState) -> tuple[HeldWork, PullBounds]:
    """Pulled work that has not begun, and the present bounds of pulled work."""
    held = instance.room.held(instance.engine, instance.num_pulls)
    return held, instance.room.bounds_now(instance.engine)


def num_free(instance: InstanceState) -> int:
    """Slots that neither runs nor pulled requests will take."""
    room = instance.room
    return instance.engine.max_running - room.num_running - room.num_window - instance.num_pulls


def is_crowded(instance: InstanceState, now: UnixTime) -> bool:
    """
    True if a server that does not order prefills has as much as it should have at once: what is
    there is computed first, and what is not there may still begin elsewhere, or in another order.
    """
    prefilling_s, urgent = instance.room.prefilling_s, instance.urgent
    if not prefilling_s or not instance.orders_prefills:
        return False
    target_s = urgent.target_s(now)
    stalls = urgent.pace_s < instance.engine.longest_gap_s < math.inf
    share = _STALLING_SHARE if stalls else _CROWDED_SHARE
    return prefilling_s > share * (DEFAULT_TARGET_S if math.isinf(target_s) else target_s)


def unimportant_delay_s(instance: InstanceState, now: UnixTime) -> Seconds:
    """
    Delay of work of low importance, while prefills wait all the time.

    Decided: zero for engines that order prefills themselves, since their policies apply a delay in
    their own overload mode.
    """
    if not instance.orders_prefills:
        return 0.0
    return UNIMPORTANT_DELAY_S if _is_loaded(instance, now) else 0.0


def is_late(instance: InstanceState, held: Held, now: UnixTime) -> bool:
    """
    Return whether a request would be late even if its run began now.

    Prefills take as much longer than predicted as those before only while the server has much to
    prefill, or no slot is free: else a request that begins delays few, and relegation costs more
    than it saves.
    """
    is_busy = _was_crowded(instance, now) or num_free(instance) <= 0
    pace = prefill_pace(instance) if is_busy else 1.0
    return is_infeasible(
        held.request,
        now=now,
        prefill_s=pace * predicted_prefill_s(held.request, instance.profile),
        decode_s=decode_s(instance, held, now),
    )


def decode_s(instance: InstanceState, held: Held, now: UnixTime) -> Seconds:
    """Predicted time from first to last token of a request, beside the work of the instance."""
    profile, pace_s = instance.profile, instance.engine.pace_s
    alone_s = predicted_decode_s(held.request, profile)
    if profile is None or profile.latency is None:
        return alone_s
    if _is_loaded(instance, now):
        one_s = predict_s(profile.latency, compute_tokens=BUSY_TOKENS, context_tokens=0)
        token_s = busy_token_s(predicted_s=one_s, pace_s=pace_s)
    elif instance.room.num_running and math.isfinite(pace_s):
        token_s = pace_s
    else:
        return alone_s
    tokens = predicted_output_tokens(held.request, profile) - held.generated
    return max(alone_s, tokens * token_s)


def prefill_pace(instance: InstanceState) -> float:
    """
    Measured times of prefills, as a multiple of the predicted ones.

    Decided: one for engines that order prefills themselves: their policies decide what waits.
    """
    return instance.room.prefill_pace.ratio if instance.orders_prefills else 1.0


def _is_loaded(instance: InstanceState, now: UnixTime) -> bool:
    """True if prefills wait all the time, here or in the queues."""
    held, bounds = work(instance)
    return is_loaded(held, bounds) or _was_crowded(instance, now)


def _was_crowded(instance: InstanceState, now: UnixTime) -> bool:
    return is_crowded(instance, now) or now - instance.urgent.crowded_at < _CROWDED_S
