"""In whatever order events come, an instance settles each delivery once and loses no request."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shared.contracts.ends import NEVER
from solver.instance import end, operations, pull
from solver.instance import instance as control
from solver.instance.admission import admit
from solver.instance.commands import Command, Discard, Renew
from solver.instance.renewal.renewals import Renewals
from solver.instance.request import EDGES, Ending, Held, Phase
from solver.instance.requests import HeldEnds, Requests
from solver.instance.room import Room
from solver.instance.state import InstanceState
from tests.properties.instance.world import World, WrongError

SEQUENCES = int(os.environ.get("HEADWAY_SEQUENCES", "2000"))
"""Number of random sequences; 100,000 were run once."""
LENGTHS = (20, 60, 150)
CHOICES = 10**6
_ON_ENGINE = ("running", "ending")
_HELD = ("waiting", "resting", *_ON_ENGINE)
PAIRS = {
    *product(("Rendered", "Begun", "Outgrown", "Ended", "RunStopped"), _ON_ENGINE),
    *product(("Delivered", "Cancelled", "Ordered"), (*_HELD, "leaving")),
    *product(("Departed", "Stranded"), ("leaving",)),
}
"""Kind of event and phase of the request that it is about, as far as both can meet."""


def explore(seed: int) -> World:
    """A world after a random sequence of *seed*, without open items."""
    chance, world = Random(seed), World()
    for _ in range(chance.choice(LENGTHS)):
        world.act(chance.randrange(CHOICES))
    world.finish()
    return world


def explore_all(number: int) -> None:
    """Random sequences, until one breaks an invariant."""
    for seed in range(number):
        explore(seed)


@settings(max_examples=200, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.integers(0, CHOICES), max_size=60))
def test_any_sequence_keeps_the_invariants(choices: list[int]):
    """Hypothesis shrinks a sequence that breaks one."""
    world = World()
    for choice in choices:
        world.act(choice)
    world.finish()


@contextmanager
def followed_edges(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[tuple[Phase, Phase]]]:
    """Pairs of phases between which requests have moved."""
    edges: set[tuple[Phase, Phase]] = set()
    move = Held._to

    def following(held: Held, phase: Phase) -> None:
        edges.add((held.phase, phase))
        move(held, phase)

    monkeypatch.setattr(Held, "_to", following)
    yield edges


@pytest.mark.slow
def test_random_sequences_reach_every_edge_and_every_event_in_every_phase(
    monkeypatch: pytest.MonkeyPatch,
):
    seen: set[tuple[str, str]] = set()
    with followed_edges(monkeypatch) as edges:
        for seed in range(SEQUENCES):
            seen |= explore(seed).seen
    assert edges == {(before, after) for before, afters in EDGES.items() for after in afters}
    assert PAIRS - seen == set()


Mutation = Callable[[pytest.MonkeyPatch], None]


def _without_commands(*_arguments: object, **_named: object) -> Iterator[None]:
    return iter(())


def _does_nothing(*_arguments: object, **_named: object) -> None:
    return None


def _completes_evictions(patch: pytest.MonkeyPatch) -> None:
    def requeue(instance: object, held: Held, _attempts: object, how: str) -> Iterator[object]:
        yield from end._depart(instance, held, how)

    patch.setattr(end, "requeue", requeue)


def _drops_tags_of_copies(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Requests, "join", _does_nothing)


def _forgets_the_window(patch: pytest.MonkeyPatch) -> None:
    submit = Requests.submit

    def kept(requests: Requests, held: Held, run: object) -> None:
        request = held.request
        submit(requests, held, run)
        if request.request_id not in requests.window:
            requests.window.add(request, held.rank)

    patch.setattr(Requests, "submit", kept)


def _acknowledges_stranded(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(control.HANDLERS, control.Stranded, end.on_departed)


def _acknowledges_before_the_confirm(patch: pytest.MonkeyPatch) -> None:
    def renew(instance: InstanceState, now: float) -> Iterator[Command]:
        for held in instance.renewals.due(instance.requests, now):
            tags, held.tags = tuple(held.tags), []
            yield Renew(number=held.number, request=held.request)
            yield Discard(tags=tags)

    patch.setattr(control.renew, "renew", renew)


def _keeps_reserved_room(patch: pytest.MonkeyPatch) -> None:
    drop = Room.update

    def update(room: Room, held: Held) -> None:
        before = room.reserved_tokens
        drop(room, held)
        if held.phase is Phase.LEAVING:
            room.reserved_tokens = before

    patch.setattr(Room, "update", update)


MUTATIONS: dict[str, Mutation] = {
    "an abort is dropped": lambda patch: patch.setattr(end, "abort", _aborts_without_command),
    "an evicted request is acknowledged and not requeued": _completes_evictions,
    "the delivery of a copy is dropped": _drops_tags_of_copies,
    "a lease has no end": lambda patch: patch.setattr(control, "_end_leases", _does_nothing),
    "a submitted request stays in the window": _forgets_the_window,
    "a stranded request is acknowledged": _acknowledges_stranded,
    "the room of a run is not freed": _keeps_reserved_room,
    "admission ignores the room": lambda patch: patch.setattr(admit, "_fits", lambda *_: True),
    "suspects run beside others": lambda patch: patch.setattr(
        admit, "_must_wait", lambda *_: False
    ),
    "a model is changed while requests run": lambda patch: patch.setattr(
        operations, "empty", _leaves_runs
    ),
    "a cancelled request is forgotten": lambda patch: patch.setattr(end, "fail", _without_commands),
    "a pull is not counted": lambda patch: patch.setattr(pull, "_pull_ended", _does_nothing),
    "a renewal acknowledges before the confirm": _acknowledges_before_the_confirm,
    "a copy of a request that has left is served": lambda patch: patch.setattr(
        Renewals, "left_with_copies", _does_nothing
    ),
    "an end is not noted": lambda patch: patch.setattr(HeldEnds, "schedule", _does_nothing),
    "an end is unknown": lambda patch: patch.setattr(Held, "end", NEVER),
    "a request is dropped early": lambda patch: patch.setattr(
        HeldEnds, "due", lambda ends, _now: (entry[2] for entry in [*ends._heap[:1]])
    ),
    "the engine's death ends no run": lambda patch: patch.setattr(
        end, "_on_death", _without_commands
    ),
}


def _aborts_without_command(
    instance: InstanceState, held: Held, ending: Ending, *, why: str = "", rest_s: float = 0.0
) -> Iterator[Command]:
    if held.run is not None and held.run.ending is None:
        instance.requests.abort(held, ending, why=why, rest_s=rest_s)
    yield from ()


def _leaves_runs(*_arguments: object) -> Iterator[int]:
    yield from ()
    return 0


@pytest.mark.parametrize("name", MUTATIONS)
def test_mutation_is_found(name: str, monkeypatch: pytest.MonkeyPatch):
    """Each seeded error breaks an invariant in one of the sequences."""
    MUTATIONS[name](monkeypatch)
    with pytest.raises((WrongError, KeyError, AssertionError, RuntimeError)):
        explore_all(SEQUENCES)
