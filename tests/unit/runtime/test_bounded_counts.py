"""Counts by names that clients choose have a bounded number of series."""

from shared.runtime.metrics import OTHER, BoundedCounts


def test_counts_are_kept_by_name_and_labels():
    counts = BoundedCounts()
    counts.add("acme", "interactive")
    counts.add("acme", "interactive", number=2)
    counts.add("acme", "best_effort", number=0)

    assert dict(counts.samples()) == {("acme", "interactive"): 3, ("acme", "best_effort"): 0}


def test_names_beyond_the_bound_are_counted_together():
    counts = BoundedCounts(most=2)
    for name in ("a", "b", "c", "d", "a"):
        counts.add(name)

    assert dict(counts.samples()) == {("a",): 2, ("b",): 1, (OTHER,): 2}
