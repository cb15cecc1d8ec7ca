"""Ids of files."""

from hypothesis import given
from hypothesis import strategies as st

from shared.store.ids import (
    created_at_of,
    folder_ends_at,
    folder_of,
    ids_in,
    is_file_id,
    is_folder,
    new_file_id,
)

TIMES = st.floats(1.6e9, 4e9).map(lambda at: round(at, 3))


@given(TIMES)
def test_an_id_has_its_time_and_its_folder(at: float):
    file_id = new_file_id(at)
    first, end = ids_in(folder_of(file_id))

    assert is_file_id(file_id)
    assert is_folder(folder_of(file_id))
    assert abs(created_at_of(file_id) - at) < 0.001
    assert first <= file_id < end
    assert created_at_of(file_id) < folder_ends_at(folder_of(file_id))


@given(TIMES, TIMES)
def test_ids_are_ordered_by_time(first: float, second: float):
    if first + 0.001 < second:
        assert new_file_id(first) < new_file_id(second)


@given(st.text(max_size=40))
def test_other_text_is_refused(text: str):
    assert not is_file_id(text)
    assert not is_file_id(f"{new_file_id(1.7e9)}{text or '/'}")


def test_ids_of_the_same_time_differ():
    assert len({new_file_id(1.7e9) for _ in range(100)}) == 100
