"""Operators' commands: the agent executes each command as an operation and answers the command."""

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import structlog

from services.agent.lso.executor import LsoExecutor
from services.agent.lso.results import LsoRefusedError, LsoResult
from services.agent.residency import ModelResidency
from shared.broker import topology
from shared.broker.protocol import Broker, OutMessage
from shared.broker.retry import send_best_effort
from shared.contracts.base import InstanceId, Message, encode, tag_of
from shared.contracts.control import (
    EvictRequest,
    LsoActivate,
    LsoAnswered,
    LsoCheckpoint,
    LsoClear,
    LsoCommand,
    LsoOutcome,
    LsoPreempt,
    LsoPull,
    LsoSet,
    LsoSwapIn,
    LsoSwapOut,
    LsoWarm,
)
from shared.runtime.clock import Clock
from solver.planning.lso.operations import (
    Checkpoint,
    ClearCaches,
    Evict,
    Lso,
    Preempt,
    Pull,
    SetScheduling,
    SwapIn,
    SwapOut,
    Warm,
)

log = structlog.get_logger()

ANSWERS_KEPT = 1000

OPERATIONS: dict[type[Message], Callable[[Any], Lso]] = {
    LsoPull: lambda command: Pull(count=command.count),
    EvictRequest: lambda command: Evict(request_ids=(command.request_id,)),
    LsoSwapOut: lambda command: SwapOut(request_id=command.request_id, rest_s=command.rest_s),
    LsoSwapIn: lambda command: SwapIn(request_id=command.request_id),
    LsoCheckpoint: lambda command: Checkpoint(request_id=command.request_id),
    LsoClear: lambda _command: ClearCaches(),
    LsoWarm: lambda command: Warm(model=command.model),
    LsoPreempt: lambda _command: Preempt(),
    LsoSet: lambda command: SetScheduling(
        token_budget=command.token_budget, max_running=command.max_running
    ),
}
"""
Command -> function that returns the operation for it. Activating a model needs several operations,
so its command is absent.
"""


class LsoCommands:
    """
    Executes commands concurrently with the message handler, and answers each command at its end.

    Args:
        instance_id: Id of this instance; commands for other instances are refused.
        executor: Runs operations.
        residency: Activates models.
        broker: Publishes answers.
        clock: Wall time.
    """

    def __init__(
        self,
        *,
        instance_id: InstanceId,
        executor: LsoExecutor,
        residency: ModelResidency,
        broker: Broker,
        clock: Clock,
    ) -> None:
        self._instance_id = instance_id
        self._executor = executor
        self._residency = residency
        self._broker = broker
        self._clock = clock
        self._known: OrderedDict[str, asyncio.Future[LsoAnswered]] = OrderedDict()
        self._tasks: set[asyncio.Task[None]] = set()

    def take(self, command: LsoCommand) -> None:
        """
        Start *command* and return; if an equal command is in progress, both get the same answer.
        """
        task = asyncio.create_task(self._answer(command), name=f"command:{tag_of(type(command))}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Cancel commands in progress without answering the commands."""
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _answer(self, command: LsoCommand) -> None:
        known = self._known.get(command.command_id) if command.command_id else None
        if known is None:
            known = asyncio.get_running_loop().create_future()
            self._remember(command.command_id, known)
            known.set_result(await self._executed(command))
        # Equal commands wait for the same task; `shield` keeps it running for the other commands if
        # one is cancelled.
        answer = await asyncio.shield(known)
        if command.reply_to is not None:
            await send_best_effort(
                self._broker,
                topology.REPLIES,
                command.reply_to,
                OutMessage(
                    body=encode(answer),
                    kind=tag_of(LsoAnswered),
                    correlation_id=command.command_id or None,
                    persistent=False,
                ),
            )

    async def _executed(self, command: LsoCommand) -> LsoAnswered:
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        try:
            result = await self._run(command)
        except LsoRefusedError as error:
            result = LsoResult(outcome=LsoOutcome.REFUSED, message=str(error))
        # Answer in any case, because the operator waits; the operator may also repeat the command.
        except Exception as error:
            log.exception("lso.broken", kind=_kind(command))
            message = f"{type(error).__name__}: {error}"
            result = LsoResult(outcome=LsoOutcome.FAILED, message=message)
        return LsoAnswered(
            instance_id=self._instance_id,
            command_id=command.command_id,
            lso=_kind(command),
            outcome=result.outcome,
            message=result.message,
            duration_s=result.duration_s or loop.time() - started_s,
            num_bytes=result.num_bytes,
            at=self._clock.now(),
        )

    async def _run(self, command: LsoCommand) -> LsoResult:
        if command.instance_id != self._instance_id:
            raise LsoRefusedError(
                f"this is instance {self._instance_id!r}, not {command.instance_id!r}"
            )
        if isinstance(command, LsoActivate):
            result = await self._residency.activate(command.model)
            if not result.ok:
                return result
            message = f"{result.message}; the model is kept until the next plan selects another"
            return replace(result, message=message)
        (result,) = await self._executor.run(OPERATIONS[type(command)](command))
        return result

    def _remember(self, command_id: str, answer: asyncio.Future[LsoAnswered]) -> None:
        if command_id:
            self._known[command_id] = answer
            while len(self._known) > ANSWERS_KEPT:
                self._known.popitem(last=False)


def _kind(command: LsoCommand) -> str:
    """
    Kind of the LLM serving operation in a command's tag, e.g. `swap_out` in `lso.swap_out.v1`.
    """
    return tag_of(type(command)).split(".")[1]
