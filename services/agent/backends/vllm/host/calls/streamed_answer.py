"""One answer of a call whose events the application streams."""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from vllm.v1.engine.exceptions import EngineDeadError

from services.agent.backends.vllm.host.calls.call_core import Child, NewPart
from services.agent.backends.vllm.host.calls.events import Step
from services.agent.backends.vllm.shared.wire import RunOutput
from shared.api.digests import chained
from shared.contracts.base import Seconds
from shared.contracts.errors import ContractError, NotActiveError
from shared.contracts.requests import FinishReason, Progress, StepDetails, steps_of

BATCH_S: Seconds = 0.04
"""Time whose tokens are one part of an answer."""


class StreamedAnswer:
    """
    Gives the application the tokens of an answer, and takes the steps that it makes of them.

    The tokens of earlier runs come first, in the steps of these runs, so that their events are made
    again; they were sent already.

    Args:
        child: The request for the answer.
        progress: Progress of the answer.
        joins: True if tokens of a short time may share an event; False: each token is one part,
            which parsers of tools and reasoning need.
        on_output: Called with the output of each new step.
        on_lost: Called with the error if the engine has died, or if another instance may serve the
            call.
    """

    def __init__(
        self,
        child: Child,
        progress: Progress,
        *,
        joins: bool,
        on_output: Callable[[Child, RunOutput], None],
        on_lost: Callable[[Exception], None],
    ) -> None:
        self._child = child
        self._progress = progress
        self._joins = joins
        self._send = on_output
        self._on_lost = on_lost
        self._num_known = len(progress.token_ids)
        self._num_taken = 0
        """Number of tokens in the steps so far."""
        self._digest = b""
        self._waiting: list[int] = []
        """Tokens that the application has not got yet."""
        self._timer: asyncio.TimerHandle | None = None
        self._has_begun = False
        """True once the application has a token."""
        self._details: deque[StepDetails] = deque()
        """Encoded details of the next steps, if the answer has any."""
        self._cached_tokens = progress.cached_tokens
        self._prefill_s: Seconds = 0.0

    def begin(self) -> None:
        """Give the application the tokens of earlier runs."""
        if not self._num_known:
            return
        steps = steps_of(self._progress)
        has_details = any(step.parts for step in self._progress.details)
        details = [each for each in self._progress.details if each.num_tokens]
        parts = [
            NewPart(token_ids=tokens, details=(details[number],) if has_details else ())
            for number, tokens in enumerate(steps)
        ]
        self._details += details if has_details else ()
        if (reason := self._progress.finish_reason) is not None:
            parts[-1] = replace(parts[-1], finish_reason=reason)
        self._append(parts)

    def on_output(self, output: RunOutput) -> None:
        """Take new tokens of the engine; with a finish reason, the answer is complete."""
        if not self._num_known:
            self._cached_tokens = self._cached_tokens or output.cached_tokens
        self._prefill_s = self._prefill_s or output.prefill_s
        reason = FinishReason(output.finish) if output.finish else None
        if output.details:
            self._details += output.details
            part = NewPart(token_ids=output.token_ids, details=output.details, finish_reason=reason)
            self._append([part])
            return
        self._waiting += output.token_ids
        if reason is not None or not self._has_begun:
            self._flush(reason)
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(BATCH_S, self._flush)

    def on_error(self, error: Exception) -> None:
        """End the call with an error, unless its request is not at fault."""
        if isinstance(error, EngineDeadError | NotActiveError):
            self._on_lost(error)
        else:
            self._child.refuse(str(error))

    def close(self) -> None:
        """Give the application nothing more."""
        if self._timer is not None:
            self._timer.cancel()

    def take(self, step: Step) -> StepDetails:
        """
        Send a step of the application, unless it was sent before.

        Returns:
            The events of the step.

        Raises:
            ContractError: The events of the tokens of earlier runs are not those that were sent.
        """
        is_known = self._num_taken < self._num_known
        self._num_taken += len(step.token_ids)
        if step.events:
            self._digest = chained(self._digest, step.events)
        parts = self._details.popleft().parts if self._details else ()
        if not is_known:
            self._send_step(step, parts)
        elif self._num_taken >= self._num_known:
            self._check_digest()
        return StepDetails(len(step.token_ids), events=step.events, child=step.index)

    def _send_step(self, step: Step, parts: tuple[bytes, ...]) -> None:
        prefill_s, self._prefill_s = self._prefill_s, 0.0
        details = StepDetails(len(step.token_ids), parts, step.events)
        output = RunOutput(
            "", step.token_ids, step.finish, self._cached_tokens, prefill_s, (details,)
        )
        self._send(self._child, output)

    def _check_digest(self) -> None:
        sent = self._progress.digest
        if sent and sent != self._digest:
            raise ContractError(
                "the answer cannot continue: this engine makes other events of its first "
                f"{self._num_known} tokens than those that were sent; engines of one model need "
                "the same files and parsers",
                code="events_differ",
                status=502,
            )

    def _flush(self, reason: FinishReason | None = None) -> None:
        """Give the application the tokens that it has not got yet."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        waiting, self._waiting = tuple(self._waiting), []
        if not waiting and reason is None:
            return
        parts = [waiting] if self._joins or not waiting else [(token,) for token in waiting]
        self._append(
            [
                NewPart(token_ids=tokens, finish_reason=reason if number == len(parts) else None)
                for number, tokens in enumerate(parts, start=1)
            ]
        )

    def _append(self, parts: list[NewPart]) -> None:
        if not self._has_begun and parts:
            parts[0] = replace(parts[0], cached_tokens=self._cached_tokens)
            self._has_begun = True
        self._child.append(parts)
