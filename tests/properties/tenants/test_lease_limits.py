"""However requests, messages, stalls and deaths interleave, groupers keep to a limit."""

from hypothesis import given, settings
from hypothesis import strategies as st

from shared.contracts.tenants.policies import LimitKind
from tests.properties.tenants.lease_world import World

OPERATIONS = ("request", "request", "request", "burst", "report", "report", "wait")
TROUBLES = (*OPERATIONS, "kill", "start", "stall", "end")
DELAYS = st.lists(
    st.one_of(st.none(), st.sampled_from((0.0, 0.001, 0.01, 0.3)), st.floats(0.0, 1.5)),
    min_size=1,
    max_size=12,
)


def steps(operations: tuple[str, ...]) -> st.SearchStrategy[list[tuple[str, int, float]]]:
    """Operations, each with a number and the time that passes before it."""
    pauses = st.one_of(st.sampled_from((0.0, 0.02, 0.25)), st.floats(0.0, 8.0))
    return st.lists(
        st.tuples(st.sampled_from(operations), st.integers(0, 30), pauses), max_size=120
    )


def run(  # noqa: C901, PLR0912 - one branch for each operation
    world: World, operations: list[tuple[str, int, float]], largest: int
) -> None:
    """Carry out operations; two of the first three groupers may die, and at least one lives."""
    for _ in range(3):
        world.start()
    deaths = 0
    for what, number, pause_s in operations:
        world.advance(pause_s)
        grouper = world.groupers[number % len(world.groupers)]
        match what:
            case "request":
                world.request(grouper, 1 + number % largest)
            case "burst":
                for _ in range(2 * world.limit):
                    world.request(grouper, 1)
            case "report":
                for each in world.living:
                    world.report(each)
            case "wait":
                for _ in range(1 + number):
                    world.advance(0.25)
                    for each in world.living:
                        world.report(each)
            case "kill" if deaths < 2 and not grouper.is_dead:
                deaths += 1
                world.kill(grouper)
            case "start" if len(world.groupers) < 6:
                world.start()
            case "stall":
                grouper.stalled_until = world.now + number / 5
            case "end":
                world.end(number)
            case _:
                pass


@settings(max_examples=150, deadline=None)
@given(steps(TROUBLES), DELAYS, st.integers(1, 40), st.integers(1, 5))
def test_no_minute_has_more_requests_than_the_limit(
    operations: list[tuple[str, int, float]],
    delays: list[float | None],
    limit: int,
    largest: int,
) -> None:
    """In no sliding minute do all groupers together admit more than the limit."""
    run(World(limit=limit, kind=LimitKind.REQUESTS, delays=delays), operations, largest)


@settings(max_examples=100, deadline=None)
@given(steps(TROUBLES), DELAYS, st.integers(1, 40), st.integers(1, 5))
def test_never_more_requests_are_open_than_the_limit(
    operations: list[tuple[str, int, float]],
    delays: list[float | None],
    limit: int,
    largest: int,
) -> None:
    """The requests in progress of the groupers that live are at most the limit."""
    run(World(limit=limit, kind=LimitKind.CONCURRENT, delays=delays), operations, largest)
