"""Usage on disk survives a crash at any moment, and counts every final once."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.estimator.usage.book import UsageBook
from services.estimator.usage.files import REMEMBER_S, UsageFiles
from shared.contracts.tenants.usage import HOUR_S, UsageRequested
from tests.unit.estimator.usage.finals import final

NOW = 10 * HOUR_S


def reopened(directory: Path) -> tuple[UsageFiles, UsageBook]:
    """The files as another process finds them."""
    files, book = UsageFiles(directory), UsageBook()
    assert files.try_lock()
    files.load(book)
    return files, book


def counted(book: UsageBook) -> int:
    rows = book.answer(UsageRequested(reply_to=""))
    return sum(sum(row.requests.values()) for row in rows)


def test_what_was_appended_counts_after_a_restart(tmp_path: Path) -> None:
    """Also the ids are known again, so that a repetition counts once."""
    files, _ = reopened(tmp_path)
    files.append([final("r1"), final("r2")], NOW)
    files.close()
    files, book = reopened(tmp_path)
    files.close()

    assert counted(book) == 2
    assert not book.add(final("r1"))


def test_a_line_that_was_not_written_whole_does_not_count(tmp_path: Path) -> None:
    """It was not acknowledged, and is delivered again."""
    files, _ = reopened(tmp_path)
    files.append([final("r1"), final("r2")], NOW)
    files.close()
    (journal,) = tmp_path.glob("journal-*")
    journal.write_bytes(journal.read_bytes()[:-20])
    files, book = reopened(tmp_path)
    files.append([final("r2")], NOW)
    files.close()
    files, again = reopened(tmp_path)
    files.close()

    assert [counted(book), counted(again)] == [1, 2]


def test_one_process_writes_at_a_time(tmp_path: Path) -> None:
    """A second one has to wait until the first one closes."""
    files, _ = reopened(tmp_path)

    assert not UsageFiles(tmp_path).try_lock()
    files.close()
    assert UsageFiles(tmp_path).try_lock()


def test_old_journals_become_totals(tmp_path: Path) -> None:
    """Compaction leaves the sums unchanged, and deletes the journals."""
    files, _ = reopened(tmp_path)
    files.append([final("r1")], NOW)
    files.close()
    (journal,) = tmp_path.glob("journal-*")
    files, _ = reopened(tmp_path)
    files.compact(journal.stat().st_mtime + REMEMBER_S + 1)
    files.close()
    files, book = reopened(tmp_path)
    files.close()

    assert list(tmp_path.glob("journal-*")) == []
    assert counted(book) == 1


def test_totals_have_no_hours_before_the_first_kept_hour(tmp_path: Path) -> None:
    """They name this hour as the begin of the usage."""
    files, _ = reopened(tmp_path)
    old, kept = final("r1"), final("r2", finished_at=4.0 * HOUR_S)
    files.append([old, kept], NOW)
    files.close()
    (journal,) = tmp_path.glob("journal-*")
    files, _ = reopened(tmp_path)
    files.compact(journal.stat().st_mtime + REMEMBER_S + 1, 3 * HOUR_S)
    files.close()
    files, book = reopened(tmp_path)
    files.close()

    assert (counted(book), book.counts_since) == (1, 3 * HOUR_S)


def test_a_crash_between_totals_and_deletion_counts_nothing_twice(tmp_path: Path) -> None:
    """The totals name the last journal that they contain."""
    files, _ = reopened(tmp_path)
    files.append([final("r1")], NOW)
    files.close()
    (journal,) = tmp_path.glob("journal-*")
    content, at = journal.read_bytes(), journal.stat().st_mtime
    files, _ = reopened(tmp_path)
    files.compact(at + REMEMBER_S + 1)
    files.close()
    journal.write_bytes(content)
    files, book = reopened(tmp_path)
    files.append([final("r2")], NOW)
    files.close()
    files, again = reopened(tmp_path)
    files.close()

    assert [counted(book), counted(again)] == [1, 2]


@settings(max_examples=30, deadline=None)
@given(operations=st.lists(st.sampled_from(("append", "again", "crash", "compact")), max_size=25))
def test_every_final_counts_once(
    tmp_path_factory: pytest.TempPathFactory, operations: list[str]
) -> None:
    """Whatever the order of writing, crashes and compaction, the sum is that of the finals."""
    directory = tmp_path_factory.mktemp("usage")
    files, book = reopened(directory)
    number, is_known = 0, False
    for what in operations:
        if what == "append":
            number, is_known = number + 1, True
            if book.add(final(f"r{number}")):
                files.append([final(f"r{number}")], NOW)
        elif what == "again":
            # Ids in compacted journals are forgotten.
            if is_known and book.add(final(f"r{number}")):
                files.append([final(f"r{number}")], NOW)
        else:
            files.close()
            files, book = reopened(directory)
            if what == "compact":
                newest = max((p.stat().st_mtime for p in directory.glob("journal-*")), default=0)
                files.compact(newest + REMEMBER_S)
                is_known = False
    files.close()
    files, book = reopened(directory)
    files.close()

    assert number == counted(book)
