"""The engine benches: their verdicts over pairs of loads."""

import pytest

from ops.bench.engine import Sizes, judge
from ops.bench.engine_load import Planned, Served
from ops.bench.engine_margins import FIVE, NONE
from ops.bench.engine_margins import judge as judge_margins
from ops.bench.result import Result
from shared.contracts.qos import Slo


def served(missed: int, of: int = 20) -> list[Served]:
    """Served requests; the first *missed* have no answer, the others are in time."""
    found = []
    for number in range(of):
        each = Served(Planned(0.0, "Q2", (1, 2), 2), Slo(ttlt_s=1.0), 0.0)
        if number >= missed:
            each.token_ids, each.first_token_at, each.last_token_at = (3, 4), 0.1, 0.2
            each.finished = True
        found.append(each)
    return found


def empty() -> Result:
    return Result(name="engine", seed=0, quick=False)


def test_the_better_of_stock_is_compared_in_each_pair():
    result = empty()
    rounds = [
        {"stock fcfs": served(10), "stock priority": served(5), "ours": served(2)},
        {"stock fcfs": served(10), "stock priority": served(12), "ours": served(6)},
        {"stock fcfs": served(10), "stock priority": served(8), "ours": served(4)},
    ]
    judge(result, rounds, Sizes(quick=False))

    assert result.lines[0].value == pytest.approx(0.5)
    assert result.lines[1].value == pytest.approx(12 / 16)
    assert result.figures["missed by pair, ours"] == [0.1, 0.3, 0.2]


@pytest.mark.parametrize(
    "arms",
    [
        {"stock fcfs": served(10), "ours": served(1)},
        {"stock fcfs": served(4), "stock priority": served(4), "ours": served(1)},
    ],
    ids=["without stock's priority", "load too low"],
)
def test_stock_counts_as_beaten_only_at_its_best_and_under_load(arms: dict[str, list[Served]]):
    result = empty()
    judge(result, [arms], Sizes(quick=True))

    assert [line.value for line in result.lines] == [None, None, 0.0]
    assert result.num_not_measured == 2


def test_margins_are_compared_in_pairs():
    result = empty()
    rounds = [
        {NONE: served(4), FIVE: served(2)},
        {NONE: served(2), FIVE: served(6)},
        {NONE: served(9), FIVE: served(8)},
    ]
    judge_margins(result, rounds)

    name = "missed more without a margin, points"
    assert result.figures[f"{name} by pair"] == [10.0, -20.0, 5.0]
    found = result.figures[name]
    assert (found["mean"], found["median"]) == (pytest.approx(-5 / 3), pytest.approx(5.0))
    assert result.lines[0].value == found["high"] == pytest.approx(10.0)
    assert not result.holds


def test_a_margin_is_left_out_only_if_the_whole_interval_is_below_the_bound():
    result = empty()
    judge_margins(result, [{NONE: served(6), FIVE: served(7)}] * 4)

    assert result.lines[0].value == pytest.approx(-5.0)
    assert result.holds


def test_margins_are_not_compared_under_a_load_that_hardly_any_request_misses():
    result = empty()
    judge_margins(result, [{NONE: served(0), FIVE: served(0)}])

    assert [line.value for line in result.lines] == [None]
