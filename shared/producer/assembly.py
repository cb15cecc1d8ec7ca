"""
Assembly of one request's answer from the replies of any number of runs.

A request can have several runs, one after another or concurrently, because the broker redelivers,
agents die and requests move between instances. This state machine combines their replies to one
answer. The state machine does no IO; the caller executes its effects.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace

from shared.contracts.base import RequestId, RunId
from shared.contracts.control import StopReason
from shared.contracts.ends import DEADLINE_EXPIRED, FIRST_TOKEN
from shared.contracts.requests import (
    ChildAnswer,
    ErrorInfo,
    Reply,
    RequestCompleted,
    RequestFailed,
    RunStarted,
    StepDetails,
    TokenChunk,
    Tokens,
    TokensEmitted,
)
from shared.producer.answer import Answer, DivergenceError, ReplicaRun
from shared.producer.effects import Diverged, Effect, Finished, NewTokens, SendStop

CANCELLED = ErrorInfo(
    message="the producer cancelled the request",
    type="cancelled",
    code="cancelled",
    status=499,
)


class RequestAssembly:
    """
    State machine that emits every token position exactly once, and exactly one `Finished`.

    Args:
        request_id: Id of the request; callers pass only replies about this request.
        streaming: True: emit tokens as they arrive; False: emit all tokens with the final.
        silence_s: Time in seconds without replies of a live run, after which a failure of another
            run ends the request.
    """

    def __init__(self, request_id: RequestId, *, streaming: bool, silence_s: float = 10.0) -> None:
        self.request_id = request_id
        self._streaming = streaming
        self._diverged = False
        self._silence_s = silence_s
        self._answers: defaultdict[int, Answer] = defaultdict(Answer)
        """Index of an answer -> the answer; only calls have several."""
        self._current: ReplicaRun | None = None
        self._superseded: set[RunId] = set()
        self._held: RequestFailed | None = None
        self._last_sign_at = 0.0
        self._stop_reason: StopReason | None = None

    @property
    def finished(self) -> StopReason | None:
        """
        Reason for stopping runs that start after the end of the request; None while the request is
        in progress.
        """
        return self._stop_reason

    @property
    def holds_failure(self) -> bool:
        """True if a failure is held back while another run is live; `tick` must then be called."""
        return self._held is not None

    def observe(self, reply: Reply, now: float) -> list[Effect]:
        """Process one reply that arrived at *now* (Unix seconds); return its effects in order."""
        match reply:
            case RunStarted():
                return self._on_started(reply, now)
            case TokensEmitted():
                return [
                    effect
                    for chunk in reply.chunks
                    if chunk.request_id == self.request_id
                    for effect in self.observe_chunk(chunk, now)
                ]
            case RequestCompleted():
                return self._on_completed(reply)
            case RequestFailed():
                return self._on_failed(reply, now)

    def observe_chunk(self, chunk: TokenChunk, now: float) -> list[Effect]:
        """Process one chunk of tokens; return its effects."""
        run = self._current
        if self._stop_reason or run is None or chunk.run_id != run.run_id:
            return []
        self._last_sign_at = now
        answer = self._answers[chunk.child]
        part = run.part(chunk.child, answer)
        if not self._streaming or self._diverged or part.broken:
            return []
        if chunk.offset != part.position or not chunk.token_ids:
            # A chunk that ends at or before the run's position is a repeated batch. A chunk that
            # ends after it, or has text without tokens, cannot be placed; the final reply contains
            # all tokens.
            part.broken = chunk.offset + len(chunk.token_ids) > part.position or (
                not chunk.token_ids and bool(chunk.text)
            )
            return []
        known = len(answer.token_ids)
        effects = self._new(chunk.child, answer.extend, part, chunk)
        details = details_from(chunk, known)
        return [replace(e, details=details) if isinstance(e, NewTokens) else e for e in effects]

    def cancel(self, now: float) -> list[Effect]:
        """Cancel the request for its consumer; a run that starts later is stopped."""
        if self._stop_reason:
            return []
        failed = RequestFailed(request_id=self.request_id, error=CANCELLED, at=now)
        return self._finish(failed, StopReason.CANCELLED)

    def tick(self, now: float) -> list[Effect]:
        """
        End the request with a held-back failure if the live run has been silent for `silence_s`.
        """
        if self._stop_reason or self._held is None:
            return []
        if now - self._last_sign_at < self._silence_s:
            return []
        return self._finish(self._held, StopReason.COMPLETED)

    def _on_started(self, started: RunStarted, now: float) -> list[Effect]:
        stop = SendStop(
            run_id=started.run_id,
            instance_id=started.instance_id,
            reason=self._stop_reason or StopReason.SUPERSEDED,
        )
        old = self._current
        if self._stop_reason or started.run_id in self._superseded:
            return [stop]
        if old is not None and started.run_id == old.run_id:
            self._last_sign_at = now
            return []
        if old is not None and _precedes(started, old.started):
            self._superseded.add(started.run_id)
            return [stop]
        # At the same hop the newer run may be the same broker message, redelivered because the
        # older run's agent died. Stopping the newer run would then lose the request.
        self._last_sign_at = now
        self._current = ReplicaRun(started)
        for child, answer in self._answers.items():
            self._current.part(child, answer)
        if old is None:
            return []
        self._superseded.add(old.run_id)
        return [
            SendStop(run_id=old.run_id, instance_id=old.instance_id, reason=StopReason.SUPERSEDED)
        ]

    def _on_completed(self, final: RequestCompleted) -> list[Effect]:
        if self._stop_reason:
            return []
        tail: list[Effect] = []
        wholes: tuple[ChildAnswer | RequestCompleted, ...] = final.children or (final,)
        for child, whole in enumerate(wholes):
            if not self._diverged:
                complete = self._answers[child].complete
                tail += self._new(child, complete, whole.token_ids, whole.text)
        return tail + self._finish(final, StopReason.COMPLETED)

    def _new(
        self, child: int, take: Callable[..., tuple[Tokens, str]], *given: object
    ) -> list[Effect]:
        """Add tokens and text to an answer with *take*; return the effects."""
        known = len(self._answers[child].token_ids)
        try:
            tokens, text = take(*given)
        except DivergenceError:
            # Emitted tokens cannot be withdrawn: from here on only the final reply counts.
            self._diverged = True
            return [Diverged()]
        if not tokens and not text:
            return []
        return [NewTokens(offset=known, token_ids=tokens, text=text, child=child)]

    def _on_failed(self, failed: RequestFailed, now: float) -> list[Effect]:
        if self._stop_reason:
            return []
        run = self._current
        if run is None or failed.run_id == run.run_id or self._is_end(failed):
            return self._finish(failed, StopReason.COMPLETED)
        if failed.run_id is None and failed.error.code == DEADLINE_EXPIRED:
            return []  # its first token has come, and the mesh had not heard of it
        # A run's start message may be lost, so a failure of an unknown run may end the request. A
        # failure of a superseded run never does.
        if failed.run_id not in self._superseded and self._held is None:
            self._held = failed
            self._last_sign_at = max(self._last_sign_at, now)
        return []

    def _is_end(self, failed: RequestFailed) -> bool:
        """
        True if the request has reached its end while it waited, also if the run before was not
        superseded. The deadline of the first token ends no request with tokens.
        """
        if failed.run_id is not None or failed.error.code != DEADLINE_EXPIRED:
            return False
        has_tokens = any(answer.token_ids for answer in self._answers.values())
        return failed.error.param != FIRST_TOKEN or not has_tokens

    def _finish(self, final: RequestCompleted | RequestFailed, reason: StopReason) -> list[Effect]:
        self._stop_reason = reason
        self._answers.clear()
        self._held = None
        return [Finished(final=final)]


def details_from(chunk: TokenChunk, known: int) -> tuple[StepDetails, ...]:
    """
    Details of the steps of *chunk* after the first *known* tokens of the answer; empty if a step
    has tokens before and after that position.
    """
    position, steps = chunk.offset, iter(chunk.details)
    for step in steps:
        if position >= known:
            return (step, *steps)
        position += step.num_tokens
        if position > known:
            return ()
    return ()


def _precedes(one: RunStarted, other: RunStarted) -> bool:
    """
    Return whether the run of *one* is older, although its start arrived later.

    The clocks of two instances may differ, so times are compared for the same instance only.
    """
    is_same = one.instance_id == other.instance_id and one.hop == other.hop
    return one.hop < other.hop or (is_same and one.at < other.at)
