"""Lifetime of KV copies: effects of requests' ends, the memory budget, and clearing."""

from services.agent.backends.host_claims import MAX_ABORTED
from tests.unit.agent.backends.checkpointing_engine import Engine


def test_finished_request_leaves_only_prefixes_of_other_requests() -> None:
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


def test_finish_keeps_copies_of_an_aborted_request() -> None:
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


def test_number_of_remembered_aborted_requests_is_bounded() -> None:
    engine = Engine(num_slots=4)
    for number in range(MAX_ABORTED + 1):
        engine.add(f"{number}", f"{number:04}abcd", origin=f"{number}")
        engine.iterate({f"{number}": 8})
        engine.abort(f"{number}")
    engine.iterate({})

    assert engine.index.num_used == 4
    assert len(engine.checkpoints._claims._left) == MAX_ABORTED


def test_request_beyond_the_budget_is_saved_no_further() -> None:
    engine = Engine(num_slots=2)
    engine.add("a", "abcdefghijklmnopqrstuvwxyz")
    for _ in range(6):
        engine.iterate({"a": 4})

    assert engine.index.num_used == 2
    assert engine.store.totals.saved_blocks == 2


def test_clear_returns_memory_and_running_requests_are_saved_again() -> None:
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
