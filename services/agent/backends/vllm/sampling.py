"""Sampling fields to vLLM's. Runs in the engine host."""

from hashlib import blake2b

import msgspec
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from services.agent.backends.vllm.qos import QOS_KEY, qos_of
from services.agent.backends.vllm.wire import Submit


def seed_at(seed: int, offset: int) -> int:
    """
    The seed of a run that begins at token *offset* of the answer.

    Differs: vLLM's generator begins anew with each run, so a resumed random answer goes on
    differently than it would have; with the plain seed it would repeat its first draws.
    """
    if offset == 0:
        return seed
    digest = blake2b(f"{seed}/{offset}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def sampling_params(command: Submit) -> SamplingParams:
    """
    What vLLM is told; counts are of this run, so those of the progress are taken off.

    Stop strings are the agent's duty, since the engine sees no text.

    Differs: progress is prompt to vLLM, so presence and frequency penalties do not count it
    in a resumed run; the repetition penalty does.
    """
    sampling = command.sampling
    offset = len(command.progress)
    return SamplingParams(
        max_tokens=sampling.max_tokens - offset,
        min_tokens=max(0, min(sampling.min_tokens, sampling.max_tokens) - offset),
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        seed=None if sampling.seed is None else seed_at(sampling.seed, offset),
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        stop_token_ids=list(command.stop_token_ids),
        # Without a tokenizer the engine knows no end token but those above.
        ignore_eos=sampling.ignore_eos,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        extra_args={QOS_KEY: msgspec.to_builtins(qos_of(command))},
    )
