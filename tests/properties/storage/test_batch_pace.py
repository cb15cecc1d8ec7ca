"""The pace of a batch: engines are busy, queues are short, and limits hold."""

from hypothesis import given
from hypothesis import strategies as st

from solver.storage.pace import LEAST_MARGIN_S, MOST_MARGIN_S, Pace, PaceLimits, due_at

LIMITS = PaceLimits(min_waiting=8, max_waiting=200, max_outstanding=500, lead_s=5.0)
FOREVER_S = 1e9
COUNTS = st.integers(0, 10_000)


@given(st.floats(0.0, 1e6), st.floats(1.0, 1e6), st.floats(0.0, 0.9999))
def test_a_line_is_due_within_the_window_and_after_now(begin: float, length: float, share: float):
    end, now = begin + length, begin + share * length
    due = due_at(begin, end, now)

    assert due <= end
    assert due > now or end <= now
    assert end - due <= MOST_MARGIN_S
    assert due == end or due > now + LEAST_MARGIN_S


@given(
    waiting=COUNTS,
    outstanding=COUNTS,
    left=COUNTS,
    time_left_s=st.floats(-10.0, 1e6),
    starts=st.lists(st.integers(0, 500), max_size=30),
)
def test_bounds_hold_in_any_state(
    waiting: int, outstanding: int, left: int, time_left_s: float, starts: list[int]
):
    pace, total = Pace(LIMITS), 0
    for second, number in enumerate(starts):
        total += number
        pace.observe(total, float(second))
    allowed = pace.allowance(
        waiting=waiting,
        outstanding=outstanding,
        left=left,
        time_left_s=time_left_s,
        now=float(len(starts)),
    )

    assert allowed >= 0
    if allowed:
        assert waiting + allowed <= LIMITS.max_waiting
        assert outstanding + allowed <= min(left, LIMITS.max_outstanding)


def served(pace: Pace, *, capacity: int, service_s: int, seconds: int) -> tuple[float, int]:
    """
    Mean number of busy slots in the second half, and the most lines that waited, of an engine with
    *capacity* slots.
    """
    waiting, started, busy = 0, 0, 0
    running: list[int] = []
    most = 0
    for now in range(seconds):
        running = [end for end in running if end > now]
        begun = min(waiting, capacity - len(running))
        running += [now + service_s] * begun
        waiting, started = waiting - begun, started + begun
        pace.observe(started, float(now))
        waiting += pace.allowance(
            waiting=waiting,
            outstanding=waiting + len(running),
            left=1_000_000,
            time_left_s=FOREVER_S,
            now=float(now),
        )
        most = max(most, waiting)
        if now >= seconds // 2:
            busy += len(running)
    return busy / (seconds - seconds // 2), most


def test_engines_are_kept_busy_by_a_short_queue():
    busy, waiting = served(Pace(LIMITS), capacity=32, service_s=4, seconds=200)

    assert busy >= 31.0
    assert waiting <= 100


def test_running_lines_do_not_count_however_long_they_take():
    """With 100 s for a line and 64 slots, two lines start in three seconds; all slots are used."""
    busy, _ = served(Pace(LIMITS), capacity=64, service_s=100, seconds=1000)

    assert busy >= 63.0


def test_more_lines_wait_while_the_window_is_too_short():
    pace = Pace(LIMITS)
    for second in range(11):
        pace.observe(second * 4, float(second))

    def allowed(time_left_s: float) -> int:
        return pace.allowance(
            waiting=0, outstanding=0, left=1000, time_left_s=time_left_s, now=10.0
        )

    assert allowed(FOREVER_S) == 20
    assert allowed(1000 / 4) == LIMITS.max_waiting


def test_a_refusal_pauses_and_limits_what_is_in_the_mesh():
    pace = Pace(LIMITS)
    pace.refused(admitted=3, retry_after_s=2.0, now=0.0)

    def allowed(outstanding: int, now: float) -> int:
        return pace.allowance(
            waiting=0, outstanding=outstanding, left=1000, time_left_s=FOREVER_S, now=now
        )

    assert allowed(3, 1.9) == 0
    assert allowed(3, 2.0) == 2
    assert allowed(0, 2.0) == 5
    assert allowed(3, 20.0) == LIMITS.min_waiting
