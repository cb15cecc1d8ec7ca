"""Copies of Headway's KV connector without vLLM: the scheduler's and the worker's side together."""

from hypothesis import given
from hypothesis import strategies as st

from services.agent.backends.host_index import HostIndex
from services.agent.backends.vllm.kv.checkpoints import Checkpoints
from tests.unit.agent.backends.checkpointing_engine import BLOCK_TOKENS, Engine, Request


def test_preempted_request_gets_all_its_full_blocks_back() -> None:
    engine = Engine()
    request = engine.add("a", "abcdefghijklmn")
    engine.iterate({"a": 13})
    engine.preempt("a")
    engine.iterate({"a": 1})

    assert request.num_computed_tokens == 13
    assert engine.store.totals.restored_blocks == 3


def test_full_blocks_of_an_aborted_request_serve_the_next_run() -> None:
    engine = Engine()
    engine.add("a", "abcdefghijklmn")
    engine.iterate({"a": 14})
    engine.abort("a")
    # Allocates the same blocks, in the iteration that saves them.
    engine.add("thief", "q" * 20, checkpointed=False)
    engine.iterate({"thief": 20})
    again = engine.add("b", "abcdefghijklmno")
    engine.iterate({"b": 1})

    assert again.num_computed_tokens == 13
    engine.check(again)


def test_no_block_of_an_aborted_iteration_is_saved() -> None:
    engine = Engine()
    engine.add("a", "abcdefghijklmn")
    engine.iterate({"a": 6})
    engine.iterate({"a": 6}, aborted=frozenset("a"))
    engine.iterate({})

    assert engine.index.num_used == 1
    engine.iterate({"a": 6})
    engine.iterate({})
    assert engine.index.num_used == 3


def test_request_aborted_once_is_saved_completely_afterwards() -> None:
    engine = Engine()
    request = engine.add("a", "abcdefghijklmn")
    engine.iterate({"a": 6})
    engine.iterate({"a": 7}, aborted=frozenset("a"))
    engine.iterate({"a": 7})
    engine.preempt("a")
    engine.iterate({"a": 1})

    assert request.num_computed_tokens == 13


def test_blocks_without_checkpointing_are_not_saved_but_restored() -> None:
    engine = Engine()
    engine.add("online", "abcdefghi", checkpointed=False)
    engine.iterate({"online": 9})
    engine.iterate({})
    assert engine.index.num_used == 0

    engine.add("offline", "abcdefghi")
    engine.iterate({"offline": 9})
    engine.add("second", "abcdefghxy", checkpointed=False)
    engine.iterate({"second": 1})
    assert engine.requests["second"].num_computed_tokens == 9


def test_blocks_found_on_the_device_are_also_saved() -> None:
    checkpoints = Checkpoints(HostIndex(8), block_tokens=BLOCK_TOKENS)
    request = Request("a", "abcdefghijklmn", blocks=[5, 6, 7, 8])
    checkpoints.track(request, "a")
    assert checkpoints.match(request, 8) == 0
    checkpoints.admit(request, request.blocks, 0)
    request.num_computed_tokens = 8
    step = checkpoints.plan({"a": 5}, lambda _: request.blocks).step
    request.num_computed_tokens = 13
    checkpoints.complete(step)

    saves = checkpoints.plan({}, lambda _: []).saves
    assert [(save.block, save.slot) for save in saves] == [(5, 0), (6, 1), (7, 2)]


def test_only_blocks_that_the_device_lacks_are_loaded() -> None:
    engine = Engine()
    engine.add("a", "abcdefghijklmn")
    engine.iterate({"a": 14})
    request = Request("b", "abcdefghijklmn")
    assert engine.checkpoints.match(request, 4) == 8
    engine.checkpoints.admit(request, [40, 41, 42, 43], 8)

    loads = engine.checkpoints.plan({}, lambda _: []).loads
    assert [load.block for load in loads] == [41, 42]


def test_one_token_is_left_to_compute() -> None:
    engine = Engine()
    engine.add("a", "abcdefghi")
    engine.iterate({"a": 9})

    assert engine.checkpoints.match(Request("b", "abcdefgh"), 0) == 4


STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            ["compute", "compute", "compute", "drop", "preempt", "abort", "finish", "clear"]
        ),
        st.sets(st.integers(0, 4), min_size=1),
        st.integers(1, 9),
    ),
    max_size=40,
)


@given(STEPS, st.integers(1, 12))
def test_every_block_counted_as_computed_is_correct(
    steps: list[tuple[str, set[int], int]], num_slots: int
) -> None:
    """
    KV stays correct under preemptions, drops, ends and clears in any order, within the budget.
    """
    engine = Engine(num_slots=num_slots)
    texts = ["aaaabbbbccccddddee", "aaaabbbbxxxxyyyyzz", "aaaabbbb", "qrstuvwxyzqrstuvwx", "aaaac"]
    for action, chosen, count in steps:
        names = [str(number) for number in sorted(chosen)]
        for name in names:
            if name not in engine.requests:
                engine.add(name, texts[int(name)], checkpointed=name != "2")
        if action in {"preempt", "abort", "finish"}:
            for name in names:
                getattr(engine, action)(name)
        elif action == "clear":
            engine.checkpoints.clear()
        room = {
            name: min(count, request.num_tokens - request.num_computed_tokens)
            for name, request in engine.requests.items()
            if name in names and request.blocks
        }
        counts = {name: left for name, left in room.items() if left > 0}
        counts |= {name: 1 for name in names if name in engine.requests and name not in room}
        is_aborted = frozenset(names[:1]) & counts.keys() if action == "drop" else frozenset()
        engine.iterate(counts, aborted=is_aborted)
        assert engine.index.num_used <= num_slots
        assert not engine.store.failed
