"""The scheduler's side of KV checkpoints: selects the blocks to save and to restore."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from services.agent.backends.host_claims import HostClaims
from services.agent.backends.host_index import BlockHash, HostIndex
from services.agent.backends.vllm.kv.transfers import Transfer, Transfers


class Tracked(Protocol):
    """A vLLM request with the fields that checkpoints read."""

    request_id: str
    num_tokens: int
    num_computed_tokens: int
    block_hashes: Sequence[BlockHash]
    """Hashes of the full blocks so far."""


@dataclass(slots=True)
class _Run:
    request: Tracked
    origin: str
    num_noted: int = 0
    """Number of blocks that were copied or are being copied."""
    is_left: bool = False
    """True if no further blocks are copied until the request begins again."""


class _Mark(NamedTuple):
    """Blocks that one iteration completes."""

    run: _Run
    first: int
    block_ids: Sequence[int]


class Checkpoints:
    """
    Selects the blocks of one engine that are copied to and from host memory (ConServe §4.4).

    Differs: copies are whole blocks that are found by content, so any request that begins with the
    same tokens can use them. Blocks are saved between iterations. A resumed request is restored in
    the iteration in which it begins, layer by layer ahead of the forward pass, not in an earlier
    iteration.

    A block is saved between the end of the iteration that completed it and the computation of the
    next iteration. Work that was dropped inside a forward pass is therefore never saved, and blocks
    are saved even if their request has lost its KV or has ended meanwhile.

    Saves precede loads, so the next iteration may already load a block that it saves. Only this
    class reassigns slots, and the worker executes transfers in their order, so every load finds the
    block that the index lists.

    Args:
        index: Index of the host memory; only this class writes it.
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
        """Blocks that unfinished iterations complete, by step."""
        self._saves: list[Transfer] = []
        self._loads: list[Transfer] = []
        self._cleared = False
        self._step = 0

    @property
    def has_work(self) -> bool:
        """True if the worker needs a message even when the iteration computes nothing."""
        return self._cleared or bool(self._saves)

    def track(self, request: Tracked, origin: str) -> None:
        """Register *request*, a run of *origin*, so that its blocks are saved as it grows."""
        self._runs[request.request_id] = _Run(request, origin)
        self._claims.begin(origin, lambda: request.block_hashes)

    def match(self, request: Tracked, num_computed_tokens: int) -> int:
        """
        Number of tokens of *request* after the first *num_computed_tokens* that can be loaded.

        The tokens fill whole blocks, and at least one token of the request remains to be computed.
        """
        most = min((request.num_tokens - 1) // self._block_tokens, len(request.block_hashes))
        first = num_computed_tokens // self._block_tokens
        self._matches[request.request_id] = first
        known = self._index.num_known(request.block_hashes[:most])
        return max(0, known - first) * self._block_tokens

    def admit(self, request: Tracked, block_ids: Sequence[int], num_tokens: int) -> None:
        """
        Record that *request* begins with the KV blocks *block_ids*.

        Args:
            request: `match` was called for it in this iteration, or it has no tokens to load.
            block_ids: All KV blocks of the request.
            num_tokens: Number of tokens to load, at most the number that `match` returned.
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
        Return the transfers of the iteration that was just scheduled.

        Args:
            num_scheduled: Scheduled tokens by request; they do not count as computed yet.
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
            # Tokens of an aborted iteration are computed and saved again.
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
        Record that the iteration *step* is over, so that its computed tokens are final.

        Earlier iterations without such a record count as aborted.
        """
        while self._marks and self._marks[0][0] <= step:
            of_step, marks = self._marks.popleft()
            for mark in marks if of_step == step else ():
                self._save(mark)

    def abort(self, request_id: str) -> None:
        """Record that the request was aborted; a later run with the same tokens may resume it."""
        self._matches.pop(request_id, None)
        run = self._runs.pop(request_id, None)
        if run is not None:
            self._claims.leave(run.origin)

    def finish(self, request_id: str) -> None:
        """Release the copies of a finished request, except copies that other requests still use."""
        self._matches.pop(request_id, None)
        run = self._runs.pop(request_id, None)
        if run is not None:
            run.is_left = True
            self._claims.finish(run.origin)

    def clear(self) -> None:
        """Drop all copies; the blocks of running requests will be saved again."""
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
            # The blocks after `full` were aborted, or vLLM does not know their tokens yet.
            run.num_noted = min(run.num_noted, full)
        if full <= first or run.is_left:
            return
        hashes = request.block_hashes[:full]
        known = self._index.num_known(hashes)
        slots = self._index.store(hashes) if known >= first else []
        self._saves += map(Transfer, block_ids[known - first :], slots)
        if known + len(slots) < full:
            # If host memory is full, no further blocks of this run are saved: the existing copies
            # still shorten a restore, and evicting copies of other requests would cost too much. If
            # it is not full, shared copies were dropped with a finished request, and are made
            # again.
            run.num_noted = known
            run.is_left = self._index.num_used == self._index.num_slots
