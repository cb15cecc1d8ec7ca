"""Traffic of `ops.bench doors`."""

from collections import Counter
from itertools import pairwise

import pytest

from ops.bench.doors_cells import CELLS, SHARES
from ops.bench.doors_fronts import DOORS, InTurn, LeastLoaded
from ops.bench.doors_traffic import MakeSession, Session, agent, chat_and_batch, sessions, tiers

MAKERS = pytest.mark.parametrize("make", [chat_and_batch, agent, tiers])
SERVERS = [("m", "u"), ("n", "x"), ("m", "v")]


def load(make: MakeSession, *, seed: int = 3, scale: float = 1.0) -> list[Session]:
    return sessions(make, rate_rps=2.0, seconds=30.0, seed=seed, scale=scale)


@MAKERS
def test_a_seed_determines_the_whole_load(make: MakeSession):
    assert load(make) == load(make)
    assert load(make) != load(make, seed=4)


@MAKERS
def test_slow_motion_changes_times_and_nothing_else(make: MakeSession):
    full, slow = load(make), load(make, scale=3.0)

    assert [each.at_s for each in slow] == pytest.approx([3 * each.at_s for each in full])
    assert [step.branches for each in slow for step in each.steps] == [
        step.branches for each in full for step in each.steps
    ]
    targets = [(each.request_class.slo.ttft_s, each.request_class.slo.ttlt_s) for each in full]
    slow_targets = [(each.request_class.slo.ttft_s, each.request_class.slo.ttlt_s) for each in slow]
    assert slow_targets == [(a and 3 * a, b and 3 * b) for a, b in targets]


@MAKERS
def test_sessions_arrive_in_order_within_the_time(make: MakeSession):
    times = [each.at_s for each in load(make)]

    assert all(first <= second for first, second in pairwise(times))
    assert times[-1] <= 30.0


def test_chats_are_more_than_half_of_chat_and_batch():
    made = sessions(chat_and_batch, rate_rps=50.0, seconds=20.0, seed=1)
    counts = Counter(each.request_class.name for each in made)

    assert counts["chat"] / len(made) == pytest.approx(0.6, abs=0.05)


def test_agents_share_five_beginnings_and_some_ask_three_questions_at_once():
    made = sessions(agent, rate_rps=5.0, seconds=20.0, seed=1)
    begins = {" ".join(each.steps[0].branches[0].words.split()[:400]) for each in made}
    widths = Counter(len(step.branches) for each in made for step in each.steps)

    assert len(begins) == 5
    assert set(widths) == {1, 3}
    assert all(len(each.steps) == 8 and each.key for each in made)


def test_every_cell_has_a_rate_for_each_share_in_rising_order():
    for cell in CELLS.values():
        rates = [cell.rates[load] for load in SHARES]
        assert rates == sorted(rates)


def test_headway_gets_targets_and_clients_only_priorities():
    session = next(each for each in load(agent))
    given = session.request_class

    ours, router = DOORS["headway"], DOORS["vllm-router power_of_two, priority"]
    assert ours.fields(given) == {"slo": {"ttft_s": 2.0, "tbt_s": 0.25}}
    assert ours.headers(session) == {}
    assert router.fields(given) == {"priority": 0}
    assert router.headers(session) == {"x-session-id": session.key}
    assert DOORS["round robin"].fields(given) == {}


def test_a_client_takes_turns_among_the_servers_of_the_model():
    choice = InTurn(SERVERS)

    assert sorted(choice.begin("m") for _ in range(4)) == ["u", "u", "v", "v"]
    assert choice.begin("n") == "x"


def test_a_client_counts_its_open_requests():
    choice = LeastLoaded(SERVERS)
    first, second = choice.begin("m"), choice.begin("m")
    assert {first, second} == {"u", "v"}

    choice.end(second)
    assert choice.begin("m") == second
