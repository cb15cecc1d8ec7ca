"""How long copies of KV live: their requests end, their budget is spent, all are cleared."""

from services.agent.backends.host_claims import MAX_LEFT
from tests.unit.agent.backends.checkpointing_engine import Engine


def test_a_finished_request_leaves_nothing_but_what_another_begins_with() -> None:
    engine = Engine()
    engine.add("a", "abcdefghijklmnop")
    engine.add("b", "abcdefgh")
    engine.iterate({"a": 16, "b": 8})
    engine.finish("a")
    engine.iterate({})
    assert engine.index.num_used == 2
    engine.requests["b"].text += "xyzw"
    engine.iterate({"b": 4})
    engine.requests["b"].text += "uvst"
    engine.iterate({"b": 4})
    engine.iterate({})
    assert engine.index.num_used == 4
    engine.finish("b")
    assert engine.index.num_used == 0


def test_the_end_of_one_takes_nothing_from_an_aborted_one_that_is_as_long_as_it_gets() -> None:
    engine = Engine()
    engine.add("a/1", "abcdefgh", origin="a")
    engine.add("b/1", "abcdefghijkl", origin="b")
    engine.iterate({"a/1": 8, "b/1": 12})
    engine.abort("a/1")
    engine.iterate({})
    engine.finish("b/1")
    assert engine.index.num_used == 2

    engine.add("a/2", "abcdefghXYZ", origin="a")
    engine.iterate({"a/2": 1})
    assert engine.requests["a/2"].num_computed_tokens == 9
    engine.finish("a/2")
    assert engine.index.num_used == 0


def test_what_was_aborted_elsewhere_since_is_remembered_up_to_a_bound() -> None:
    engine = Engine(num_slots=4)
    for number in range(MAX_LEFT + 1):
        engine.add(f"{number}", f"{number:04}abcd", origin=f"{number}")
        engine.iterate({f"{number}": 8})
        engine.abort(f"{number}")
    engine.iterate({})

    assert engine.index.num_used == 4
    assert len(engine.checkpoints._claims._left) == MAX_LEFT


def test_a_request_beyond_the_budget_is_saved_no_further() -> None:
    engine = Engine(num_slots=2)
    engine.add("a", "abcdefghijklmnopqrstuvwxyz")
    for _ in range(6):
        engine.iterate({"a": 4})

    assert engine.index.num_used == 2
    assert engine.store.totals.saved_blocks == 2


def test_after_a_clear_running_requests_are_saved_anew_and_their_memory_was_given_back() -> None:
    engine = Engine()
    engine.add("a", "abcdefghijklmn")
    engine.iterate({"a": 8})
    engine.iterate({})
    engine.checkpoints.clear()
    assert (engine.index.num_used, engine.checkpoints.has_work) == (0, True)

    engine.iterate({})
    assert not engine.store._slots.any()
    engine.iterate({"a": 1})
    engine.iterate({})
    assert engine.index.num_used == 2
