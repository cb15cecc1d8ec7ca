"""Index of KV blocks with a copy in host memory."""

from hypothesis import given
from hypothesis import strategies as st

from services.agent.backends.host_index import HostIndex


def chain(*names: str) -> list[bytes]:
    """Block hashes of a sequence; each hash covers all tokens up to the block's end."""
    return ["/".join(names[: end + 1]).encode() for end in range(len(names))]


def test_blocks_are_stored_once() -> None:
    index = HostIndex(8)

    assert index.store(chain("a", "b")) == [0, 1]
    assert index.store(chain("a", "b", "c")) == [2]
    assert index.store(chain("a", "b", "c")) == []
    assert index.num_used == 3
    assert index.slots(chain("a", "b", "c")) == [0, 1, 2]


def test_known_prefix_ends_where_sequences_diverge() -> None:
    index = HostIndex(8)
    index.store(chain("a", "b", "c"))

    assert index.num_known(chain("a", "b", "d")) == 2
    assert index.num_known(chain("d", "b", "c")) == 0
    assert index.num_known([]) == 0


def test_least_recently_used_sequence_loses_its_last_block_first() -> None:
    index = HostIndex(5)
    index.store(chain("a", "b", "c"))
    index.store(chain("x", "y"))
    index.touch(chain("a", "b", "c"))
    slots = index.store(chain("k"))

    assert slots == [4]
    assert index.num_known(chain("x", "y")) == 1
    assert index.num_known(chain("a", "b", "c")) == 3


def test_shared_prefix_is_kept_as_long_as_its_most_recent_user() -> None:
    index = HostIndex(4)
    index.store(chain("a", "b", "c"))
    index.store(chain("a", "x"))
    index.store(chain("k", "l"))

    assert index.num_known(chain("a", "b", "c")) == 1
    assert index.num_known(chain("a", "x")) == 2


def test_sequence_larger_than_the_memory_is_stored_partly() -> None:
    index = HostIndex(3)
    index.store(chain("x"))

    assert len(index.store(chain("a", "b", "c", "d"))) == 3
    assert index.store(chain("a", "b", "c", "d", "e")) == []
    assert index.num_known(chain("a", "b", "c", "d")) == 3


def test_release_frees_blocks_except_prefixes_of_other_requests() -> None:
    index = HostIndex(5)
    index.store(chain("a", "b", "c", "d"))
    index.store(chain("a", "b", "x"))
    index.release(chain("a", "b", "c", "d", "e"))
    assert index.num_known(chain("a", "b", "c")) == 2

    assert sorted(index.store(chain("k", "l"))) == [2, 3]
    assert index.num_known(chain("a", "b", "x")) == 3
    index.release(chain("a", "b", "x"))
    assert index.num_used == 2


def test_store_without_memory_and_after_a_clear_is_empty() -> None:
    none, some = HostIndex(0), HostIndex(4)
    some.store(chain("a", "b"))
    some.clear()

    assert none.store(chain("a")) == []
    assert (some.num_used, some.num_known(chain("a"))) == (0, 0)
    assert some.store(chain("c")) == [0]


SEQUENCES = st.lists(st.sampled_from("abc"), min_size=1, max_size=6)
ACTIONS = st.sampled_from(["store", "store", "store", "release", "clear"])


@given(st.integers(0, 8), st.lists(st.tuples(ACTIONS, SEQUENCES), max_size=40))
def test_index_and_slots_always_agree(num_slots: int, actions: list[tuple[str, list[str]]]) -> None:
    """Memory that is filled as the index says always has the content that the index names."""
    index = HostIndex(num_slots)
    memory: dict[int, bytes] = {}
    for action, names in actions:
        hashes = chain(*names)
        if action == "clear":
            index.clear()
        elif action == "release":
            index.release(hashes)
        else:
            known = index.num_known(hashes)
            slots = index.store(hashes)
            memory.update(zip(slots, hashes[known:], strict=False))
            assert known + len(slots) == min(len(hashes), num_slots)
            assert set(slots) <= set(range(num_slots))

        assert index.num_used <= num_slots
        for _, others in actions:
            prefix = chain(*others)[: index.num_known(chain(*others))]
            assert [memory[slot] for slot in index.slots(prefix)] == prefix
