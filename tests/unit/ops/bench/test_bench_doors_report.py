"""Evaluation of `ops.bench doors`: misses, the best other door, and lines."""

import msgspec
import pytest

from ops.bench.doors_cells import KILLED, SATURATED, SEARCHED
from ops.bench.doors_client import Answer
from ops.bench.doors_fronts import OURS
from ops.bench.doors_report import COMPARED, IN_TURN, Run, Runs, lines, report
from ops.bench.doors_rounds import Round, round_of
from ops.bench.doors_server import Counts
from ops.bench.doors_traffic import RequestClass
from ops.bench.result import Result
from ops.sim.attached.outcomes import Outcome
from shared.contracts.qos import Slo

CELL = "chat-batch-8"
CHAT = RequestClass("chat", Slo(ttft_s=1.0, tbt_s=0.25), 0)
BATCH = RequestClass("batch", Slo(ttlt_s=300.0), 2)
ROUND = Round(
    classes={},
    missed=0.0,
    first_p50_s=0.1,
    lost=0,
    errors={},
    all_done_s=50.0,
    last_batch_s=50.0,
    cached=0.0,
    answer_tokens_per_s=100.0,
    twice_prompt=0.0,
    twice_answer=0.0,
    spread=1.0,
    door_cpu_ms=None,
    broker_cpu_ms=None,
    with_priority=0,
)
FIRST_P50, MISSES = "ms of the median first token", "misses, headway / best other door"
POINTS = "points of misses"


def a_run(door: str, load: str, *, seed: int = 3, scale: float = 1.0, **figures: object) -> Run:
    return Run(
        cell=CELL,
        load=load,
        rate_rps=6.0,
        seed=seed,
        scale=scale,
        door=door,
        round=msgspec.structs.replace(ROUND, **figures),
    )


def values(runs: list[Run]) -> dict[str, float | None]:
    return {line.name: line.value for line in lines(Runs(runs))}


def at(runs: list[Run], begin: str, load: str) -> float | None:
    """Value of the line that begins so and is about the load."""
    found = [v for name, v in values(runs).items() if name.startswith(begin) and load in name]
    assert len(found) == 1
    return found[0]


def others(load: str, **figures: object) -> list[Run]:
    return [a_run(door, load, **figures) for door in COMPARED]


def an_answer(
    kind: RequestClass, first_s: float | None, *, last_s: float = 2.0, finished: bool = True
) -> Answer:
    outcome = Outcome(100.0)
    if first_s is not None:
        outcome.add(1, 100.0 + first_s)
        outcome.add(9, 100.0 + last_s)
    outcome.finished = finished and first_s is not None
    return Answer(kind, 50, outcome)


def test_a_round_counts_late_and_lost_answers_as_missed():
    answers = [
        an_answer(CHAT, 0.5),
        an_answer(CHAT, 1.5),
        an_answer(CHAT, 0.5, last_s=9.0),
        an_answer(CHAT, None),
        an_answer(BATCH, 30.0, last_s=60.0),
    ]
    found = round_of(
        answers,
        begun_at=90.0,
        before=Counts(prompt_tokens=10, answer_tokens=5),
        after=Counts(prompt_tokens=260, cached_tokens=100, answer_tokens=55),
    )

    assert found.missed == 0.75
    assert found.classes["chat"].in_time == 0.25
    assert found.classes["batch"].in_time == 1.0
    assert (found.lost, found.errors) == (1, {"no answer in time": 1})
    assert (found.last_batch_s, found.all_done_s) == (70.0, 70.0)
    assert found.cached == pytest.approx(0.4)
    assert found.twice_prompt == pytest.approx(0.25)
    assert found.twice_answer == pytest.approx(0.25)


def test_misses_are_compared_with_the_door_that_misses_the_fewest():
    runs = [*others("30%", missed=0.4), a_run(OURS, "30%", missed=0.15)]
    runs.append(a_run("smg cache_aware", "30%", missed=0.3))

    assert Runs(runs).best_other(CELL, "30%") == "smg cache_aware"
    assert at(runs, MISSES, "30%") == pytest.approx(0.5)


def test_of_doors_with_equal_misses_the_one_with_the_earliest_first_tokens_counts():
    runs = [*others("10%", first_p50_s=0.3), a_run(OURS, "10%", first_p50_s=0.15)]
    runs.append(a_run("smg cache_aware", "10%", first_p50_s=0.1))

    assert at(runs, FIRST_P50, "10%") == pytest.approx(50.0)
    assert at(runs, POINTS, "10%") == 0.0


def test_the_median_over_the_seeds_counts():
    runs = []
    for seed, missed in ((3, 0.1), (4, 0.2), (5, 0.4)):
        runs += [a_run(door, "50%", seed=seed, missed=0.4) for door in COMPARED]
        runs.append(a_run(OURS, "50%", seed=seed, missed=missed))

    assert at(runs, MISSES, "50%") == pytest.approx(0.5)


def test_nothing_is_compared_if_a_strong_door_was_not_measured():
    runs = [
        a_run(IN_TURN, "10%", missed=0.5),
        a_run(SEARCHED, "10%", missed=0.1),
        a_run(OURS, "10%", missed=0.0),
    ]

    measured = {name for name, value in values(runs).items() if value is not None}
    assert measured == {
        "prompt tokens computed twice, headway",
        "answer tokens computed twice, headway",
        "requests lost, headway",
    }


def test_a_door_that_is_not_installed_has_no_figures():
    missing = Run(
        cell=CELL, load="10%", rate_rps=6.0, seed=3, scale=1.0, door="smg cache_aware", round=None
    )
    result = Result(name="doors", seed=3, quick=True)
    report(result, Runs([a_run(OURS, "10%"), missing]))

    assert result.figures[f"{CELL}, 10% (6/s), smg cache_aware"] is None
    assert result.figures[f"{CELL}, 10% (6/s), {OURS}"] is not None
    assert result.figures[f"{CELL}, 10%: best other door"] is None


def test_without_misses_there_is_no_ratio_of_them():
    assert at([*others("30%"), a_run(OURS, "30%")], MISSES, "30%") is None


def test_slow_motion_has_a_line_of_its_own_for_first_tokens():
    runs = [a_run(door, "10%", scale=3.0) for door in COMPARED]
    runs.append(a_run(OURS, "10%", scale=3.0, first_p50_s=0.11))

    assert at(runs, FIRST_P50, "10%") is None
    assert at(runs, "median first token", "10%") == pytest.approx(0.1)


def test_throughput_is_compared_with_round_robin_above_capacity():
    runs = [a_run(IN_TURN, SATURATED, all_done_s=80.0), a_run(OURS, SATURATED, all_done_s=90.0)]

    name = "time until all is done above capacity, headway / round robin"
    assert values(runs)[name] == pytest.approx(1.125)


def test_work_of_a_killed_server_does_not_count_as_computed_twice_but_losses_count():
    found = values([a_run(OURS, KILLED, twice_prompt=0.2, twice_answer=0.2, lost=2)])

    assert found["prompt tokens computed twice, headway"] is None
    assert found["requests lost, headway"] == 2
