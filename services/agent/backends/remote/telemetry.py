"""What a server's metrics and our own streams say about its load and its speed."""

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from shared.contracts.base import Seconds
from shared.contracts.telemetry import EngineIteration

_MAX_ITERATIONS = 1024
_LEAST_GAP_S = 0.001
_NAMES = {
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:kv_cache_usage_perc": "kv_utilization",
    "vllm:iteration_tokens_total_sum": "iteration_tokens",
    "vllm:iteration_tokens_total_count": "iterations",
}
_GAP_MEMORY_S: Seconds = 10.0
_GAPS, _WHOLE_GAPS = 2, 10
_STUCK = 1.5
_SLOW, _RECENT = 2.0, 0.1
"""Multiple of the short time per token, and weight of the last answer, for whole answers."""
_DOWN, _UP = 0.2, 0.02
"""Shares by which the short times approach shorter and longer ones."""
_LEAST_ITERATIONS = 3
"""Number of iterations between two looks from which their mean counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLoad:
    """Load of a server by its metrics, requests of other clients included."""

    running: float = 0.0
    waiting: float = 0.0
    kv_utilization: float = 0.0
    kv_capacity_tokens: int = 0
    """0 if the server does not report it."""
    iterations: float = 0.0
    """Number of iterations since the start of the server."""
    iteration_tokens: float = 0.0
    """Number of tokens that all iterations together have computed."""
    num_engines: int = 1
    """Number of engines that compute iterations side by side."""


def load_of(metrics: str) -> ServerLoad | None:
    """
    The load in the text of vLLM's metrics; None if the text has none.

    Values of several engines of one server are added; of shares, the largest counts. Values
    that are not finite numbers are skipped.
    """
    values: dict[str, float] = {}
    capacity = num_engines = 0
    for line in metrics.splitlines():
        if not line.startswith("vllm:"):
            continue
        name, _, rest = line.partition("{")
        labels, _, value = rest.rpartition("} ")
        if name in _NAMES and (number := _number(value)) is not None:
            field = _NAMES[name]
            known = values.get(field, 0.0)
            values[field] = max(known, number) if field == "kv_utilization" else known + number
            num_engines += field == "iterations"
        elif name == "vllm:cache_config_info":
            capacity += _capacity(labels)
    if "running" not in values:
        return None
    return ServerLoad(
        running=values["running"],
        waiting=values.get("waiting", 0.0),
        kv_utilization=values.get("kv_utilization", 0.0),
        kv_capacity_tokens=capacity,
        iterations=values.get("iterations", 0.0),
        iteration_tokens=values.get("iteration_tokens", 0.0),
        num_engines=max(1, num_engines),
    )


def _number(value: str) -> float | None:
    """A sample's value, which a timestamp may follow; None unless it is a finite number."""
    try:
        number = float(value.partition(" ")[0])
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _capacity(labels: str) -> int:
    """KV capacity in tokens, from the labels of `vllm:cache_config_info`."""
    pairs = (each.partition("=") for each in labels.split(","))
    known = {name: value.strip('"') for name, _, value in pairs}
    try:
        return int(known["block_size"]) * int(known["num_gpu_blocks"])
    except (KeyError, ValueError):
        return 0


@dataclass(slots=True)
class _Stream:
    """One running answer."""

    prompt_tokens: int
    submitted_at: float
    streams: bool
    """False: the answer comes as a whole, at its end."""
    size: int
    """Length of the prompt in units of which a server computes about equally many a second."""
    size_before: int
    """Sizes of the requests before this one that had no token when it was sent."""
    num_tokens: int = 0
    last_at: float = 0.0
    num_beside: int = 0
    """Number of answers that ran when the last token came."""


class ServerIterations:
    """
    Mean iterations of a vLLM server, from the totals of its metrics.

    While requests run, iterations follow each other without a pause: the time between two looks is
    that of all iterations between them.
    """

    def __init__(self) -> None:
        self._last: tuple[float, ServerLoad] | None = None
        self._iterations: deque[EngineIteration] = deque(maxlen=_MAX_ITERATIONS)

    def seen(
        self, load: ServerLoad, now: Seconds, *, context_tokens: float, prompt_tokens: float
    ) -> None:
        """
        Record the load at one look.

        Args:
            load: The load.
            now: Monotonic time.
            context_tokens: Mean length of prompt and answer of the requests that run.
            prompt_tokens: Mean length of their prompts.
        """
        last, self._last = self._last, (now, load)
        if last is None or not (last[1].running and load.running):
            return
        count = load.iterations - last[1].iterations
        if count < _LEAST_ITERATIONS:
            return
        tokens = (load.iteration_tokens - last[1].iteration_tokens) / count
        running = (load.running + last[1].running) / 2 / load.num_engines
        decodes = min(tokens, running)
        self._iterations.append(
            EngineIteration(
                compute_tokens=round(tokens),
                context_tokens=round(decodes * context_tokens),
                num_decodes=round(decodes),
                duration_s=(now - last[0]) * load.num_engines / count,
                # A prompt of n tokens has n²/2 pairs.
                prefill_pairs=(tokens - decodes) * prompt_tokens / 2,
            )
        )

    def drain(self) -> tuple[EngineIteration, ...]:
        """Iterations since the last call."""
        iterations = tuple(self._iterations)
        self._iterations.clear()
        return iterations


class Streams:
    """
    Estimates of a server's iterations from the times of the tokens that it streams to us.

    Between two tokens of one answer lies one iteration, which computes one token of every running
    answer. The time to the first token is that of the prompt, if no other request of ours is at
    the server.

    Args:
        clock: Monotonic time in seconds.
    """

    def __init__(self, clock: Callable[[], Seconds] = time.monotonic) -> None:
        self._clock = clock
        self._streams: dict[str, _Stream] = {}
        self._iterations: deque[EngineIteration] = deque(maxlen=_MAX_ITERATIONS)
        self._last_sample_at = 0.0
        self._alone: str | None = None
        """Request at the server since whose begin there was no other one of ours."""
        self.num_waiting = 0
        """Number of requests without a token; only this class writes the field."""
        self.most_begun = 0
        """Largest number of answers that had begun and not ended at one time."""
        self._gap_s, self._gap_at = 0.0, 0.0
        self._short_s = self._short_s_per_size = math.inf
        """Short times to first tokens, in seconds and in seconds per unit of size."""
        self._pace_s = self._short_pace_s = math.inf
        """Mean and short times of answers that came as a whole, per token."""

    @property
    def mean_prompt_tokens(self) -> float:
        """Mean length of the prompts; 0 without requests."""
        lengths = [each.prompt_tokens for each in self._streams.values()]
        return sum(lengths) / len(lengths) if lengths else 0.0

    @property
    def mean_context_tokens(self) -> float:
        """Mean length of prompt and answer; 0 without requests."""
        return self.num_tokens / len(self._streams) if self._streams else 0.0

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all prompts and answers."""
        return sum(each.prompt_tokens + each.num_tokens for each in self._streams.values())

    @property
    def num_prefilling(self) -> int:
        """Number of streams without a token: their prompts are computed, or they wait."""
        return sum(each.streams and not each.num_tokens for each in self._streams.values())

    @property
    def has_waited(self) -> bool:
        """
        True if each request without a token was sent more than `_GAPS` iterations ago, one whose
        answer comes as a whole, `_WHOLE_GAPS`. False until the time of an iteration is known.
        """
        now, gap_s = self._clock(), self.longest_gap_s
        return all(
            now - each.submitted_at > gap_s * (_GAPS if each.streams else _WHOLE_GAPS)
            for each in self._streams.values()
            if not each.num_tokens
        )

    @property
    def is_stuck(self) -> bool:
        """
        True if a stream has no token after `_STUCK` times the time in which the server computes all
        prompts without a token: it waits for a place.
        """
        waiting = [each for each in self._streams.values() if each.streams and not each.num_tokens]
        if not waiting:
            return False
        size = max(each.size_before + each.size for each in waiting)
        expected_s = self._short_s + self._short_s_per_size * size
        return self._clock() - min(each.submitted_at for each in waiting) > _STUCK * expected_s

    @property
    def num_begun(self) -> int:
        """Number of requests with a token."""
        return len(self._streams) - self.num_waiting

    @property
    def num_whole(self) -> int:
        """
        Number of answers that come as a whole and probably run; 0 while such answers take more than
        `_SLOW` times as long per token as they can, since some of them may wait.
        """
        if self._pace_s > _SLOW * self._short_pace_s:
            return 0
        return sum(not each.streams and not each.num_tokens for each in self._streams.values())

    @property
    def longest_gap_s(self) -> Seconds:
        """About the longest time between two tokens of one answer of late; infinite if unknown."""
        return self._gap_s or math.inf

    def submitted(
        self, request_id: str, prompt_tokens: int, *, streams: bool = True, size: int | None = None
    ) -> None:
        """
        Record the begin of a run.

        Args:
            request_id: Id of the run.
            prompt_tokens: Length of its prompt; 0 if unknown.
            streams: False if the answer comes as a whole.
            size: Length of the prompt in other units than tokens.
        """
        self._alone = None if self._streams else request_id
        self.num_waiting += 1
        before = sum(each.size for each in self._streams.values() if not each.num_tokens)
        self._streams[request_id] = _Stream(
            prompt_tokens=prompt_tokens,
            submitted_at=self._clock(),
            streams=streams,
            size=prompt_tokens if size is None else size,
            size_before=before,
        )

    def received(self, request_id: str, num_tokens: int) -> None:
        """Record tokens of a run."""
        stream = self._streams.get(request_id)
        if stream is None or not num_tokens:
            return
        now, num_running = self._clock(), self.num_begun
        gap_s = now - stream.last_at
        if not stream.num_tokens:
            self._begun(stream, now - stream.submitted_at, num_tokens)
            if request_id == self._alone:
                self._add(now - stream.submitted_at, stream.prompt_tokens, num_running)
        else:
            self._note_gap(gap_s)
            # One sample for each iteration: the other answers have a token in the same one.
            is_new = now - self._last_sample_at >= gap_s / 2
            if is_new and self._is_sample(stream, num_tokens, num_running):
                self._last_sample_at = now
                self._add(gap_s, 0, num_running)
        stream.num_tokens += num_tokens
        stream.last_at, stream.num_beside = now, self.num_begun

    def _begun(self, stream: _Stream, first_s: Seconds, num_tokens: int) -> None:
        """Record the first token of an answer, or all of them."""
        self.num_waiting -= 1
        self.most_begun = max(self.most_begun, self.num_begun)
        if stream.streams:
            self._short_s = _lower(self._short_s, first_s)
            size = max(1, stream.size_before + stream.size)
            self._short_s_per_size = _lower(self._short_s_per_size, first_s / size)
        else:
            pace_s = first_s / num_tokens
            self._short_pace_s = _lower(self._short_pace_s, pace_s)
            known_s = pace_s if math.isinf(self._pace_s) else self._pace_s
            self._pace_s = known_s + _RECENT * (pace_s - known_s)

    def _is_sample(self, stream: _Stream, num_tokens: int, num_running: int) -> bool:
        """True if the last gap of *stream* is the time of one iteration without a prefill."""
        return num_tokens == 1 and stream.num_beside == num_running and not self.num_waiting

    def _note_gap(self, gap_s: Seconds) -> None:
        now = self._clock()
        # What was seen is forgotten only while tokens come.
        streamed_s = min(gap_s, now - self._gap_at)
        self._gap_s = max(gap_s, self._gap_s * math.exp(-streamed_s / _GAP_MEMORY_S))
        self._gap_at = now

    def ended(self, request_id: str) -> None:
        """Record the end of a run."""
        stream = self._streams.pop(request_id, None)
        if stream is not None and not stream.num_tokens:
            self.num_waiting -= 1

    def drain(self) -> tuple[EngineIteration, ...]:
        """Estimated iterations since the last call."""
        iterations = tuple(self._iterations)
        self._iterations.clear()
        return iterations

    def _add(self, duration_s: float, prompt_tokens: int, num_decodes: int) -> None:
        if duration_s < _LEAST_GAP_S:
            return  # several tokens came in one packet
        context = sum(
            each.prompt_tokens + each.num_tokens
            for each in self._streams.values()
            if each.num_tokens
        )
        self._iterations.append(
            EngineIteration(
                compute_tokens=prompt_tokens + num_decodes,
                context_tokens=context,
                num_decodes=num_decodes,
                duration_s=duration_s,
                prefill_pairs=prompt_tokens**2 / 2,
            )
        )


def _lower(short: float, value: float) -> float:
    """A low quantile of the values so far, after one more."""
    if math.isinf(short):
        return value
    return short + (_DOWN if value < short else _UP) * (value - short)
