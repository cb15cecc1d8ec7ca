"""The demo's judging, figures and closing sentence."""

import matplotlib as mpl
import pytest

from ops.demo.arms import ARMS, FCFS, HEADWAY
from ops.demo.drive import Record
from ops.demo.judging import Timeline, has_target, judge, late_tokens
from ops.demo.report import (
    arm_figures,
    attainment_over_time,
    is_ahead,
    is_success,
    plot,
    print_table,
    sentence,
)
from ops.demo.totals import AgentTotals
from ops.demo.workload import CLASSES
from shared.contracts.qos import Slo
from shared.contracts.telemetry import InstanceStatus, InstanceTotals

CHAT, INTERACTIVE, RELAXED, BEST_EFFORT = CLASSES
COUNTS = {"swaps": 1, "evicted": 2, "swapped_out": 3, "relegated": 4}


def chat(first_s, *, sent_at_s=0.0):
    timeline = Timeline(tokens=[(first_s, 1), (first_s + 0.1, 3)], finished_s=first_s + 0.1)
    return judge(CHAT, timeline, sent_at_s=sent_at_s)


def record(*, in_time, late, lost=0):
    outcomes = [chat(0.1) for _ in range(in_time)] + [chat(9.0) for _ in range(late)]
    outcomes += [judge(CHAT, Timeline(error="no answer"), sent_at_s=0.0) for _ in range(lost)]
    return Record(
        outcomes=outcomes,
        refusals={"not JSON": True},
        counts=COUNTS,
        sent=len(outcomes),
        wall_s=10.0,
        kill_s=5.0,
    )


def arms(fcfs, headway):
    return {FCFS.name: arm_figures(fcfs), HEADWAY.name: arm_figures(headway)}


def test_tokens_are_late_after_their_own_deadline():
    slo = Slo(ttft_s=1.0, tbt_s=0.5)

    assert late_tokens([(1.0, 1), (1.5, 1), (2.0, 1)], slo) == 0
    assert late_tokens([(0.2, 1), (2.1, 4)], slo) == 2  # due at 1.5, 2.0, 2.5, 3.0
    assert late_tokens([(5.0, 3)], Slo()) == late_tokens([(5.0, 3)], Slo(ttlt_s=1.0)) == 0


def test_later_tokens_may_use_the_time_saved_by_an_early_token():
    timeline = Timeline(tokens=[(0.1, 1), (CHAT.slo.ttft_s, 1)], finished_s=1.5)

    assert judge(CHAT, timeline, sent_at_s=0.0).attained


def test_an_interactive_request_with_one_late_token_misses_its_target():
    outcome = judge(CHAT, Timeline(tokens=[(0.1, 1), (5.0, 1)], finished_s=5.0), sent_at_s=2.0)

    assert (outcome.attained, outcome.late_tokens, outcome.completed) == (False, 1, True)
    assert (outcome.ttft_s, outcome.ttlt_s, outcome.sent_at_s) == (0.1, 5.0, 2.0)


def test_a_non_interactive_request_is_judged_by_its_final():
    def finished(at_s):
        return judge(RELAXED, Timeline(tokens=[(at_s, 9)], finished_s=at_s), sent_at_s=0.0)

    assert finished(RELAXED.slo.ttlt_s).attained
    assert not finished(RELAXED.slo.ttlt_s + 0.1).attained
    assert finished(1.0).ttft_s is None  # the tokens of this answer come with the final


def test_best_effort_has_no_target():
    outcome = judge(BEST_EFFORT, Timeline(tokens=[(500.0, 9)], finished_s=500.0), sent_at_s=0.0)

    assert outcome.attained
    assert not has_target(outcome)
    assert has_target(chat(0.1))


@pytest.mark.parametrize("request_class", CLASSES)
def test_a_request_without_final_does_not_attain(request_class):
    outcome = judge(request_class, Timeline(tokens=[(0.1, 1)], error="no answer"), sent_at_s=0.0)

    assert not outcome.attained
    assert not outcome.completed


def test_figures_of_an_arm_follow_from_its_outcomes():
    best_effort = judge(BEST_EFFORT, Timeline(tokens=[(8.0, 9)], finished_s=8.0), sent_at_s=0.0)
    arm = record(in_time=6, late=2, lost=1)
    arm.outcomes.append(best_effort)
    arm.sent += 1

    data = arm_figures(arm)

    assert (data["sent"], data["lost"], data["with_target"], data["attained"]) == (10, 1, 9, 6)
    assert data["attainment"] == pytest.approx(6 / 9)
    assert data["goodput_rps"] == pytest.approx(0.6)
    assert data["late_tokens"] == 8
    assert data["errors"] == ["no answer"]
    assert data["counts"] == COUNTS
    assert data["classes"]["best effort"]["attainment"] == 1
    assert data["classes"]["best effort"]["qos_class"] == "best_effort"
    assert data["classes"]["chat"]["ttft_s"]["p50"] == pytest.approx(0.1)
    assert data["classes"]["interactive"]["attainment"] is None


def test_sentence_when_headway_is_ahead():
    data = arms(record(in_time=5, late=5), record(in_time=9, late=1))

    assert is_ahead(data)
    assert is_success(data)
    assert "Headway met 90.0% of the targets and FCFS 50.0%" in sentence(data)
    assert "ahead by 40.0 points" in sentence(data)
    assert "no request was lost" in sentence(data)


@pytest.mark.parametrize("in_time", [3, 5])
def test_sentence_when_headway_is_not_ahead(in_time):
    data = arms(record(in_time=5, late=5), record(in_time=in_time, late=10 - in_time))

    assert not is_ahead(data)
    assert not is_success(data)
    assert "not ahead" in sentence(data)
    assert "does not show an advantage" in sentence(data)


def test_lost_requests_fail_the_demo_in_either_arm():
    ahead = record(in_time=9, late=1)
    behind = record(in_time=5, late=5)

    for data in (
        arms(behind, record(in_time=9, late=0, lost=1)),
        arms(record(in_time=5, late=4, lost=1), ahead),
    ):
        assert is_ahead(data)
        assert not is_success(data)
        assert "1 request was lost" in sentence(data)


def test_unrefused_malformed_requests_fail_the_demo():
    ahead = record(in_time=9, late=1)
    ahead.refusals["not JSON"] = False

    assert not is_success(arms(record(in_time=5, late=5), ahead))


def test_sentence_names_classes_in_which_headway_is_behind():
    slow = judge(RELAXED, Timeline(tokens=[(99.0, 9)], finished_s=99.0), sent_at_s=0.0)
    fast = judge(RELAXED, Timeline(tokens=[(1.0, 9)], finished_s=1.0), sent_at_s=0.0)
    fcfs, headway = record(in_time=0, late=10), record(in_time=10, late=0)
    fcfs.outcomes.append(fast)
    headway.outcomes.append(slow)

    assert "behind for relaxed (0.0% against 100.0%)" in sentence(arms(fcfs, headway))


def test_sentence_without_requests_makes_no_claim():
    data = arms(Record(), Record())

    assert "has no result" in sentence(data)
    assert not is_success(data)


def test_attainment_over_time_leaves_out_empty_bins_and_best_effort():
    outcomes = [
        chat(0.1, sent_at_s=0.5),
        chat(9.0, sent_at_s=0.6),
        chat(0.1, sent_at_s=11.5),
        judge(BEST_EFFORT, Timeline(), sent_at_s=6.5),
    ]

    assert attainment_over_time(outcomes, duration_s=12.0) == ([0.5, 11.5], [0.5, 1.0])


def test_table_and_plot_take_both_arms(tmp_path, capsys):
    records = {FCFS.name: record(in_time=5, late=5), HEADWAY.name: record(in_time=9, late=1)}
    data = {
        "engine": "simulated",
        "broker": "embedded",
        "killed": "an agent",
        "arms": {name: arm_figures(each) for name, each in records.items()},
    }

    print_table(data)
    plot(records, ARMS, duration_s=20.0, file=tmp_path / "results" / "demo.png")

    printed = capsys.readouterr().out
    for text in ("FCFS", "Headway", "50.0%", "90.0%", "evictions", "model swaps", "an agent"):
        assert text in printed
    assert (tmp_path / "results" / "demo.png").stat().st_size > 0
    assert mpl.get_backend().lower() == "agg"


def test_totals_include_killed_processes():
    totals = AgentTotals()
    for incarnation, evicted in (("first", 3), ("second", 1)):
        totals.statuses["a", incarnation] = InstanceStatus(
            instance_id="a",
            incarnation=incarnation,
            seq=1,
            at=1.0,
            engine="simulated",
            device="cpu",
            running=2,
            totals=InstanceTotals(evicted=evicted, swaps=1),
        )

    assert totals.counts() == {"swaps": 2, "evicted": 4, "swapped_out": 0, "relegated": 0}
