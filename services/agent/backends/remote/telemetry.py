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

    def submitted(self, request_id: str, prompt_tokens: int) -> None:
        """Record the begin of a run."""
        self._alone = None if self._streams else request_id
        self.num_waiting += 1
        self._streams[request_id] = _Stream(prompt_tokens, self._clock())

    def received(self, request_id: str, num_tokens: int) -> Seconds | None:
        """Record tokens of a run; return the time to its first token if these are the first."""
        stream = self._streams.get(request_id)
        if stream is None or not num_tokens:
            return None
        now = self._clock()
        num_running = len(self._streams) - self.num_waiting
        first_s = None if stream.num_tokens else now - stream.submitted_at
        if first_s is not None:
            self.num_waiting -= 1
            if request_id == self._alone:
                self._add(first_s, stream.prompt_tokens, num_running)
        elif num_tokens == 1 and stream.num_beside == num_running and not self.num_waiting:
            gap_s = now - stream.last_at
            # One sample for each iteration: the other answers have a token in the same one.
            if now - self._last_sample_at >= gap_s / 2:
                self._last_sample_at = now
                self._add(gap_s, 0, num_running)
        stream.num_tokens += num_tokens
        stream.last_at, stream.num_beside = now, len(self._streams) - self.num_waiting
        return first_s

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
