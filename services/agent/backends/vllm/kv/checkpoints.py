"""The scheduler's side of KV checkpoints: selects the blocks to save and to restore."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from services.agent.backends.host_claims import HostClaims
from services.agent.backends.host_index import BlockHash, HostIndex
from services.agent.backends.vllm.kv.transfers import Transfer, Transfers


class Tracked(Protocol):
    """A vLLM request as checkpoints see it."""

    request_id: str
    num_tokens: int
    num_computed_tokens: int
    block_hashes: Sequence[BlockHash]
    """Hashes of the blocks whose tokens are known."""


@dataclass(slots=True)
class _Run:
    request: Tracked
    origin: str
    num_noted: int = 0
    """Blocks that were copied or are being copied."""
    is_left: bool = False
    """True if no further blocks of the request are copied until it begins again."""


class _Mark(NamedTuple):
    """Blocks that an iteration completes."""

    run: _Run
    first: int
    block_ids: Sequence[int]


class Checkpoints:
    """
    Selects the copies of one engine: ConServe §4.4.

    Differs: copies are whole blocks, found by content, so that any request that begins with the
    same tokens can use them; blocks are saved between iterations; and a request that comes back is
    restored in the iteration in which it begins, layer by layer ahead of the forward pass, and not
    in one before.

    A block is saved after the iteration that completed it is known to be over, and before the next
    one computes: what was aborted inside a forward pass is never saved, and nothing is lost if a
    request loses its memory or ends in between. The index then knows the copy, and the next
    iteration may load it, since saves precede loads. Slots are reassigned only here, and the worker
    executes transfers in this order: so every load finds what the index promised.

    Args:
        index: Index of the host memory; written here only.
        block_tokens: Tokens in a block.
    """

    def __init__(self, index: HostIndex, *, block_tokens: int) -> None:
        self._index = index
        self._claims = HostClaims(index)
        self._block_tokens = block_tokens
        self._runs: dict[str, _Run] = {}
        self._matches: dict[str, int] = {}
        """Waiting request -> number of its blocks on the device, as of its last `match`."""
        self._marks: deque[tuple[int, list[_Mark]]] = deque()
        """Marks of unfinished iterations, by step."""
        self._saves: list[Transfer] = []
        self._loads: list[Transfer] = []
        self._cleared = False
        self._step = 0

    @property
    def has_work(self) -> bool:
        """True if the worker must get a message, even if nothing is computed."""
        return self._cleared or bool(self._saves)

    def track(self, request: Tracked, origin: str) -> None:
        """Save the blocks of *request*, a run of *origin*, as it grows."""
        self._runs[request.request_id] = _Run(request, origin)
        self._claims.begin(origin, lambda: request.block_hashes)

    def match(self, request: Tracked, num_computed_tokens: int) -> int:
        """
        Tokens of *request* beyond its first *num_computed_tokens* that can be loaded.

        The tokens fill whole blocks; at least one token is left to be computed.
        """
        most = min((request.num_tokens - 1) // self._block_tokens, len(request.block_hashes))
        first = num_computed_tokens // self._block_tokens
        self._matches[request.request_id] = first
        known = self._index.num_known(request.block_hashes[:most])
        return max(0, known - first) * self._block_tokens

    def admit(self, request: Tracked, block_ids: Sequence[int], num_tokens: int) -> None:
        """
        Record that *request* begins with allocated memory.

        Args:
            request: `match` was called for it in this iteration, or it has no tokens to load.
            block_ids: All its blocks.
            num_tokens: Tokens to load, of those that `match` returned.
        """
        first = self._matches.pop(request.request_id, 0)
        run = self._runs.get(request.request_id)
        if run is not None:
            run.num_noted, run.is_left = 0, False
        if num_tokens > 0:
            end = first + num_tokens // self._block_tokens
            hashes = request.block_hashes[:end]
            slots = self._index.slots(hashes[first:])
            self._index.touch(hashes)
            self._loads += map(Transfer, block_ids[first:end], slots)

    def plan(
        self, num_scheduled: Mapping[str, int], block_ids_of: Callable[[str], Sequence[int]]
    ) -> Transfers:
        """
        Transfers of the iteration that was just scheduled.

        Args:
            num_scheduled: Tokens by request, not yet counted as computed.
            block_ids_of: Returns all blocks of a scheduled request.
        """
        self._step += 1
        marks = []
        for request_id, count in num_scheduled.items():
            run = self._runs.get(request_id)
            if run is None or run.is_left:
                continue
            computed = run.request.num_computed_tokens
            full = (computed + count) // self._block_tokens
            # Aborted work is computed again.
            run.num_noted = min(run.num_noted, computed // self._block_tokens)
            if full > run.num_noted:
                block_ids = block_ids_of(request_id)[run.num_noted : full]
                marks.append(_Mark(run, run.num_noted, block_ids))
                run.num_noted = full
        self._marks.append((self._step, marks))
        transfers = Transfers(
            step=self._step,
            saves=tuple(self._saves),
            loads=tuple(self._loads),
            cleared=self._cleared,
        )
        self._saves.clear()
        self._loads.clear()
        self._cleared = False
        return transfers

    def complete(self, step: int) -> None:
        """
        Record that the iteration *step* is over and its requests' computed tokens are final.

        Earlier iterations that were not completed this way were aborted.
        """
        while self._marks and self._marks[0][0] <= step:
            of_step, marks = self._marks.popleft()
            for mark in marks if of_step == step else ():
                self._save(mark)

    def abort(self, request_id: str) -> None:
        """Record that the request was aborted; another request with its tokens may resume it."""
        self._matches.pop(request_id, None)
        run = self._runs.pop(request_id, None)
        if run is not None:
            self._claims.leave(run.origin)

    def finish(self, request_id: str) -> None:
        """Release the copies of a finished request, except those that others still use."""
        self._matches.pop(request_id, None)
        run = self._runs.pop(request_id, None)
        if run is not None:
            run.is_left = True
            self._claims.finish(run.origin)

    def clear(self) -> None:
        """Drop all copies; running requests are saved again."""
        self._index.clear()
        self._claims.clear()
        self._marks.clear()
        self._saves.clear()
        for run in self._runs.values():
            run.num_noted, run.is_left = 0, False
        self._cleared = True

    def _save(self, mark: _Mark) -> None:
        run, first, block_ids = mark
        request, end = run.request, first + len(block_ids)
        full = min(
            end, request.num_computed_tokens // self._block_tokens, len(request.block_hashes)
        )
        if full < end:
            # The rest was aborted, or its tokens are not known yet.
            run.num_noted = min(run.num_noted, full)
        if full <= first or run.is_left:
            return
        hashes = request.block_hashes[:full]
        known = self._index.num_known(hashes)
        slots = self._index.store(hashes) if known >= first else []
        self._saves += map(Transfer, block_ids[known - first :], slots)
        if known + len(slots) < full:
            # Either shared copies were dropped with a finished request, and are made again, or host
            # memory has no room for the request: then existing copies still shorten a restore, and
            # evicting others for more would cost too much.
            run.num_noted = known
            run.is_left = self._index.num_used == self._index.num_slots
