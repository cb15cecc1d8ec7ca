"""The report of the bench of attached servers."""

import pytest

from ops.bench.attach_report import report
from ops.bench.attach_rounds import ORACLE, OURS, Round
from ops.bench.result import Result

BASELINE = "least loaded"


def a_round(late: str, batch: float = 100.0) -> Round:
    """A round in which the interactive requests marked `x` miss a target."""
    return Round(late=[each == "x" for each in late], late_q2=[], batch_per_cpu_s=batch)


def reported(**arms: Round) -> Result:
    """The report of one load, where the baseline misses 40 % of the targets."""
    result = Result(name="attach", seed=0, quick=True)
    names = {"oracle": ORACLE, "ours": OURS, "baseline": BASELINE}
    rounds = {(0.4, 0): {names[name]: each for name, each in arms.items()}}
    report(result, rounds, {}, shares=(0.4, 0.5))
    return result


@pytest.fixture
def result() -> Result:
    return reported(oracle=a_round("....x"), ours=a_round("x...x", 95.0), baseline=a_round("xx..x"))


def test_misses_are_compared_with_the_better_baseline(result: Result) -> None:
    value = {line.name: line.value for line in result.lines}
    assert value["missed, headway / better baseline, where it misses 40%"] == pytest.approx(2 / 3)
    assert value["missed, headway / better baseline, where it misses 50%"] is None
    assert value[
        "batch tokens per CPU second of the servers, better baseline / headway"
    ] == pytest.approx(100 / 95)


def test_misses_among_what_the_oracle_serves_in_time(result: Result) -> None:
    of_reachable = "of what the oracle serves in time"
    assert result.figures[f"missed at 40%, {OURS}, {of_reachable}"] == [0.25]
    assert result.figures[f"missed at 40%, {BASELINE}, {of_reachable}"] == [0.5]
