"""What is deleted from the store, and when."""

from collections.abc import Mapping
from dataclasses import dataclass

from shared.contracts.base import Seconds, UnixTime


def expires_at(
    created_at: UnixTime, *, requested_s: Seconds | None, kept_s: Seconds | None
) -> UnixTime | None:
    """
    Time at which a new file expires: the earlier of what the client requests and what is kept.

    Args:
        created_at: Time of the file.
        requested_s: Life that the client requests; None for no end.
        kept_s: Longest life for the tenant and purpose; None for no end.

    Returns:
        The time; None if the file never expires.
    """
    lives = [life for life in (requested_s, kept_s) if life is not None]
    return created_at + min(lives) if lives else None


@dataclass(frozen=True, slots=True)
class Sweep:
    """Differences between the rows and the bodies of files."""

    orphans: frozenset[str]
    """Bodies to delete: their files have no row."""
    lost: frozenset[str]
    """Files to mark as lost: they have no body."""
    found: frozenset[str]
    """Files marked as lost whose body is there again."""


def sweep(
    bodies: Mapping[str, UnixTime],
    rows: Mapping[str, bool],
    *,
    now: UnixTime,
    grace_s: Seconds,
) -> Sweep:
    """
    Compare bodies with rows.

    A body gets its row after it is complete, and loses it before it is deleted; so both kinds of
    difference are normal for a short time, and only bodies older than *grace_s* are orphans. A file
    is marked as lost without a grace, since a row without a body is never normal, and the mark is
    taken back when the body is there. *bodies* must be read before *rows* for orphans, and must
    still lack a body after *rows* were read for a loss: the caller checks each loss again.

    Args:
        bodies: Id of each body -> time at which the id was made.
        rows: Id of each file -> True if the file is marked as lost.
        now: Unix time in seconds.
        grace_s: Age from which a body without a row is an orphan.
    """
    return Sweep(
        orphans=frozenset(
            each for each, made_at in bodies.items() if each not in rows and made_at < now - grace_s
        ),
        lost=frozenset(each for each, lost in rows.items() if not lost and each not in bodies),
        found=frozenset(each for each, lost in rows.items() if lost and each in bodies),
    )


def broken_off(uploads: Mapping[str, UnixTime], *, now: UnixTime, grace_s: Seconds) -> set[str]:
    """Uploads that are older than *grace_s*; an upload in progress is never as old."""
    return {each for each, made_at in uploads.items() if made_at < now - grace_s}
