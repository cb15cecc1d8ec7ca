"""`headway dead-letter`: lists, requeues or deletes dead-lettered requests."""

import sys
from typing import Annotated, Literal

from cyclopts import Parameter

from services.mesh.verbs.options import AmqpUrl
from shared.broker import dead_letters, topology
from shared.contracts.errors import SettingsError
from shared.runtime.cli import broker_factory, print_data
from shared.runtime.lifecycle import EXIT_FAILED, EXIT_OK
from shared.runtime.options import JsonOption, Positive
from shared.runtime.settings import DEFAULT_AMQP_URL

Action = Literal["peek", "requeue", "purge"]
AT_ONCE = 50
ACTIONS = {
    "peek": ("seen", dead_letters.keep),
    "requeue": ("requeued", dead_letters.requeue),
    "purge": ("purged", dead_letters.drop),
}
"""Action on dead letters -> past participle of the action for the output, and its function."""


async def dead_letter(
    action: Annotated[
        Action, Parameter(help="List the dead letters, publish them again, or delete them.")
    ],
    /,
    *,
    limit: Positive | None = None,
    request_id: Annotated[str | None, Parameter(name="--id", metavar="ID")] = None,
    yes: bool = False,
    amqp_url: AmqpUrl = DEFAULT_AMQP_URL,
    json: JsonOption = False,
) -> int:
    """
    List, requeue or delete dead-lettered requests.

    Args:
        limit: Read only the N oldest dead letters (default: 50; purge: all).
        request_id: Only the request with this id, if it is among the N oldest (default: 50).
        yes: Required for purge, which deletes permanently.

    Raises:
        SettingsError: A purge is not confirmed.
    """
    if action == "purge" and not yes:
        raise SettingsError("purge deletes dead letters permanently: confirm with --yes")
    async with broker_factory(amqp_url)("headway-dead-letter") as broker:
        if action == "purge" and request_id is None and limit is None:
            print_data({"purged": await broker.purge(topology.DEAD_LETTERS)}, as_json=json)
            return EXIT_OK
        done, handle = ACTIONS[action]
        letters = await dead_letters.process(
            broker,
            action=handle,
            limit=limit or AT_ONCE,
            wanted=lambda letter: request_id is None or letter.id == request_id,
        )
    if action == "purge":
        print_data({"purged": len(letters)}, as_json=json)
    elif json:
        print_data(letters, as_json=True)
    else:
        for letter in letters:
            print(f"{letter.id}\t{letter.num_bytes} B\t{letter.queue}\t{letter.reason}")
        print(f"{len(letters)} {done}", file=sys.stderr)
    return EXIT_OK if letters or request_id is None else EXIT_FAILED
