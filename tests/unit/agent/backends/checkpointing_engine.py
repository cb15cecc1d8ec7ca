"""A fake engine that copies KV as Headway's connector requests, without vLLM."""

from dataclasses import dataclass, field

import numpy as np

from services.agent.backends.host_index import HostIndex
from services.agent.backends.vllm.kv.checkpoints import Checkpoints
from services.agent.backends.vllm.kv.store import HostStore

BLOCK_TOKENS = 4


@dataclass
class Request:
    """The fields of a vLLM request that checkpoints use; *text* stands for the tokens."""

    request_id: str
    text: str
    num_computed_tokens: int = 0
    blocks: list[int] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return len(self.text)

    @property
    def block_hashes(self) -> list[bytes]:
        ends = range(BLOCK_TOKENS, len(self.text) + 1, BLOCK_TOKENS)
        return [self.text[:end].encode() for end in ends]


class Engine:
    """
    A fake engine whose KV of a block is a digest of all tokens up to its end.

    The engine allocates the block that was freed last, so that blocks change owners immediately. It
    writes garbage into the blocks of an aborted iteration.
    """

    def __init__(self, *, num_blocks: int = 64, num_slots: int = 64) -> None:
        self.index = HostIndex(num_slots)
        self.checkpoints = Checkpoints(self.index, block_tokens=BLOCK_TOKENS)
        self.kv = np.zeros((num_blocks, 8), dtype=np.uint8)
        self.store = HostStore(num_slots, {"0": self.kv[:, :2], "1": self.kv[:, 2:]})
        self.free = list(range(num_blocks))
        self.requests: dict[str, Request] = {}

    def add(
        self, name: str, text: str, *, checkpointed: bool = True, origin: str | None = None
    ) -> Request:
        request = self.requests[name] = Request(name, text)
        if checkpointed:
            self.checkpoints.track(request, origin or name)
        return request

    def preempt(self, name: str) -> None:
        request = self.requests[name]
        self.free += reversed(request.blocks)
        request.blocks = []
        request.num_computed_tokens = 0

    def abort(self, name: str) -> None:
        self.checkpoints.abort(name)
        self.preempt(name)
        del self.requests[name]

    def finish(self, name: str) -> None:
        self.checkpoints.finish(name)
        self.preempt(name)
        del self.requests[name]

    def iterate(self, counts: dict[str, int], *, aborted: frozenset[str] = frozenset()) -> None:
        """Compute *counts* tokens of each request, except those *aborted* inside the pass."""
        for name in counts:
            self._begin(self.requests[name])
        for name, count in counts.items():
            request = self.requests[name]
            end = request.num_computed_tokens + count
            assert end <= request.num_tokens
            while len(request.blocks) * BLOCK_TOKENS < end:
                request.blocks.append(self.free.pop())
        transfers = self.checkpoints.plan(counts, lambda name: self.requests[name].blocks)
        self.store.carry_out(transfers)
        self._forward(counts, aborted)
        if aborted:
            # the worker executes the transfers again for the remaining requests
            self.store.carry_out(transfers)
        for name, count in counts.items():
            self.requests[name].num_computed_tokens += count * (name not in aborted)
        if set(counts) != aborted or not counts:
            self.checkpoints.complete(transfers.step)

    def _begin(self, request: Request) -> None:
        """Load existing copies, as a scheduler does for a waiting request."""
        if request.blocks:
            return
        num_tokens = self.checkpoints.match(request, 0)
        request.blocks = [self.free.pop() for _ in range(num_tokens // BLOCK_TOKENS)]
        self.checkpoints.admit(request, request.blocks, num_tokens)
        request.num_computed_tokens = num_tokens

    def _forward(self, counts: dict[str, int], aborted: frozenset[str]) -> None:
        for name, count in counts.items():
            request = self.requests[name]
            self.check(request)
            first = request.num_computed_tokens // BLOCK_TOKENS
            end = request.num_computed_tokens + count
            for index in range(first, -(-end // BLOCK_TOKENS)):
                upto = min(end, (index + 1) * BLOCK_TOKENS)
                garbage = name in aborted
                self.kv[request.blocks[index]] = 255 if garbage else digest(request.text[:upto])

    def check(self, request: Request) -> None:
        """Check that all KV counted as computed is correct."""
        for index in range(request.num_computed_tokens // BLOCK_TOKENS):
            expected = digest(request.text[: (index + 1) * BLOCK_TOKENS])
            assert self.kv[request.blocks[index]].tolist() == expected.tolist()


def digest(text: str) -> np.ndarray:
    return np.frombuffer(f"{hash(text) & 0xFFFFFF:08d}"[-8:].encode(), dtype=np.uint8)
