"""Grid of the iterations that are timed for a model's shape."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated

from cyclopts import Parameter

from ops.profiling.grid import Grid, Sample
from ops.profiling.model_shape import ModelShape
from ops.profiling.option_values import integers
from shared.contracts.base import Seconds
from shared.contracts.errors import SettingsError
from shared.runtime.options import IntegerOption
from solver.prediction.latency.iteration_fit import IterationWork


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One timed iteration with equal decodes, at most one prefill, or both."""

    num_decodes: int
    decode_context_tokens: int
    """Computed tokens of each decode; 0 without decodes."""
    chunk_tokens: int
    before_tokens: int
    """Number of tokens of the prefill that were computed before; 0 without a prefill."""

    @property
    def tokens(self) -> int:
        """Number of computed tokens of the iteration."""
        return self.num_decodes + self.chunk_tokens

    @property
    def num_requests(self) -> int:
        return self.num_decodes + (self.chunk_tokens > 0)

    @property
    def decode_kv_tokens(self) -> int:
        """KV positions that all decodes attend to, including the positions of their new tokens."""
        return self.num_decodes * (self.decode_context_tokens + 1)

    @property
    def prefill_kv_tokens(self) -> int:
        """KV positions that the prefill attends to: earlier tokens and the tokens of the chunk."""
        return self.before_tokens + self.chunk_tokens

    @property
    def prefill_pairs(self) -> float:
        """Number of pairs of a prefill token and a token that it attends to."""
        return self.chunk_tokens * (self.before_tokens + self.chunk_tokens / 2)

    def sample(self, duration_s: Seconds) -> Sample:
        """A sample of this iteration with the duration *duration_s*."""
        return Sample(
            work=IterationWork(
                tokens=self.tokens,
                pairs=self.prefill_pairs,
                context_tokens=self.num_decodes * self.decode_context_tokens + self.before_tokens,
            ),
            num_decodes=self.num_decodes,
            decode_context_tokens=self.decode_context_tokens,
            before=self.before_tokens,
            duration_s=duration_s,
        )

    def flops(self, shape: ModelShape) -> float:
        """Number of floating-point operations of this iteration with the model shape *shape*."""
        return shape.flops(
            tokens=self.tokens,
            pairs=self.prefill_pairs + self.decode_kv_tokens,
            answers=self.num_requests,
        )


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class ShapeGrid:
    """
    Grid of timed iterations: chunks after each context, alone and with each batch of decodes;
    decodes alone. Its fields are options of `headway profile shape`.
    """

    grid: Grid = field(default_factory=Grid)
    prefill_contexts: Annotated[tuple[int, ...], integers(least=0)] = (0, 1024, 4096, 16384)
    """Tokens of a prompt that were computed before a chunk of it."""
    passes: IntegerOption = 3
    """Timed runs of each iteration in each repeat; their median is used."""

    def __post_init__(self) -> None:
        if not self.prefill_contexts or min(self.prefill_contexts) < 0:
            raise SettingsError(
                f"prefill_contexts: all values must be at least 0: {self.prefill_contexts}"
            )
        if self.passes < 1:
            raise SettingsError(f"passes must be at least 1: {self.passes}")

    def batches(self, shape: ModelShape, progress: Callable[[str], None]) -> list[Batch]:
        """
        All batches that *shape* allows; batches that are too long are omitted and reported.

        Raises:
            SettingsError: A chunk or a decode's context alone is longer than the model's limit.
        """
        self._check(shape)
        befores = [
            each
            for each in self.prefill_contexts
            if each + min(self.grid.chunks) <= shape.max_tokens
        ]
        if len(befores) < len(self.prefill_contexts):
            longer = ", ".join(str(each) for each in self.prefill_contexts if each not in befores)
            limit = f"{shape.max_tokens_field} is {shape.max_tokens}"
            progress(f"left out, since {limit}: chunks after contexts of {longer} tokens")
        chunks = [
            (chunk, before)
            for chunk in self.grid.chunks
            for before in befores
            if before + chunk <= shape.max_tokens
        ]
        rows = [(batch, context) for batch in self.grid.batches for context in self.grid.contexts]
        return [
            Batch(num_decodes=batch, decode_context_tokens=context, chunk_tokens=chunk,
                  before_tokens=before)
            for batch, context in [(0, 0), *rows]
            for chunk, before in [*([(0, 0)] if batch else []), *chunks]
        ]  # fmt: skip

    def _check(self, shape: ModelShape) -> None:
        for name, values, room in (
            ("chunks", self.grid.chunks, shape.max_tokens),
            ("contexts", self.grid.contexts, shape.max_tokens - 1),
        ):
            if max(values) > room:
                raise SettingsError(
                    f"{name}: {max(values)} is above the limit of {room} for {shape.name}: its "
                    f"{shape.max_tokens_field} is {shape.max_tokens}"
                )
