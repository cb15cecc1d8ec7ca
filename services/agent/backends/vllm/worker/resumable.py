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
    depends on earlier draws or on their engine. Penalties count the progress as output, although
    vLLM receives it as prompt.

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
    """Reseed generators of rows by position; rows without a new token get no generator."""
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
    """For rows with penalties, put the progress before the output tokens of this run."""
    batch = runner.input_batch
    metadata = batch.sampling_metadata
    if metadata.no_penalties:
        yield
        return
    # With asynchronous scheduling the last token of a list is a placeholder, which vLLM replaces in
    # its own lists only.
    batch.update_async_output_token_ids()
    states = [runner.requests[request_id] for request_id in batch.req_ids]
    outputs = [
        [*_progress_of(state), *own]
        for state, own in zip(states, metadata.output_token_ids, strict=True)
    ]
    batch.sampling_metadata = replace(metadata, output_token_ids=outputs)
    try:
        yield
    finally:
        batch.sampling_metadata = metadata


def _progress_of(state: Any) -> list[int]:
    """The last tokens of the prompt, which an earlier run generated."""
    count = read_qos(state.sampling_params.extra_args).progress_tokens
    return list(state.prompt_token_ids[len(state.prompt_token_ids) - count :])
