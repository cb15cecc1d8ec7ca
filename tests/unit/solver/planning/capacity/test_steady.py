"""A number that follows a need upwards at once, and downwards after a time."""

from solver.planning.capacity.steady import Need, SteadyNumber


def numbers(
    *needs: tuple[float, int, int], first: int = 4, down_after_s: float = 10.0
) -> list[int]:
    """Numbers after needs (time, least, kept), from *first* at time 0."""
    steady = SteadyNumber(first, 0.0, down_after_s=down_after_s)
    return [steady.observe(Need(least=least, kept=kept), at) for at, least, kept in needs]


def test_larger_need_is_followed_at_once():
    assert numbers((1.0, 5, 5), (1.1, 9, 9)) == [5, 9]


def test_smaller_need_is_followed_after_the_time():
    assert numbers((1.0, 1, 2), (9.0, 1, 2), (10.9, 1, 2), (11.0, 1, 2)) == [4, 4, 4, 2]


def test_number_falls_to_the_largest_need_of_the_time():
    assert numbers((1.0, 1, 1), (6.0, 3, 3), (11.0, 1, 1), (16.0, 1, 1), (21.0, 1, 1)) == [
        *(4, 4, 3, 3),
        1,
    ]


def test_need_holds_until_the_next_one():
    """The first need ends at 100, so that the number may not fall before 110."""
    assert numbers((0.0, 4, 4), (100.0, 1, 1), (109.0, 1, 1), (110.0, 1, 1)) == [4, 4, 4, 1]


def test_need_within_the_band_changes_nothing():
    assert numbers((1.0, 2, 5), (50.0, 4, 9), (90.0, 1, 4), (200.0, 3, 4)) == [4, 4, 4, 4]


def test_number_falls_to_zero_and_rises_again():
    assert numbers((1.0, 0, 0), (11.0, 0, 0), (12.0, 1, 1)) == [4, 0, 1]
