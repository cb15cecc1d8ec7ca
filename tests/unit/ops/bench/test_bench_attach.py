"""The report of the bench of attached servers."""

import pytest

from ops.bench.attach_report import report
from ops.bench.attach_rounds import ORACLE, OURS, Round
from ops.bench.result import Result

BASELINE, LUCKY = "least loaded", "round robin"


def a_round(late: str, batch: float = 100.0) -> Round:
    """A round in which the interactive requests marked `x` miss a target."""
    return Round(late=[each == "x" for each in late], late_q2=[], batch_per_cpu_s=batch)


@pytest.fixture
def result() -> Result:
    """The report of one load with two seeds, where a baseline misses 40 % of the targets."""
    result = Result(name="attach", seed=0, quick=True)
    rounds = {
        (0.4, 0): {
            ORACLE: a_round("....x"),
            OURS: a_round("x...x", 95.0),
            BASELINE: a_round("xx..x"),
            LUCKY: a_round("....x"),
        },
        (0.4, 1): {
            ORACLE: a_round("....."),
            OURS: a_round("x....", 95.0),
            BASELINE: a_round("x...."),
            LUCKY: a_round("xxxxx"),
        },
    }
    report(result, rounds, [], shares=(0.4,))
    return result


def test_misses_are_compared_with_the_baseline_that_is_better_over_all_seeds(
    result: Result,
) -> None:
    value = {line.name: line.value for line in result.lines}
    assert result.figures["better baseline at 40%"] == BASELINE
    assert value["missed, headway / better baseline, where it misses 40%"] == pytest.approx(3 / 4)
    assert result.figures["missed at 40%, oracle / better baseline"] == pytest.approx(1 / 4)
    assert value[
        "batch tokens per CPU second of the servers, better baseline / headway"
    ] == pytest.approx(100 / 95)


def test_a_load_that_was_not_measured_has_no_figure(result: Result) -> None:
    value = {line.name: line.value for line in result.lines}
    assert value["missed, headway / better baseline, where it misses 50%"] is None


def test_misses_among_what_the_oracle_serves_in_time(result: Result) -> None:
    of_reachable = "of what the oracle serves in time"
    assert result.figures[f"missed at 40%, {OURS}, {of_reachable}"] == [0.25, 0.2]
    assert result.figures[f"missed at 40%, {BASELINE}, {of_reachable}"] == [0.5, 0.2]
