"""
Order of work inside a simulated server of `ops.bench doors`, as in vLLM; pure, without a clock.

The caller begins an iteration, waits for its duration, and ends it.
"""

import heapq
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count

from shared.contracts.base import Seconds

BLOCK_TOKENS = 16
ANSWER_WORDS = tuple(f"zq{number}" for number in range(10))
"""
The tokens of every answer, again and again; prompts have them only where they repeat an answer.

Some gateways break off an answer that repeats one token.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Duration of an iteration as a sum of terms."""

    constant_s: Seconds = 0.040
    prefill_token_s: Seconds = 0.00025
    answer_s: Seconds = 0.001
    """Time for each answer that gets a token."""
    scale: float = 1.0
    """Slow motion: all times are multiplied by it."""

    def duration_s(self, prefill_tokens: int, answers: int) -> Seconds:
        """Duration of an iteration that computes so many prompt tokens and answers."""
        work_s = self.prefill_token_s * prefill_tokens + self.answer_s * answers
        return self.scale * (self.constant_s + work_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLimits:
    """Limits of a server, as its owner has set them."""

    max_running: int
    budget: int = 512
    """Number of tokens that an iteration computes at most."""
    num_blocks: int = 3750
    """Memory in blocks of `BLOCK_TOKENS` tokens."""


@dataclass(slots=True, eq=False)
class ServerRun:
    """One request at the server."""

    prompt: Sequence[str]
    answer_tokens: int
    priority: int
    """Lower first."""
    cached_tokens: int = 0
    """Prompt tokens that were in the cache when the request began."""
    computed: int = 0
    """Number of tokens of prompt and answer with KV."""
    generated: int = 0
    is_aborted: bool = False
    keys: list[int] = field(default_factory=list)
    """Keys of its full blocks, of which each depends on the ones before."""

    @property
    def is_over(self) -> bool:
        """True if nothing is left to compute."""
        return self.is_aborted or self.generated >= self.answer_tokens

    @property
    def left(self) -> int:
        """Number of tokens until the next answer token."""
        return max(1, len(self.prompt) - self.computed)

    def block(self, number: int) -> tuple[str, ...]:
        """Tokens of a full block, counted from 0."""
        first, last = number * BLOCK_TOKENS, (number + 1) * BLOCK_TOKENS
        end = len(self.prompt)
        answer = (ANSWER_WORDS[each % len(ANSWER_WORDS)] for each in range(first - end, last - end))
        return tuple(
            self.prompt[each] if each < end else word
            for each, word in zip(range(first, last), answer, strict=True)
        )


def answer_text(num_tokens: int) -> str:
    """An answer of so many tokens, each with a space after it."""
    return "".join(f"{ANSWER_WORDS[each % len(ANSWER_WORDS)]} " for each in range(num_tokens))


class PrefixCache:
    """Full blocks by key; those that no running request has are evicted, the oldest first."""

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._free: OrderedDict[int, None] = OrderedDict()
        self._used: Counter[int] = Counter()

    @property
    def num_used(self) -> int:
        """Number of different full blocks of running requests."""
        return len(self._used)

    def begin(self, run: ServerRun) -> None:
        """Take the longest cached part of the prompt; at least one token is left to compute."""
        for number in range((len(run.prompt) - 1) // BLOCK_TOKENS):
            key = self._next_key(run, number)
            if key not in self._used and key not in self._free:
                break
            self._take(run, key)
        run.cached_tokens = run.computed = len(run.keys) * BLOCK_TOKENS

    def computed(self, run: ServerRun) -> None:
        """Keep the blocks that *run* has filled."""
        for number in range(len(run.keys), run.computed // BLOCK_TOKENS):
            self._take(run, self._next_key(run, number))
        self._evict()

    def end(self, run: ServerRun) -> None:
        """Make the blocks of *run* free, unless other requests have them; the last one first."""
        for key in reversed(run.keys):
            self._used[key] -= 1
            if not self._used[key]:
                del self._used[key]
                self._free[key] = None
        self._evict()

    def _next_key(self, run: ServerRun, number: int) -> int:
        return hash((run.keys[-1] if run.keys else 0, run.block(number)))

    def _take(self, run: ServerRun, key: int) -> None:
        self._free.pop(key, None)
        self._used[key] += 1
        run.keys.append(key)

    def _evict(self) -> None:
        while self._free and len(self._free) + len(self._used) > self._num_blocks:
            self._free.popitem(last=False)


class ServerScheduler:
    """
    Iterations of a server: running requests first, then waiting ones by priority and arrival.

    A request leaves the waiting queue at the begin of an iteration with budget, a slot and memory
    left for it. Prompts are computed in chunks.

    Differs from vLLM: answers for which memory runs out are not preempted.
    """

    def __init__(self, limits: ServerLimits, speed: Speed) -> None:
        self._limits = limits
        self._speed = speed
        self._cache = PrefixCache(limits.num_blocks)
        self._numbers = count()
        self._waiting: list[tuple[int, int, ServerRun]] = []
        self._running: list[ServerRun] = []
        self._parts: list[tuple[ServerRun, int]] = []
        self.iterations = 0
        """Number of iterations since the start."""
        self.iteration_tokens = 0
        """Number of tokens that all iterations together have computed."""
        self.prompt_tokens = 0
        """Number of prompt tokens of all requests that have begun."""
        self.cached_tokens = 0
        """Number of these that were in the cache."""
        self.answer_tokens = 0
        """Number of answer tokens generated since the start."""

    @property
    def num_running(self) -> int:
        return sum(not run.is_over for run in self._running)

    @property
    def num_waiting(self) -> int:
        return sum(not run.is_aborted for _, _, run in self._waiting)

    @property
    def memory_used(self) -> float:
        """Share of the blocks that running requests have, 0..1; free cached blocks do not count."""
        partly = sum(not run.is_over for run in self._running)
        return min(1.0, (self._cache.num_used + partly) / self._limits.num_blocks)

    def submit(self, prompt: Sequence[str], answer_tokens: int, priority: int) -> ServerRun:
        """Add a request to the waiting queue."""
        run = ServerRun(prompt or ("",), max(1, answer_tokens), priority)
        heapq.heappush(self._waiting, (priority, next(self._numbers), run))
        return run

    def abort(self, run: ServerRun) -> None:
        """End a request whose client has left; one that is over stays as it is."""
        run.is_aborted = not run.is_over

    def begin(self) -> Seconds | None:
        """Begin an iteration, and return its duration; None if there is nothing to compute."""
        self._leave()
        budget, self._parts = self._limits.budget, []
        for run in self._running:
            budget = self._add(run, budget)
        while self._waiting and budget and len(self._running) < self._limits.max_running:
            run = self._waiting[0][2]
            if run.is_aborted:
                heapq.heappop(self._waiting)
                continue
            if not self._has_memory_for(run):
                break
            heapq.heappop(self._waiting)
            self._cache.begin(run)
            self.prompt_tokens += len(run.prompt)
            self.cached_tokens += run.cached_tokens
            self._running.append(run)
            budget = self._add(run, budget)
        if not self._parts:
            return None
        answers = sum(run.computed >= len(run.prompt) for run, _ in self._parts)
        prefill = sum(tokens for _, tokens in self._parts) - answers
        self.iterations += 1
        self.iteration_tokens += prefill + answers
        return self._speed.duration_s(prefill, answers)

    def end(self) -> list[ServerRun]:
        """End the iteration, and return the requests that have a new answer token."""
        with_token = []
        for run, tokens in self._parts:
            if run.is_aborted:
                continue
            run.computed += tokens
            self._cache.computed(run)
            if run.computed >= len(run.prompt):
                run.generated += 1
                self.answer_tokens += 1
                with_token.append(run)
        self._parts = []
        self._leave()
        return with_token

    def _add(self, run: ServerRun, budget: int) -> int:
        """Compute a chunk of *run* in this iteration; return the rest of the budget."""
        if tokens := min(budget, run.left):
            self._parts.append((run, tokens))
        return budget - tokens

    def _leave(self) -> None:
        for run in self._running:
            if run.is_over:
                self._cache.end(run)
        self._running = [run for run in self._running if not run.is_over]

    def _has_memory_for(self, run: ServerRun) -> bool:
        """
        True if the prompt fits beside those that run, or nothing runs; shared blocks count for each
        request.
        """
        tokens = [len(each.prompt) + each.generated for each in (*self._running, run)]
        blocks = sum(1 + number // BLOCK_TOKENS for number in tokens)
        return not self._running or blocks <= self._limits.num_blocks
