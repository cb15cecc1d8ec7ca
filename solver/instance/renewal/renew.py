"""Steps of a renewal: publish a copy of a request, pull it, and acknowledge what it replaces."""

import math
from collections.abc import Iterator

from shared.contracts.base import UnixTime
from solver.instance.commands import Command, Discard, Renew
from solver.instance.events import Delivered, PullEnded, PullOutcome, Renewed, Unrenewed
from solver.instance.state import InstanceState


def renew(instance: InstanceState, now: UnixTime) -> Iterator[Command]:
    """Publish copies of the requests that are due."""
    for held in instance.renewals.due(instance.requests, now):
        held.is_renewed = True
        yield Renew(number=held.number, request=held.request)


def next_at(instance: InstanceState) -> UnixTime:
    """Time of the next renewal; infinite if nothing is held."""
    return instance.renewals.next_at if instance.requests.num_held else math.inf


def on_renewed(instance: InstanceState, event: Renewed, now: UnixTime) -> Iterator[Command]:
    """Pull the copy from the inbox, also if there is no room for other requests."""
    if instance.renewals.confirmed(event.number, now):
        instance.order.nonempty(instance.inbox, now)
        instance.work.pull = True
    yield from ()


def on_unrenewed(instance: InstanceState, event: Unrenewed, now: UnixTime) -> Iterator[Command]:
    """Publish a copy again later; the instance acknowledges a copy that was published after all."""
    if not instance.renewals.failed(event.number, now):
        _retry(instance, {event.number}, now)
    yield from ()


def missed(instance: InstanceState, event: PullEnded, now: UnixTime) -> None:
    """
    Renew again the requests whose copies are not in the inbox, which was pulled to its end.

    A leader that considers the instance dead has returned the copies to their lanes.
    """
    if event.queue != instance.inbox or instance.pulls[event.queue]:
        return  # a pull that began earlier may still bring the copy
    if event.outcome in (PullOutcome.EMPTY, PullOutcome.ABSENT):
        _retry(instance, instance.renewals.missed(event.asked_at), now)


def joined(instance: InstanceState, event: Delivered, now: UnixTime) -> tuple[Command, ...] | None:
    """
    Handle a copy that came from the inbox.

    Returns:
        Commands; None if no copy of a request came that is or was held here.
    """
    number, renewals, requests = event.renewal, instance.renewals, instance.requests
    if number is None:
        return None
    renewals.came(number)
    if number in renewals.left:
        return (Discard(tags=(event.tag,)),)
    if (leaving := requests.leaving_of(number)) is not None:
        requests.join(leaving, [event.tag])  # acknowledged with the outcome
        return ()
    held = requests.find(event.request.request_id)
    if held is None or held.number != number:
        return None
    if held.tags and event.request.attempts.hop < held.request.attempts.hop:
        return (Discard(tags=(event.tag,)),)  # a newer copy has replaced the request meanwhile
    earlier = requests.renew(held, event.tag)
    renewals.schedule(held, now)
    instance.totals.renewed += 1
    return (Discard(tags=earlier),) if earlier else ()


def _retry(instance: InstanceState, numbers: set[int], now: UnixTime) -> None:
    for held in instance.requests:
        if held.number in numbers:
            instance.renewals.retry(held, now)
