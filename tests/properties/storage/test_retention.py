"""The policies of stored files."""

from hypothesis import given
from hypothesis import strategies as st

from solver.storage.quota import Use, excess
from solver.storage.retention import broken_off, expires_at, sweep

NOW = 1_000_000.0
GRACE_S = 1000.0
IDS = st.sampled_from([f"f{number}" for number in range(8)])
TIMES = st.floats(NOW - 3 * GRACE_S, NOW, allow_nan=False)
LIVES = st.none() | st.floats(1.0, 1e6)
COUNTS = st.integers(0, 100)


@given(requested_s=LIVES, kept_s=LIVES)
def test_a_file_expires_as_early_as_client_and_retention_say(
    requested_s: float | None, kept_s: float | None
):
    at = expires_at(NOW, requested_s=requested_s, kept_s=kept_s)
    limits = [NOW + life for life in (requested_s, kept_s) if life is not None]

    assert (at is None) == (not limits)
    assert at is None or all(at <= limit for limit in limits)
    assert at is None or at in limits


@given(
    bodies=st.dictionaries(IDS, TIMES),
    rows=st.dictionaries(IDS, st.booleans()),
)
def test_a_sweep_deletes_only_old_bodies_without_a_row_and_repairs_every_mark(
    bodies: dict[str, float], rows: dict[str, bool]
):
    found = sweep(bodies, rows, now=NOW, grace_s=GRACE_S)
    marked = {each for each, lost in rows.items() if lost}

    assert found.orphans.isdisjoint(rows)
    assert all(bodies[each] < NOW - GRACE_S for each in found.orphans)
    old = {each for each, made_at in bodies.items() if made_at < NOW - GRACE_S}
    assert found.orphans == old - rows.keys()
    assert (marked | found.lost) - found.found == rows.keys() - bodies.keys()
    assert not found.lost & found.found


@given(
    bodies=st.dictionaries(IDS, TIMES),
    rows=st.dictionaries(IDS, st.booleans()),
)
def test_a_second_sweep_finds_nothing(bodies: dict[str, float], rows: dict[str, bool]):
    found = sweep(bodies, rows, now=NOW, grace_s=GRACE_S)
    left = {each: at for each, at in bodies.items() if each not in found.orphans}
    marked = {each for each, lost in rows.items() if lost} | found.lost
    marks = {each: each in marked - found.found for each in rows}

    again = sweep(left, marks, now=NOW, grace_s=GRACE_S)

    assert not again.orphans | again.lost | again.found


@given(uploads=st.dictionaries(IDS, TIMES))
def test_only_old_uploads_are_broken_off(uploads: dict[str, float]):
    broken = broken_off(uploads, now=NOW, grace_s=GRACE_S)

    assert all((uploads[each] < NOW - GRACE_S) == (each in broken) for each in uploads)


@given(sizes=st.lists(st.integers(0, 40)), max_files=COUNTS, max_bytes=COUNTS)
def test_admitted_files_never_exceed_a_limit_and_a_refusal_names_one(
    sizes: list[int], max_files: int, max_bytes: int
):
    allowed = Use(max_files, max_bytes)
    used = Use(0, 0)
    for size in sizes:
        found = excess(used, allowed, added_bytes=size)
        after = Use(used.num_files + 1, used.num_bytes + size)
        fits = after.num_files <= max_files and after.num_bytes <= max_bytes
        assert (found is None) == fits
        if found is None:
            used = after
        elif found.limit == "max_files":
            assert (found.allowed, found.used) == (max_files, used.num_files)
        else:
            assert (found.allowed, found.used) == (max_bytes, used.num_bytes)

    assert used.num_files <= max_files
    assert used.num_bytes <= max_bytes
