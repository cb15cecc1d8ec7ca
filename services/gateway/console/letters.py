"""Dead letters in the console: summaries, and the prompt of one with a key for it."""

from collections.abc import Mapping

import msgspec
import structlog

from services.gateway.console.access import caller_with
from services.gateway.tenants import Tenants
from shared.broker.dead_letters import DeadLetter, keep, process
from shared.broker.protocol import Broker, Delivery, Settlement
from shared.contracts.errors import ContractError
from shared.contracts.tenants.keys import Scope

log = structlog.get_logger()

MOST_LETTERS = 100
MOST_BODY_BYTES = 64 * 1024


class Letters(msgspec.Struct, frozen=True, kw_only=True):
    """The oldest dead letters."""

    letters: tuple[DeadLetter, ...]
    limit: int = MOST_LETTERS
    command: str = "headway dead-letter peek"


class LetterBody(msgspec.Struct, frozen=True, kw_only=True):
    """One dead letter with its request."""

    letter: DeadLetter
    body: str
    """The message, which has the prompt; cut at 64 KiB."""
    is_cut: bool


async def letters(broker: Broker) -> Letters:
    """
    Summaries of the oldest dead letters, which stay in their queue.

    Raises:
        TransientError: The broker cannot be used.
    """
    found = await process(broker, limit=MOST_LETTERS, wanted=lambda _letter: True, action=keep)
    return Letters(letters=tuple(found))


async def letter(
    broker: Broker,
    tenants: Tenants,
    headers: Mapping[str, str],
    peer: str | None,
    letter_id: str,
) -> LetterBody:
    """
    One dead letter with its prompt, for a key with the scope `prompts`; the log names the key.

    Args:
        broker: The broker.
        tenants: Keys.
        headers: Headers of the HTTP request.
        peer: Address of the other end of the connection.
        letter_id: Id of the dead letter.

    Raises:
        ContractError: No key allows it (status 401 or 403), or none of the oldest dead letters has
            this id (status 404).
        TransientError: The broker cannot be used.
    """
    caller = caller_with(tenants, headers, peer, Scope.PROMPTS)
    log.warning("console.prompt_read", dead_letter=letter_id, key=caller.by, tenant=caller.tenant)
    bodies: list[bytes] = []

    async def read(_broker: Broker, delivery: Delivery) -> Settlement:
        bodies.append(delivery.body)
        return Settlement.REQUEUE

    found = await process(
        broker, limit=MOST_LETTERS, wanted=lambda each: each.id == letter_id, action=read
    )
    if not found:
        raise ContractError(
            f"none of the oldest {MOST_LETTERS} dead letters has the id {letter_id[:80]}",
            code="dead_letter_not_found",
            status=404,
        )
    body = bodies[0]
    return LetterBody(
        letter=found[0],
        body=body[:MOST_BODY_BYTES].decode("utf-8", "replace"),
        is_cut=len(body) > MOST_BODY_BYTES,
    )
