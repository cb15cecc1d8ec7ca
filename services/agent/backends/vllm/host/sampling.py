"""Converts sampling fields to vLLM's. Runs in the engine host."""

from typing import Any

import msgspec
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from services.agent.backends.vllm.shared.qos import QOS_KEY, qos_of
from services.agent.backends.vllm.shared.seeds import seed_at
from services.agent.backends.vllm.shared.wire import Submit
from services.agent.backends.vllm.shared.workers import draws_by_position

_NUM_SEEDS = 1 << 63


def sampling_params(command: Submit, config: Any) -> SamplingParams:
    """
    Sampling parameters of a run for vLLM.

    vLLM counts output tokens per run, so the limits are reduced by the tokens of the progress.

    The agent handles stop strings, since the engine processes tokens only.

    Differs: some engines draw all tokens of a run from one generator in sequence. There a resumed
    random answer differs from an uninterrupted one: the run gets another seed, because the
    request's own seed would repeat the first draws.

    Args:
        command: The run.
        config: `VllmConfig` of the run's engine.
    """
    sampling = command.request.sampling
    offset = len(command.request.progress)
    # vLLM takes -1 for no seed.
    seed = None if sampling.seed is None else sampling.seed % _NUM_SEEDS
    if seed is not None and not draws_by_position(config):
        seed = seed_at(seed, offset)
    return SamplingParams(
        max_tokens=sampling.max_tokens - offset,
        min_tokens=max(0, min(sampling.min_tokens, sampling.max_tokens) - offset),
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        seed=seed,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        stop_token_ids=list(command.stop_token_ids),
        # Without a tokenizer the engine knows no end token except those above.
        ignore_eos=sampling.ignore_eos,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        extra_args={QOS_KEY: msgspec.to_builtins(qos_of(command.request))},
    )
