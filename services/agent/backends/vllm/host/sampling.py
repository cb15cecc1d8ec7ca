"""Creates vLLM's sampling parameters for a run. Runs in the engine host."""

from typing import Any

import msgspec
from vllm import SamplingParams
from vllm.v1.engine import EngineCoreRequest

from services.agent.backends.base import EngineRequest
from services.agent.backends.vllm.shared.qos import QOS_KEY, qos_of
from services.agent.backends.vllm.shared.seeds import seed_at
from services.agent.backends.vllm.shared.wire import Submit
from services.agent.backends.vllm.shared.workers import draws_by_position

_NUM_SEEDS = 1 << 63


def answer_params(
    command: Submit, encoded: EngineCoreRequest | None, generation_config: dict[str, Any]
) -> SamplingParams:
    """
    Sampling parameters of the whole answer of which a run generates the rest.

    Args:
        command: The run.
        encoded: The request in the run's payload; None: the run has Headway's sampling fields only.
        generation_config: The model's `generation_config.json`, which may have end tokens.

    Raises:
        ValueError: A parameter is invalid.
    """
    if encoded is None:
        params = _converted(command)
        params.update_from_generation_config(generation_config)
        return params
    if encoded.sampling_params is None:
        raise ValueError("the encoded request has no sampling parameters")
    return encoded.sampling_params


def run_params(params: SamplingParams, request: EngineRequest, config: Any) -> SamplingParams:
    """
    Sampling parameters of the run that continues an answer.

    Args:
        params: Parameters of the whole answer.
        request: The run.
        config: `VllmConfig` of the run's engine.

    Raises:
        ValueError: The progress already has the largest number of tokens.
    """
    params = params.clone()
    _begin_after_progress(params, request, config)
    params.extra_args = (params.extra_args or {}) | {QOS_KEY: msgspec.to_builtins(qos_of(request))}
    return params


def _converted(command: Submit) -> SamplingParams:
    """
    Convert Headway's sampling fields, which apply to the whole answer, to vLLM's.

    The agent handles stop strings, since the engine processes tokens only.
    """
    sampling = command.request.sampling
    return SamplingParams(
        max_tokens=sampling.max_tokens,
        min_tokens=min(sampling.min_tokens, sampling.max_tokens),
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        # vLLM takes -1 for no seed.
        seed=None if sampling.seed is None else sampling.seed % _NUM_SEEDS,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        stop_token_ids=list(command.stop_token_ids),
        # The engine has no tokenizer, so `stop_token_ids` must contain all end tokens.
        ignore_eos=sampling.ignore_eos,
        detokenize=False,
    )


def _begin_after_progress(params: SamplingParams, request: EngineRequest, config: Any) -> None:
    """
    Change parameters of the whole answer into parameters of the run that follows the progress.

    vLLM counts output tokens per run, so the limits are reduced by the tokens of the progress.

    Differs: some engines draw all tokens of a run from one generator in sequence. There a resumed
    random answer differs from an uninterrupted one. The run gets another seed than the request,
    because the request's seed would repeat the first draws.

    Raises:
        ValueError: The progress already has the largest number of tokens.
    """
    offset = len(request.progress)
    if params.max_tokens is None or params.max_tokens <= offset:
        raise ValueError(f"max_tokens {params.max_tokens} leave no token after {offset} tokens")
    params.max_tokens -= offset
    params.min_tokens = max(0, params.min_tokens - offset)
    if offset:
        params.prompt_logprobs = None  # an earlier run has returned the prompt's log probabilities
    if params.seed is not None and not draws_by_position(config):
        params.seed = seed_at(params.seed, offset)
