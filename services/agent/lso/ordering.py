"""Publishes an operator's command to an instance, and waits for the answer."""

import secrets

import msgspec

from shared.broker import topology
from shared.broker.protocol import Broker, PublishOutcome
from shared.broker.rpc import ask
from shared.contracts.base import Decoder, Message
from shared.contracts.control import LsoAnswered, LsoCommand

_decode: Decoder[LsoAnswered] = Decoder(LsoAnswered)


async def order(
    broker: Broker, command: LsoCommand, *, timeout_s: float
) -> LsoAnswered | PublishOutcome | None:
    """
    Publish *command* and wait for its answer.

    Returns:
        The answer, None after the timeout, or the publish outcome if no agent receives the command.
    """

    def addressed(reply_to: str) -> Message:
        return msgspec.structs.replace(command, command_id=secrets.token_hex(8), reply_to=reply_to)

    key = topology.command_instance(command.instance_id)
    return await ask(broker, key, addressed, _decode, timeout_s=timeout_s)
