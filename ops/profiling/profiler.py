"""Measures the iterations of an engine for each batch of a grid."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from itertools import count

import numpy as np

from ops.engine_runs import generate
from ops.profiling.grid import Grid, Sample
from services.agent.backends.base import (
    EngineBackend,
    EngineRequest,
    SchedulingParameters,
)
from shared.contracts.base import ModelName, RequestId
from shared.contracts.errors import EngineError, SettingsError, UnsupportedError
from shared.contracts.requests import Sampling
from shared.contracts.telemetry import Capability, Iteration
from solver.prediction.latency.iteration_fit import IterationWork

CHUNKS_DEEP = 8
"""Number of chunks per measured prompt; all chunks except the first have a context."""
ROOM_TOKENS = 256
"""Tokens reserved for answers: decodes generate them while prompts are computed."""
_DECODE_STEPS = 8
"""Number of measured iterations of a batch of decodes without a prefill."""
_FIRST_TOKEN, _LAST_TOKEN = 10, 500
_PATIENCE_S = 120.0
"""Time limit for measuring one prompt or one batch of decodes."""
_POLL_S = 0.002


class Profiler:
    """
    Measures an engine on which *model* is active and no other request runs.

    Args:
        engine: Engine with a policy that gives prompts all tokens that the limits allow.
        model: The active model.
        max_model_len: Maximum tokens of prompt and answer.
        seed: Seed of the prompts' tokens.

    Raises:
        UnsupportedError: The engine reports no iterations, or its limits cannot be set.
    """

    def __init__(
        self, engine: EngineBackend, model: ModelName, *, max_model_len: int, seed: int = 0
    ) -> None:
        for needed in (Capability.TELEMETRY, Capability.SCHEDULING):
            if needed not in engine.identity.capabilities:
                raise UnsupportedError(
                    f"{engine.identity.engine} cannot be profiled: it lacks {needed.value}"
                )
        self._engine = engine
        self._model = model
        self._max_model_len = max_model_len
        self._random = np.random.default_rng(seed)
        self._ids = count()

    async def measure(self, grid: Grid, progress: Callable[[str], None]) -> list[list[Sample]]:
        """
        Measure the grid; return the samples of each repeat.

        Args:
            grid: Grid to measure; rows that do not fit the engine's memory or slots are omitted
                and reported.
            progress: Receives progress lines.

        Raises:
            SettingsError: A chunk or context does not fit the model.
            EngineError: The engine died, or took too long.
        """
        self._check(grid)
        rows = [(0, 0), *self._rows(grid, progress)]
        await self._row(grid, 0, 0)  # warm-up
        repeats: list[list[Sample]] = []
        for repeat in range(grid.repeats):
            samples: list[Sample] = []
            for number, (batch, context) in enumerate(rows, start=1):
                samples += await self._row(grid, batch, context)
                progress(
                    f"repeat {repeat + 1} of {grid.repeats}, row {number} of {len(rows)}: beside "
                    f"{batch} decodes of {context} tokens; {len(samples)} iterations"
                )
            repeats.append(samples)
        return repeats

    def _check(self, grid: Grid) -> None:
        most = self._max_model_len - ROOM_TOKENS
        for name, values in (("chunks", grid.chunks), ("contexts", grid.contexts)):
            if max(values) > most:
                raise SettingsError(
                    f"{name}: {max(values)} is above the limit of {most} for {self._model}: it "
                    f"holds {self._max_model_len} tokens, of which {ROOM_TOKENS} are reserved "
                    "for answers"
                )

    def _rows(self, grid: Grid, progress: Callable[[str], None]) -> list[tuple[int, int]]:
        """Pairs (batch, context) that fit into the engine together with the longest prompt."""
        state = self._engine.snapshot()
        room = state.kv_capacity_tokens - self._prompt_tokens(max(grid.chunks))
        rows = []
        for batch in grid.batches:
            for context in grid.contexts:
                if batch < state.max_running and batch * (context + ROOM_TOKENS) <= room:
                    rows.append((batch, context))
                else:
                    progress(
                        f"left out for lack of room in the engine: {batch} decodes of "
                        f"{context} tokens"
                    )
        return rows

    def _prompt_tokens(self, chunk: int) -> int:
        most = min(self._max_model_len - 1, self._engine.snapshot().kv_capacity_tokens // 2)
        return min(CHUNKS_DEEP * chunk, most)

    async def _row(self, grid: Grid, batch: int, context: int) -> list[Sample]:
        """Measure *batch* decodes alone, and together with each chunk size."""
        await self._limit(max(grid.chunks) + batch, max(1, batch))
        decodes = _Decodes(
            self._engine,
            [self._request(context, self._max_model_len - context) for _ in range(batch)],
        )
        samples: list[Sample] = []
        try:
            async with _patience(f"{batch} decodes of {context} tokens"):
                await decodes.begin()
                self._engine.drain_iterations()
                await decodes.steps(_DECODE_STEPS)
            samples += [_sample(each, context, 0) for each in self._engine.drain_iterations()]
            for chunk in grid.chunks:
                samples += await self._prompt(chunk, batch, context)
        finally:
            await decodes.end()
        # Iterations during the fill of a batch are not part of the grid.
        return [each for each in samples if each.num_decodes == batch]

    async def _prompt(self, chunk: int, batch: int, context: int) -> list[Sample]:
        """Measure a prompt in chunks of *chunk* tokens, beside *batch* decodes."""
        await self._limit(chunk + batch, batch + 1)
        self._engine.drain_iterations()
        length = self._prompt_tokens(chunk)
        samples: list[Sample] = []
        before = 0
        async with _patience(f"a prompt of {length} tokens in chunks of {chunk}"):
            async for _ in generate(self._engine, self._request(length, 1)):
                pass
            # Telemetry may arrive after the answer.
            while before < length:
                for each in self._engine.drain_iterations():
                    samples.append(_sample(each, context, before))
                    before += each.compute_tokens - each.num_decodes
                await asyncio.sleep(_POLL_S)
        return [each for each in samples if each.chunk_tokens > 0]

    async def _limit(self, token_budget: int, max_running: int) -> None:
        await self._engine.set_scheduling(
            SchedulingParameters(token_budget=token_budget, max_running=max_running)
        )

    def _request(self, prompt_tokens: int, output_tokens: int) -> EngineRequest:
        """A request with a random prompt, which no prefix cache contains."""
        prompt = self._random.integers(_FIRST_TOKEN, _LAST_TOKEN, prompt_tokens)
        return EngineRequest(
            request_id=RequestId(f"profile-{next(self._ids)}"),
            model=self._model,
            prompt=tuple(prompt.tolist()),
            sampling=Sampling(max_tokens=output_tokens, temperature=0.0, ignore_eos=True),
        )


class _Decodes:
    """Requests that decode until `end` aborts them; possibly none."""

    def __init__(self, engine: EngineBackend, requests: Sequence[EngineRequest]) -> None:
        self._engine = engine
        self._requests = requests
        self._num_tokens = [0] * len(requests)
        self._tasks: list[asyncio.Task[None]] = []

    async def begin(self) -> None:
        """Start all requests, and wait until each of them has its first token."""
        self._tasks = [
            asyncio.create_task(self._decode(place)) for place in range(len(self._requests))
        ]
        await self.steps(1)

    async def steps(self, number: int) -> None:
        """
        Wait until every request has *number* tokens more than the current minimum over requests.
        """
        target = min(self._num_tokens, default=0) + number
        while any(tokens < target for tokens in self._num_tokens):
            for each in self._tasks:
                if each.done():
                    each.result()
                    raise EngineError("a decode ended before it was measured")
            await asyncio.sleep(_POLL_S)

    async def end(self) -> None:
        """Abort all requests that decode."""
        for request in self._requests:
            self._engine.abort(request.request_id)
        for each in self._tasks:
            each.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _decode(self, place: int) -> None:
        async for output in generate(self._engine, self._requests[place]):
            self._num_tokens[place] += len(output.token_ids)


@asynccontextmanager
async def _patience(what: str) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(_PATIENCE_S):
            yield
    except TimeoutError as error:
        raise EngineError(f"{what} took over {_PATIENCE_S:g} s") from error


def _sample(iteration: Iteration, decode_context_tokens: int, before: int) -> Sample:
    chunk = iteration.compute_tokens - iteration.num_decodes
    return Sample(
        work=IterationWork(
            tokens=iteration.compute_tokens,
            pairs=chunk * (before + chunk / 2),
            context_tokens=iteration.context_tokens,
        ),
        num_decodes=iteration.num_decodes,
        decode_context_tokens=decode_context_tokens,
        before=before if chunk else 0,
        duration_s=iteration.duration_s,
    )
