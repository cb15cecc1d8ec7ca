"""How loaded an instance is, and how much longer its requests take therefore."""

from shared.contracts.base import Seconds, UnixTime
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

CROWDED_S: Seconds = 1.0
"""Time for which an instance is considered loaded after its engine had much to prefill."""


def work(instance: InstanceState) -> tuple[HeldWork, PullBounds]:
    """Pulled work that has not begun, and the present bounds of pulled work."""
    held = instance.room.held(instance.engine, instance.num_pulls)
    return held, instance.room.bounds_now(instance.engine)


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
    """Return whether a request would be late even if its run began now."""
    return is_infeasible(
        held.request,
        now=now,
        prefill_s=prefill_pace(instance) * predicted_prefill_s(held.request, instance.profile),
        decode_s=decode_s(instance, held, now),
    )


def decode_s(instance: InstanceState, held: Held, now: UnixTime) -> Seconds:
    """Predicted time from first to last token of a request, beside the work of the instance."""
    alone_s = predicted_decode_s(held.request, instance.profile)
    if _is_loaded(instance, now):
        return max(alone_s, _busy_decode_s(instance, held))
    return alone_s


def prefill_pace(instance: InstanceState) -> float:
    """
    Measured times of prefills, as a multiple of the predicted ones.

    Decided: one for engines that order prefills themselves: their policies decide what waits.
    """
    return instance.room.prefill_pace.ratio if instance.orders_prefills else 1.0


def _is_loaded(instance: InstanceState, now: UnixTime) -> bool:
    """True if prefills wait all the time, here or in the queues."""
    held, bounds = work(instance)
    if is_loaded(held, bounds):
        return True
    return instance.orders_prefills and now - instance.crowded_at < CROWDED_S


def _busy_decode_s(instance: InstanceState, held: Held) -> Seconds:
    """Predicted time from first to last token of a request on a loaded instance."""
    profile = instance.profile
    if profile is None or profile.latency is None:
        return 0.0
    tokens = predicted_output_tokens(held.request, profile) - held.generated
    one_s = predict_s(profile.latency, compute_tokens=BUSY_TOKENS, context_tokens=0)
    return max(0.0, tokens) * busy_token_s(predicted_s=one_s, pace_s=instance.engine.pace_s)
