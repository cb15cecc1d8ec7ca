"""Numbers of instances that an autoscaler follows."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from shared.contracts.base import ModelName
from solver.planning.capacity.demand import ModelDemand, instances_for, left_for
from solver.planning.capacity.steady import Need, SteadyNumber

DOWN_AFTER_S = 30.0
MODELS = tuple(map(ModelName, "abc"))
RATES = {model: 10.0 * (1 + number) for number, model in enumerate(MODELS)}
FASTER = {model: 3.0 * rate for model, rate in RATES.items()}
ACTIVATE_S = dict.fromkeys(MODELS, 5.0)

_pauses = st.floats(0.0, 40.0)
_counts = st.integers(0, 12)
_needs = st.lists(st.tuples(_pauses, _counts, _counts), max_size=40)
_loads = st.lists(
    st.tuples(st.sampled_from(MODELS), st.floats(0.0, 500.0), st.sampled_from((1.0, 60.0))),
    max_size=8,
)
_shares = st.floats(0.1, 1.0)


def followed(first: int, needs: list[tuple[float, int, int]]) -> list[tuple[float, Need, int]]:
    """Times, needs and numbers after needs (pause, least, distance to kept)."""
    steady, at, found = SteadyNumber(first, 0.0, down_after_s=DOWN_AFTER_S), 0.0, []
    for pause, least, more in needs:
        at += pause
        need = Need(least=least, kept=least + more)
        found.append((at, need, steady.observe(need, at)))
    return found


@given(_counts, _needs)
def test_number_is_never_below_the_need(first: int, needs: list[tuple[float, int, int]]):
    assert all(number >= need.least for _, need, number in followed(first, needs))


@given(_counts, _needs)
def test_number_falls_only_if_every_need_of_the_time_was_lower(
    first: int, needs: list[tuple[float, int, int]]
):
    found = [(0.0, Need(least=first, kept=first), first), *followed(first, needs)]
    for index in range(1, len(found)):
        at, _, number = found[index]
        before = found[index - 1][2]
        # A need holds until the next one.
        ends = [*(each[0] for each in found[1:]), at]
        held = [
            need.kept
            for (_, need, _), end in zip(found[: index + 1], ends[: index + 1], strict=True)
            if end > at - DOWN_AFTER_S
        ]
        assert number >= before or number >= max(held)


@given(_counts, _needs, st.lists(st.tuples(_counts, _counts), min_size=40, max_size=40))
def test_larger_needs_never_give_a_smaller_number(
    first: int, needs: list[tuple[float, int, int]], added: list[tuple[int, int]]
):
    larger = [
        (pause, least + up, max(0, more + widened - up))
        for (pause, least, more), (up, widened) in zip(needs, added, strict=False)
    ]
    small, large = followed(first, needs), followed(first, larger)

    assert all(a[2] <= b[2] for a, b in zip(small, large, strict=True))


@given(_counts, st.lists(st.tuples(_pauses, _counts, _counts), max_size=40))
def test_load_that_oscillates_within_the_band_changes_nothing(
    number: int, swings: list[tuple[float, int, int]]
):
    needs = [
        (pause, max(0, number - below), above + min(number, below))
        for pause, below, above in swings
    ]

    assert all(found == number for _, _, found in followed(number, needs))


@given(st.integers(0, 10), st.integers(0, 10), st.floats(0.1, DOWN_AFTER_S), st.integers(1, 30))
def test_load_that_oscillates_faster_than_the_time_changes_the_number_once(
    low: int, high: int, period_s: float, swings: int
):
    needs = [(period_s / 2, low if swing % 2 else high, 0) for swing in range(2 * swings)]
    found = [number for _, _, number in followed(0, needs)]

    assert sum(a != b for a, b in pairwise(found)) <= 1


def demands(loads: list[tuple[ModelName, float, float]]) -> list[ModelDemand]:
    return [ModelDemand(model=m, tokens_per_s=load, least_left_s=left) for m, load, left in loads]


@given(_loads, st.lists(st.floats(0.0, 500.0), min_size=8, max_size=8), _shares, st.integers(0, 5))
def test_more_arriving_work_never_needs_fewer_instances(
    loads: list[tuple[ModelName, float, float]],
    added: list[float],
    share: float,
    others: int,
):
    def needed(of: list[ModelDemand]) -> int:
        left = left_for(of, [(FASTER, others)], busy_share=share)
        assert left is not None
        number = instances_for(left, rates=RATES, activate_s=ACTIVATE_S, busy_share=share)
        assert number is not None
        return number

    larger = [
        (model, load + more, left) for (model, load, left), more in zip(loads, added, strict=False)
    ]

    assert needed(demands(loads)) <= needed(demands(larger))


@given(_loads, _shares)
def test_instances_for_the_work_are_busy_for_at_most_the_share(
    loads: list[tuple[ModelName, float, float]], share: float
):
    number = instances_for(demands(loads), rates=RATES, activate_s=ACTIVATE_S, busy_share=share)
    busy = sum(load / RATES[model] for model, load, _ in loads)

    assert number is not None
    assert number * share >= busy - 1e-6
