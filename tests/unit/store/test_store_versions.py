"""Which code can use which schema."""

import pytest

from shared.store.migrating import Schema


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        (Schema(0, 0), "has no schema: run `headway store migrate`"),
        (Schema(2, 1), "has revision 2, and this version of Headway needs 3: run `headway store"),
        (Schema(3, 1), None),
        (Schema(3, 3), None),
        (Schema(5, 3), None),
        (Schema(5, 4), "needs code of revision 4 or later, and this version of Headway has 3"),
    ],
)
def test_a_schema_is_usable_if_it_is_new_enough_and_allows_the_code(
    schema: Schema, problem: str | None
):
    found = schema.problem(head=3)

    assert (found is None) == (problem is None)
    assert (problem or "") in (found or "")
