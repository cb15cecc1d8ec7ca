"""Residency of a model: how long an instance keeps it while work for it waits."""

from collections.abc import Mapping

from shared.contracts.base import ModelName, Seconds

RESIDENCY_SWAPS = 3.0
"""Default of the time for which a model stays active, in times of the longest swap."""


def withheld_models(
    active: ModelName | None,
    others_s: Mapping[ModelName, Seconds],
    waiting: Mapping[ModelName, bool],
    *,
    active_for_s: Seconds,
    swaps: float = RESIDENCY_SWAPS,
) -> frozenset[ModelName]:
    """
    The other models, while the active one was activated a short time ago and work for it waits:
    otherwise an instance could return to a model at once, and lose two swaps for a few requests.
    Work with deadlines does not wait for work without.

    Args:
        others_s: Other model -> time to activate it.
        waiting: Model for which work waits -> whether some of it has a deadline.
        active_for_s: Time since the active model was activated.
        swaps: Time for which a model stays active, in times of the longest swap.
    """
    is_urgent = None if active is None else waiting.get(active)
    if is_urgent is None or active_for_s >= swaps * max(others_s.values(), default=0.0):
        return frozenset()
    return frozenset(model for model in others_s if is_urgent or not waiting.get(model, False))
