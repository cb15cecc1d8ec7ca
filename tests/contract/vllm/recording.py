"""A scheduling policy that records inputs and decisions of each iteration."""

import os
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from shared.contracts.base import RequestId, Seconds, UnixTime
from solver.scheduling.engine.decision import (
    BatchState,
    IterationDecision,
    IterationOutcome,
    RequestView,
    SchedulingPolicy,
)

PATH_VARIABLE = "HEADWAY_TEST_RECORDING"


class Step(msgspec.Struct, kw_only=True):
    """The policy's inputs and decisions of one iteration."""

    now: UnixTime
    free_kv_tokens: int
    added: list[RequestView] = msgspec.field(default_factory=list)
    """Requests added since the previous iteration."""
    computed: dict[RequestId, int] = msgspec.field(default_factory=dict)
    """Computed tokens of each running request before the iteration."""
    admitted: list[RequestId] = msgspec.field(default_factory=list)
    preempted: list[RequestId] = msgspec.field(default_factory=list)
    answers: dict[RequestId, int] = msgspec.field(default_factory=dict)
    """Lengths of the answers that the iteration completed."""
    num_held: int = 0
    tokens: int = 0
    num_decodes: int = 0
    duration_s: Seconds = 0.0

    @property
    def counts(self) -> tuple[object, ...]:
        """The counts that must be equal on two engines."""
        running = tuple(sorted(self.computed.items()))
        starts = tuple(sorted(self.admitted)), tuple(sorted(self.preempted))
        return running, starts, self.tokens, self.num_decodes, sorted(self.answers.items())


@dataclass
class RecordingPolicy:
    """
    Decides as *inner* does, and appends each iteration to *path*, if given, and to `steps`.

    Args:
        inner: The policy that decides.
        durations: Iteration times passed to *inner* instead of the engine's.
    """

    inner: SchedulingPolicy
    path: Path | None = None
    durations: list[Seconds] | None = None
    steps: list[Step] = field(default_factory=list)
    _added: list[RequestView] = field(default_factory=list)

    def add(self, request: RequestView) -> None:
        self._added.append(request)
        self.inner.add(request)

    def remove(self, request_id: RequestId, answer_tokens: int | None = None) -> None:
        if answer_tokens is not None:
            self.steps[-1].answers[request_id] = answer_tokens
        self.inner.remove(request_id, answer_tokens)

    def decide(self, now: UnixTime, batch: BatchState) -> IterationDecision:
        self._write()
        decision = self.inner.decide(now, batch)
        self.steps.append(
            Step(
                now=now,
                free_kv_tokens=batch.free_kv_tokens,
                added=self._added,
                computed={run.request_id: run.num_computed_tokens for run in batch.running},
                num_held=len(decision.held),
            )
        )
        self._added = []
        return decision

    def observe(self, now: UnixTime, outcome: IterationOutcome) -> None:
        """Record a report; an engine may report an iteration at once, or its duration later."""
        step = self.steps[-1]
        step.admitted += outcome.admitted
        step.preempted += outcome.preempted
        step.tokens = outcome.iteration.compute_tokens
        step.num_decodes = outcome.iteration.num_decodes
        step.duration_s = outcome.iteration.duration_s
        if self.durations is not None:
            iteration = msgspec.structs.replace(
                outcome.iteration, duration_s=self.durations[len(self.steps) - 1]
            )
            outcome = replace(outcome, iteration=iteration)
        self.inner.observe(now, outcome)

    def _write(self) -> None:
        """Append the completed iteration to the file."""
        if self.path is not None and self.steps:
            with self.path.open("ab") as file:
                file.write(msgspec.json.encode(self.steps.pop()) + b"\n")


def recording(inner: SchedulingPolicy) -> RecordingPolicy:
    """Wrap *inner* so that it records to the file in `PATH_VARIABLE`."""
    return RecordingPolicy(inner, Path(os.environ[PATH_VARIABLE]))


def read_steps(path: Path) -> list[Step]:
    """All complete iterations in a recording."""
    return [msgspec.json.decode(line, type=Step) for line in path.read_bytes().splitlines()]
