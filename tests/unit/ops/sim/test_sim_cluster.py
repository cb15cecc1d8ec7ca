"""Simulated clusters: conservation of requests, silos, searches, and the command line."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ops.bench.cells import Cell, code_of, measure
from ops.bench.qoserve_cells import full, quick
from ops.bench.store import Store, kept
from ops.sim.profiles import load
from ops.sim.scenario import Scenario
from ops.sim.search import highest_rate, least_replicas
from ops.sim.summary import summarize, violation_share
from services.mesh.cli import main

SHORT = Scenario(profile=load("28"), rate_rps=4.0, duration_s=60.0)


def test_every_request_is_served_by_one_replica_to_its_end() -> None:
    outcome = replace(SHORT, replicas=3, drain=True).run()

    assert all(r.num_output_tokens == r.output_tokens for r in outcome.requests)
    assert sum(t.prefill_tokens - t.wasted_tokens for t in outcome.totals) == sum(
        r.arrival.prompt_tokens for r in outcome.requests
    )


def test_equal_scenarios_give_equal_figures() -> None:
    first, second = (summarize(SHORT.run()) for _ in range(2))
    for figures in (first, second):
        for name in ("cpu_s", "speed"):
            del figures[name]

    assert first == second


@pytest.mark.slow
def test_stopping_after_the_last_deadline_changes_no_verdict() -> None:
    crowded = replace(SHORT, rate_rps=60.0, policy="sarathi-fcfs")
    stopped, drained = (replace(crowded, drain=drain).run() for drain in (False, True))

    assert violation_share(stopped.requests) == violation_share(drained.requests) > 0


def test_a_silo_serves_each_class_on_separate_replicas() -> None:
    silo = (("Q1", "sarathi-fcfs", 2), ("Q2", "edf", 1), ("Q3", "sarathi-srpf:2048", 1))
    outcome = replace(SHORT, silo=silo, drain=True).run()

    assert len(outcome.totals) == 4
    assert all(r.finished_at is not None for r in outcome.requests)


def test_a_class_without_replicas_is_rejected() -> None:
    with pytest.raises(ValueError, match="no replicas for class"):
        replace(SHORT, silo=(("Q1", "edf", 1),)).run()


def test_a_request_that_fits_no_engine_is_rejected() -> None:
    with pytest.raises(ValueError, match="KV tokens"):
        replace(SHORT, kv_capacity_tokens=512).run()


def test_prefill_only_replicas_end_with_the_first_token() -> None:
    outcome = replace(SHORT, policy="prefill", prefill_only=True, drain=True).run()

    assert {r.num_output_tokens for r in outcome.requests} == {1}


@pytest.mark.parametrize(("needed", "found"), [(1, 1), (5, 5), (8, 8), (9, None)])
def test_the_least_number_of_replicas_is_found(needed: int, found: int | None) -> None:
    assert least_replicas(lambda n: float(n < needed), allowed=0.01, most=8) == found


def test_goodput_is_found_within_the_tolerance() -> None:
    found = highest_rate(
        lambda rate: float(rate > 3.3), allowed=0.01, low_rps=0, high_rps=8, tolerance_rps=0.01
    )

    assert found == pytest.approx(3.3, abs=0.01)


@pytest.mark.slow
def test_the_command_finds_the_number_of_replicas(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plot = tmp_path / "plot.png"
    code = main(
        ["simulate", "--qps", "6", "--hours", "0.05", "--find-replicas", "--most", "8", "--json",
         "--plot", str(plot)]
    )  # fmt: skip
    answer = msgspec.json.decode(capsys.readouterr().out)

    assert code == 0
    assert answer["replicas"] == answer["least_replicas"] >= 1
    assert answer["violations"] <= 0.01
    assert plot.stat().st_size > 0


def test_the_command_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    code = main([
        "simulate", "--hours", "0.01", "--silo", "1:1:1", "--wave", "1:3:10", "--mix", "2:1:1",
    ])  # fmt: skip
    shown = capsys.readouterr()

    assert code == 0
    assert "silo on 3 x a100-llama3-8b-28" in shown.out
    legend = "Q1 first token in 6 s, 0.05 s per token (TBT); Q2 last token in 600 s; Q3 last token"
    assert legend in " ".join(shown.out.split())
    assert "the run is short for its longest target" in shown.err


@pytest.mark.parametrize(
    "arguments",
    [
        ["--policy", "none"],
        ["--profile", "none"],
        ["--qps", "0"],
        ["--mix", "1:2"],
        ["--trace-times"],
        ["--find-replicas", "--silo", "1:1:1"],
        ["--find-goodput", "--wave", "1:2"],
    ],
)
def test_wrong_usage_is_reported(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--hours", "0.01", *arguments]) == 2
    assert capsys.readouterr().err != ""


def test_a_benchmark_resumes_after_an_interruption(tmp_path: Path) -> None:
    cell = Cell(hours=0.01, rate_rps=2.0)
    first = dict(kept([cell], Store(tmp_path, code_of()), measure, workers=1))
    again = kept([cell, cell], Store(tmp_path, code_of()), made_twice, workers=1)

    assert dict(again) == first


def made_twice(cell: Cell) -> dict[str, Any]:
    raise AssertionError(f"{cell} was already measured")


def test_the_cells_of_a_quick_benchmark_are_part_of_the_full_benchmark() -> None:
    assert {cell.policy for cell in quick(0)} <= {cell.policy for cell in full(0)}
    assert len(set(full(0))) > 100
