"""Groupers share a limit fully, and soon."""

import pytest

from shared.contracts.tenants.policies import LimitKind
from solver.tenants.leases import SILENCE_S, WINDOW_S
from tests.properties.tenants.lease_world import START, TENANT, Grouper, World


def loaded(world: World, groupers: list[Grouper], *, per_s: float, seconds: float) -> None:
    """Requests that arrive evenly at all of *groupers*, which report every quarter of a second."""
    spacing_s = 1 / per_s
    reported_at, until, number = world.now, world.now + seconds, 0
    while world.now < until:
        world.advance(spacing_s)
        number += 1
        world.request(groupers[number % len(groupers)], 1)
        if world.now - reported_at >= 0.25:
            reported_at = world.now
            for each in world.living:
                world.report(each)


def world_of(num: int, *, limit: int = 600, delay_s: float = 0.01) -> World:
    """Groupers of which one has become the allocator."""
    world = World(limit=limit, kind=LimitKind.REQUESTS, delays=[delay_s])
    for _ in range(num):
        world.start()
    world.request(world.groupers[0], 1)
    for _ in range(12):
        world.advance(0.25)
        for each in world.living:
            world.report(each)
    return world


def test_a_lone_busy_grouper_gets_the_whole_limit_within_seconds() -> None:
    """One of three groupers gets all requests: after 3 s it has admitted nearly the limit."""
    world = world_of(3)

    loaded(world, world.groupers[:1], per_s=600, seconds=3.0)

    assert world.used_within(world.now) >= 0.97 * 600


def test_groupers_at_four_times_the_limit_use_nearly_all_of_it() -> None:
    """Three groupers at 4x the limit admit at least 95 % of it in later minutes, and not more."""
    world = world_of(3)

    loaded(world, world.groupers, per_s=40, seconds=200.0)

    late = [world.used_within(START + at) for at in range(120, 195, 5)]
    assert min(late) >= 0.95 * 600
    assert max(late) <= 600


def test_the_limit_is_divided_again_when_the_load_moves() -> None:
    """A grouper that takes over the load gets the permits that the other one no longer wants."""
    world = world_of(2, limit=60)
    loaded(world, world.groupers[:1], per_s=2, seconds=120.0)
    before = len(world.uses)

    loaded(world, world.groupers[1:], per_s=2, seconds=60.0)

    assert len(world.uses) - before >= 55


def test_the_permits_of_a_dead_grouper_come_back_after_a_minute() -> None:
    """What a dead grouper had counts as used until a minute after it is known to be dead."""
    world = world_of(3)
    loaded(world, world.groupers, per_s=40, seconds=70.0)
    world.kill(world.groupers[1])

    loaded(world, [world.groupers[0], world.groupers[2]], per_s=40, seconds=130.0)

    assert world.used_within(world.now) >= 0.97 * 600


def test_another_grouper_grants_when_the_allocator_dies() -> None:
    """After `SILENCE_S`, the next grouper grants, and the sliding minute keeps to the limit."""
    world = world_of(3)
    loaded(world, world.groupers, per_s=40, seconds=70.0)
    world.kill(world.groupers[0])

    loaded(world, world.groupers[1:], per_s=40, seconds=70.0)

    assert 0.9 * 600 <= world.used_within(world.now) <= 600


def test_a_request_of_many_tokens_gets_them_although_groupers_have_parts() -> None:
    """Permits that are too few for a request go back, so that one grouper gets enough."""
    world = World(limit=1000, kind=LimitKind.TOKENS, delays=[0.01])
    for _ in range(3):
        world.start()
    admitted = 0

    for _ in range(2400):
        world.advance(0.1)
        for each in world.groupers:
            admitted += world.request(each, 400)
            world.report(each)

    assert admitted >= 2 * 240 / WINDOW_S - 2


def test_permits_are_void_without_answers() -> None:
    """A grouper whose demands are not answered does not use its permits."""
    world = world_of(1)
    loaded(world, world.groupers, per_s=40, seconds=2.0)
    holder = world.groupers[0].holder
    world.advance(SILENCE_S)

    assert not holder.take(TENANT, {LimitKind.REQUESTS: 1}, world.now)


def test_a_refusal_knows_which_limit_is_reached() -> None:
    """After the answer that nothing is free, the limit is named, and the wait for the next."""
    world = world_of(1, limit=5)
    loaded(world, world.groupers, per_s=40, seconds=4.0)
    holder = world.groupers[0].holder

    assert LimitKind.REQUESTS is holder.exhausted(TENANT, {LimitKind.REQUESTS: 1}, world.now)
    known = holder.known(TENANT, LimitKind.REQUESTS)
    assert known is not None
    assert known.remaining == 0
    assert pytest.approx(58.0, abs=2.5) == known.next_s
