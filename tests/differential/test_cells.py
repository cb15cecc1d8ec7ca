"""The bodies that are compared with vLLM's own server."""

from tests.differential.cells import CELLS, asked
from tests.differential.known import known_differences

FULL = 480


def test_each_cell_has_a_body_and_at_most_a_twentieth_of_all_bodies():
    bodies = asked(0, FULL)
    for cell in CELLS:
        assert 1 <= sum(body.cell is cell for body in bodies) <= FULL / 20


def test_equal_seeds_give_equal_bodies():
    assert asked(3, 40) == asked(3, 40)


def test_at_most_ten_differences_are_known():
    assert 1 <= len(known_differences()) <= 10
