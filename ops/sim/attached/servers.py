"""Stock servers of vLLM that share one device."""

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import count

from ops.sim.attached.timeline import Action, Timeline
from shared.contracts.base import Seconds, UnixTime
from shared.contracts.estimates import LatencyCoefficients

MAX_RUNNING = 16
"""Answers that a server computes at once by default."""
MAX_BATCHED_TOKENS = 2048
"""Tokens that an iteration of a server computes at most by default."""
_ENDED_S = 1e-9
"""Work left at which an iteration has ended, since sums of floating-point numbers drift."""


@dataclass(slots=True)
class _Iteration:
    left_s: Seconds
    done: Action


class Device:
    """A device that divides its time equally among the iterations of its servers."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._iterations: list[_Iteration] = []
        self._at: UnixTime = 0.0
        self._version = 0
        self.busy_s: Seconds = 0.0
        """Time during which the device computed."""

    def begin(self, work_s: Seconds, done: Action) -> None:
        """Compute for *work_s*, if nothing else is computed meanwhile, then call *done*."""
        self._advance()
        self._iterations.append(_Iteration(work_s, done))
        self._plan()

    def _advance(self) -> None:
        elapsed_s = self._timeline.now - self._at
        self._at = self._timeline.now
        if self._iterations:
            self.busy_s += elapsed_s
            for each in self._iterations:
                each.left_s -= elapsed_s / len(self._iterations)

    def _plan(self) -> None:
        self._version += 1
        if self._iterations:
            first_s = min(each.left_s for each in self._iterations) * len(self._iterations)
            self._timeline.after(first_s, partial(self._end, self._version))

    def _end(self, version: int) -> None:
        if version != self._version:
            return
        self._advance()
        ended = [each for each in self._iterations if each.left_s <= _ENDED_S]
        self._iterations = [each for each in self._iterations if each.left_s > _ENDED_S]
        self._plan()
        for each in ended:
            each.done()


@dataclass(slots=True, kw_only=True)
class ServerRun:
    """One request at a server."""

    prompt_tokens: int
    output_tokens: int
    priority: int
    """Lower first."""
    on_token: Callable[[int], None]
    """Receives the number of each answer token, counted from 1."""
    num_computed: int = 0
    """Number of prompt tokens with KV."""
    num_generated: int = 0
    is_aborted: bool = False

    @property
    def is_over(self) -> bool:
        return self.is_aborted or self.num_generated >= self.output_tokens


@dataclass(slots=True)
class Server:
    """
    One `vllm serve` with priorities: running requests first, then waiting ones in order.

    Differs from vLLM: KV never runs out, so no request is preempted.
    """

    timeline: Timeline
    device: Device
    latency: LatencyCoefficients
    max_running: int = MAX_RUNNING
    max_batched_tokens: int = MAX_BATCHED_TOKENS
    answer_s: Seconds = 0.0
    """Time that each answer adds to an iteration, beside that of its token."""
    is_vllm: bool = True
    """False: the server orders by arrival, and reports neither its queue nor its iterations."""
    num_computed: int = 0
    """Tokens that all iterations together have computed."""
    _running: list[ServerRun] = field(default_factory=list)
    _waiting: list[tuple[int, int, ServerRun]] = field(default_factory=list)
    _numbers: "count[int]" = field(default_factory=count)
    _is_computing: bool = False

    @property
    def num_waiting(self) -> int:
        return sum(not run.is_aborted for _, _, run in self._waiting)

    @property
    def num_running(self) -> int:
        return sum(not run.is_over for run in self._running)

    def submit(self, run: ServerRun) -> None:
        """Begin a request."""
        priority = run.priority if self.is_vllm else 0
        heapq.heappush(self._waiting, (priority, next(self._numbers), run))
        self._compute()

    def abort(self, run: ServerRun) -> None:
        """End a request before its answer is complete."""
        run.is_aborted = True

    def _compute(self) -> None:
        if self._is_computing:
            return
        parts = self._scheduled()
        if parts:
            self._is_computing = True
            self.device.begin(self._duration_s(parts), partial(self._computed, parts))

    def _scheduled(self) -> list[tuple[ServerRun, int]]:
        """Requests of the next iteration, and how many of their tokens it computes."""
        self._running = [run for run in self._running if not run.is_over]
        parts: list[tuple[ServerRun, int]] = []
        left = self.max_batched_tokens

        def add(run: ServerRun) -> None:
            nonlocal left
            num_tokens = min(left, max(1, run.prompt_tokens - run.num_computed))
            parts.append((run, num_tokens))
            left -= num_tokens

        for run in self._running:
            if left:
                add(run)
        while self._waiting and left and len(self._running) < self.max_running:
            _, _, run = heapq.heappop(self._waiting)
            if not run.is_aborted:
                self._running.append(run)
                add(run)
        return parts

    def _duration_s(self, parts: list[tuple[ServerRun, int]]) -> Seconds:
        """Duration of an iteration (`LatencyCoefficients`)."""
        latency = self.latency
        total_s = latency.constant_s
        for run, num_tokens in parts:
            total_s += latency.linear_s * num_tokens
            before = run.num_computed + run.num_generated
            if run.num_computed < run.prompt_tokens:
                total_s += latency.cross_s * num_tokens * (before + num_tokens / 2)
            else:
                total_s += latency.context_s * before + self.answer_s
        return total_s

    def _computed(self, parts: list[tuple[ServerRun, int]]) -> None:
        for run, num_tokens in parts:
            self.num_computed += num_tokens
            if run.is_aborted:
                continue
            if run.num_computed < run.prompt_tokens:
                run.num_computed += num_tokens
            if run.num_computed >= run.prompt_tokens:
                run.num_generated += 1
                run.on_token(run.num_generated)
        self._is_computing = False
        self._compute()
