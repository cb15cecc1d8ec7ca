"""
Sampling in a vLLM worker for requests that may resume on another instance.

The module uses private interfaces of vLLM; the contract suite fails when these change.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from services.agent.backends.vllm.shared.qos import read_qos
from services.agent.backends.vllm.shared.seeds import seed_at


class Resumable:
    """
    Mixin over a worker with model runner V1: a resumed answer equals an uninterrupted one.

    The request's seed and the token's position determine each draw of a random answer, so no draw
    depends on earlier draws or on their engine. Penalties and bad words count the progress as
    output, although vLLM receives it as prompt.

    Differs: plain V1 makes all draws of a run from one generator in sequence. On a CPU it rewinds
    that generator when a random request's prompt takes more than one iteration, and the engine
    dies. V2 also draws by position.
    """

    model_runner: Any

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        runner = self.model_runner
        if runner.execute_model_state is None:  # nothing was computed
            return super().sample_tokens(*args, **kwargs)  # type: ignore[misc]  # a mixin
        with _placed_draws(runner), _counted_progress(runner):
            return super().sample_tokens(*args, **kwargs)  # type: ignore[misc]  # a mixin


@contextmanager
def _placed_draws(runner: Any) -> Iterator[None]:
    """
    Context in which the generators of rows are seeded by position; rows without a new token have no
    generator.
    """
    batch = runner.input_batch
    generators: dict[int, Any] = batch.generators
    unfinished = np.nonzero(runner.discard_request_mask.np[: batch.num_reqs])[0]
    resting = {row: generators.pop(row) for row in map(int, unfinished) if row in generators}
    for row, generator in generators.items():
        seed = runner.requests[batch.req_ids[row]].sampling_params.seed
        generator.manual_seed(seed_at(seed, int(batch.num_tokens_no_spec[row])))
    try:
        yield
    finally:
        generators.update(resting)


@contextmanager
def _counted_progress(runner: Any) -> Iterator[None]:
    """
    Context in which penalties and bad words count the progress before the output tokens of a run.
    """
    batch = runner.input_batch
    metadata = batch.sampling_metadata
    if metadata.no_penalties and not metadata.bad_words_token_ids:
        yield
        return
    # With asynchronous scheduling the last token of a list is a placeholder. vLLM replaces it only
    # in its own lists, so update them before copying.
    batch.update_async_output_token_ids()
    states = [runner.requests[request_id] for request_id in batch.req_ids]
    outputs = [
        [*_progress_of(state), *own]
        for state, own in zip(states, metadata.output_token_ids, strict=True)
    ]
    holder = metadata.thinking_budget_state_holder
    batch.sampling_metadata = replace(
        metadata,
        output_token_ids=outputs,
        thinking_budget_state_holder=holder
        and RunTokens(holder, [len(_progress_of(state)) for state in states]),
    )
    try:
        yield
    finally:
        batch.sampling_metadata = metadata


class RunTokens:
    """
    A holder of thinking budgets that gets the tokens of the run only: it counts the reasoning in
    the progress as a part of the prompt.

    Args:
        holder: vLLM's `ThinkingBudgetStateHolder`.
        num_progress: Number of tokens of earlier runs before the output tokens, by row.
    """

    def __init__(self, holder: Any, num_progress: list[int]) -> None:
        self._holder = holder
        self._num_progress = num_progress

    def __getattr__(self, name: str) -> Any:
        return getattr(self._holder, name)

    def update_state(self, output_token_ids: list[list[int]], *args: Any, **kwargs: Any) -> None:
        """Pass on the output tokens without the progress."""
        own = zip(output_token_ids, self._num_progress, strict=True)
        self._holder.update_state([row[skipped:] for row, skipped in own], *args, **kwargs)


def _progress_of(state: Any) -> list[int]:
    """The progress of a request: the last tokens of its prompt, which an earlier run generated."""
    count = read_qos(state.sampling_params.extra_args).progress_tokens
    return list(state.prompt_token_ids[len(state.prompt_token_ids) - count :])
