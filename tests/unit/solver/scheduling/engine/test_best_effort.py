"""Best-effort work beside interactive work: limits and preemption of best-effort work."""

from dataclasses import replace
from math import inf

import pytest

from shared.contracts.base import RequestId
from tests.unit.solver.scheduling.best_effort_rig import CHAT, DUMP, OPTIONS, Rig


def test_best_effort_takes_what_the_pace_leaves() -> None:
    """A decode with 1000 tokens of context takes 1.1 of 100 ms; 989 tokens remain."""
    rig = Rig()
    rig.start("chat", CHAT, computed=1000, outputs=1)
    rig.wait("dump", DUMP, prompt=8000)
    decision = rig.decide()

    assert list(decision.order) == ["dump"]
    assert decision.token_budget == 990


def test_a_steady_pace_holds_regardless_of_saved_or_lost_time() -> None:
    """
    With a steady pace, saved time is not spent, and a request with a late first token still sets a
    limit; in QoServe both differ.
    """
    steady, saving = Rig(), Rig(replace(OPTIONS, steady_pace=False))
    for rig in (steady, saving):
        rig.start("chat", CHAT, computed=1000, outputs=1)
        rig.wait("dump", DUMP, prompt=8000)

    assert steady.decide(0.0).token_budget == steady.decide(5.0).token_budget == 990
    assert saving.decide(0.0).token_budget == 2500


def test_offline_decodes_set_no_pace() -> None:
    rig = Rig()
    rig.start("dump", DUMP, computed=1000, outputs=1)
    rig.wait("more", DUMP, prompt=8000)

    assert rig.decide().token_budget == 2500


def test_waiting_online_work_takes_the_kv_of_offline_decodes() -> None:
    rig = Rig()
    rig.start("done", DUMP, computed=1002, outputs=3)
    rig.start("new", DUMP, computed=1001, outputs=2)
    rig.free_kv_tokens = 100
    rig.wait("chat", CHAT, prompt=1000)
    decision = rig.decide()

    assert decision.preempted == {"new"}
    assert next(iter(decision.order)) == "chat"


def test_offline_decodes_are_preempted_only_if_enabled() -> None:
    rig = Rig(replace(OPTIONS, best_effort_yields=False))
    rig.start("new", DUMP, computed=1001, outputs=2)
    rig.free_kv_tokens = 100
    rig.wait("chat", CHAT, prompt=1000)

    assert rig.decide().preempted == frozenset()


def test_offline_work_makes_room_before_online_decodes_run_out() -> None:
    rig = Rig()
    rig.start("chat", CHAT, computed=1000, outputs=1)
    rig.start("dump", DUMP, computed=1001, outputs=2)
    rig.free_kv_tokens = 16

    assert rig.decide().preempted == {"dump"}


def test_offline_work_does_not_begin_in_the_kv_reserve() -> None:
    rig = Rig(replace(OPTIONS, best_effort_kv_reserve=0.5))
    rig.start("chat", CHAT, computed=1000, outputs=1)
    rig.wait("dump", DUMP, prompt=6000)
    rig.free_kv_tokens = 11_000
    in_reserve = list(rig.decide().order)
    rig.free_kv_tokens = 20_000

    assert in_reserve == []
    assert list(rig.decide().order) == ["dump"]


def test_a_lull_does_not_fill_the_engine_with_offline_decodes() -> None:
    """
    After the last online request, its limit still applies: 50,000 tokens of context in 50 ms.
    """
    rig = Rig(replace(OPTIONS, best_effort_decode_share=0.5))
    rig.start("chat", CHAT, computed=1000, outputs=1)
    rig.decide()
    rig.policy.remove(RequestId("chat"))
    rig.running = []
    rig.start("dump", DUMP, computed=40_000, prompt=40_000, outputs=1)
    rig.wait("more", DUMP, prompt=11_000)

    assert list(rig.decide().order) == []


def test_the_pace_ends_when_interactive_traffic_has_ended() -> None:
    """Ten seconds after the last token of online work, offline work fills the engine again."""
    rig = Rig(replace(OPTIONS, best_effort_decode_share=0.5))
    rig.start("chat", CHAT, computed=1000, outputs=1)
    rig.decide(1.0)
    rig.policy.remove(RequestId("chat"))
    rig.running = []
    rig.start("dump", DUMP, computed=40_000, prompt=40_000, outputs=1)
    rig.wait("more", DUMP, prompt=11_000)
    in_lull = list(rig.decide(10.0).order)

    assert in_lull == []
    assert list(rig.decide(11.5).order) == ["more"]


@pytest.mark.parametrize(("prompt", "held"), [(400, set()), (600, {"dump"})])
def test_running_best_effort_pauses_instead_of_cutting_an_online_chunk(
    prompt: int, held: set[str]
) -> None:
    """The running best-effort request is held, since a cap would also cut the online chunk."""
    rig = Rig()
    rig.start("chat", CHAT, computed=1000, outputs=1)
    rig.start("dump", DUMP, computed=16, prompt=8000)
    rig.wait("new", CHAT, prompt=prompt)
    decision = rig.decide()

    assert next(iter(decision.order)) == "new"
    assert decision.held == held
    assert (decision.per_request_cap or inf) >= prompt
