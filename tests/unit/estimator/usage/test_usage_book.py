"""Usage is counted from finals, each once."""

from services.estimator.usage.book import DAY_S, UsageBook
from shared.contracts.base import ModelName, TenantId
from shared.contracts.tenants.usage import HOUR_S, UsageRequested
from tests.unit.estimator.usage.finals import ACME, final


def test_a_final_that_comes_again_counts_once() -> None:
    """A request that ran twice is metered twice, under its id."""
    book = UsageBook()

    assert [book.add(final("r1")), book.add(final("r1"))] == [True, False]
    (row,) = book.answer(UsageRequested(reply_to=""))
    assert (
        row.prompt_tokens,
        row.completion_tokens,
        row.cached_tokens,
        row.requests,
    ) == (10, 5, 4, {"completed": 1})


def test_tenants_may_use_the_same_id() -> None:
    """Ids are unique within one tenant only."""
    book = UsageBook()
    book.add(final("r1"))

    assert book.add(final("r1", tenant=TenantId("other")))


def test_rows_are_summed_over_what_is_not_asked_for() -> None:
    """By hour, two models of one hour are one row; without `by`, all is one row."""
    book = UsageBook()
    book.add(final("r1"))
    book.add(final("r2", model=ModelName("n")))
    book.add(final("r3", finished_at=3.1 * HOUR_S, outcome="cancelled", prompt_tokens=0))

    by_hour = book.answer(UsageRequested(reply_to="", by=("hour",)))
    whole = book.answer(UsageRequested(reply_to=""))

    assert [(r.hour, r.prompt_tokens) for r in by_hour] == [(2 * HOUR_S, 20), (3 * HOUR_S, 0)]
    assert [row.requests for row in whole] == [{"completed": 2, "cancelled": 1}]


def test_a_question_about_one_tenant_and_time_gets_no_other_rows() -> None:
    """Rows of other tenants and of hours before `since` are left out."""
    book = UsageBook()
    book.add(final("r1"))
    book.add(final("r2", tenant=TenantId("other")))
    book.add(final("r3", finished_at=0.0))

    rows = book.answer(UsageRequested(reply_to="", tenant=ACME, since=2.9 * HOUR_S))

    assert [row.requests for row in rows] == [{"completed": 1}]


def test_hours_before_the_first_kept_hour_are_dropped() -> None:
    """The usage then counts since this hour."""
    book = UsageBook()
    book.add(final("r1", finished_at=2.5 * HOUR_S))
    book.add(final("r2", finished_at=3.0 * HOUR_S))
    book.forget_before(3 * HOUR_S)

    (row,) = book.answer(UsageRequested(reply_to=""))
    assert (row.requests, book.counts_since) == ({"completed": 1}, 3 * HOUR_S)


def test_the_tokens_of_a_day_are_those_of_its_hours() -> None:
    """A budget counts prompts and answers of the present day."""
    book = UsageBook()
    book.add(final("r1"))
    book.add(final("r2", finished_at=DAY_S + 1.0))

    assert {ACME: 15} == book.used_on(0) == book.used_on(1)
    assert book.used_on(2) == {}
