"""When a failed delivery is tried again."""

from shared.contracts.base import Seconds

FIRST_S, FACTOR, LONGEST_S = 5.0, 4.0, 6 * 3600.0
"""Delay after the first failure, growth for each further one, and the longest delay."""
MAX_JITTER = 0.2
"""Largest part of the delay that chance adds, so that deliveries do not come in bursts."""


def retry_delay_s(
    attempts: int,
    *,
    age_s: Seconds,
    give_up_after_s: Seconds,
    retry_after_s: Seconds | None = None,
    chance: float = 0.0,
) -> Seconds | None:
    """
    Time until the next attempt.

    Args:
        attempts: Number of attempts that have failed, at least 1.
        age_s: Time since the event.
        give_up_after_s: Age after which no attempt is made.
        retry_after_s: Least delay by the answer of the receiver; None without one.
        chance: Random number from 0 to 1.

    Returns:
        The delay; None if the next attempt would be too late.
    """
    # The exponent is limited, since a float cannot hold any power.
    delay_s = min(FIRST_S * FACTOR ** min(attempts - 1, 20), LONGEST_S)
    delay_s = max(delay_s, retry_after_s or 0.0) * (1.0 + MAX_JITTER * chance)
    return delay_s if age_s + delay_s <= give_up_after_s else None
