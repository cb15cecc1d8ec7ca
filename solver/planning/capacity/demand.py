"""How many instances the arriving work needs, whether or not any of it waits."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil

from shared.contracts.base import ModelName, Seconds

_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDemand:
    """Work of one model that arrives; a model may have several, with other deadlines."""

    model: ModelName
    tokens_per_s: float
    """Prompt and expected answer tokens of the requests that arrive in a second."""
    least_left_s: Seconds
    """Least time to the deadline of its requests when they arrive; infinite for best effort."""


def instances_for(
    demands: Iterable[ModelDemand],
    *,
    rates: Mapping[ModelName, float],
    activate_s: Mapping[ModelName, Seconds],
    busy_share: float,
) -> int | None:
    """
    Least number of equal instances of which none is busier than *busy_share*.

    A model whose deadlines are nearer than its activation has instances of its own; other models
    share the rest by swaps.

    Args:
        demands: Arriving work.
        rates: Throughput of an instance in tokens per second, by model.
        activate_s: Time to activate a model on an instance that serves another one.
        busy_share: Share of an instance's throughput that may be used, above 0 and up to 1.

    Returns:
        The number, which does not fall with any demand; None if the throughput of a model with
        demand is unknown.
    """
    needed: dict[ModelName, float] = defaultdict(float)
    near: set[ModelName] = set()
    for demand in demands:
        if not demand.tokens_per_s:
            continue
        rate = rates.get(demand.model)
        if not rate:
            return None
        needed[demand.model] += demand.tokens_per_s / rate / busy_share
        if demand.least_left_s < activate_s.get(demand.model, 0.0):
            near.add(demand.model)
    own = sum(ceil(number - _ROUNDING) for model, number in needed.items() if model in near)
    shared = sum(number for model, number in needed.items() if model not in near)
    return own + ceil(shared - _ROUNDING)


def left_for(
    demands: Sequence[ModelDemand],
    others: Iterable[tuple[Mapping[ModelName, float], int]],
    *,
    busy_share: float,
) -> list[ModelDemand] | None:
    """
    The part of *demands* that instances of other kinds leave, equal for all models.

    Args:
        demands: Arriving work.
        others: Throughput by model in tokens per second, and number of instances, of each other
            kind.
        busy_share: Share of an instance's throughput that may be used.

    Returns:
        The demands, each of which does not fall with any given demand; None if a throughput is
        unknown.
    """
    left = 1.0
    for rates, count in others:
        if any(each.tokens_per_s and not rates.get(each.model) for each in demands):
            return None
        needed = sum(each.tokens_per_s / rates[each.model] for each in demands if each.tokens_per_s)
        if needed:
            left -= count * busy_share / needed
    return [replace(each, tokens_per_s=max(0.0, left) * each.tokens_per_s) for each in demands]


def may_be_zero(deadlines_s: Sequence[Seconds], *, cold_start_s: Seconds) -> bool:
    """
    Return whether no instance has to be kept for requests that may come.

    Args:
        deadlines_s: Least times to the deadlines of the kinds of requests that came before; empty
            if none is known.
        cold_start_s: Time from an order to start an instance until it serves a model.

    Returns:
        True if a request of every known kind can wait for a cold start; False if none is known.
    """
    return bool(deadlines_s) and min(deadlines_s) >= cold_start_s
