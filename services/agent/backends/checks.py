"""Checks that every backend makes before a request reaches its engine."""

from pathlib import Path

import msgspec

from services.agent.backends.base import EngineRequest
from shared.contracts.errors import EngineError, UnsupportedError
from shared.contracts.models import ModelEntry
from shared.contracts.requests import FinishReason, Tokens
from shared.contracts.telemetry import Capability


class _ModelConfig(msgspec.Struct, frozen=True):
    vocab_size: int | None = None
    text_config: "_ModelConfig | None" = None
    """Configuration of the language model, if the model also reads images."""


def vocab_size_of(entry: ModelEntry) -> int | None:
    """Vocabulary size of the model's embedding, from `config.json`; None if not stated there."""
    try:
        config = msgspec.json.decode(
            (Path(entry.path) / "config.json").read_bytes(), type=_ModelConfig
        )
    except (OSError, msgspec.DecodeError):
        return None
    return (config.text_config or config).vocab_size


def stop_tokens(entry: ModelEntry, request: EngineRequest) -> Tokens:
    """
    Tokens that end an answer: the request's stop tokens and, unless `ignore_eos`, the model's.
    """
    if request.sampling.ignore_eos:
        return tuple(token for token in request.stop_token_ids if token not in entry.eos_token_ids)
    return tuple(dict.fromkeys((*entry.eos_token_ids, *request.stop_token_ids)))


def finished_already(entry: ModelEntry, request: EngineRequest) -> FinishReason | None:
    """
    Finish reason if the progress already is a complete answer; None otherwise.

    The progress is complete if an earlier engine crashed after the last token and before the agent
    sent the final reply.
    """
    progress = request.progress
    if (
        progress
        and len(progress) >= request.sampling.min_tokens
        and progress[-1] in stop_tokens(entry, request)
    ):
        return FinishReason.STOP
    total = len(request.prompt) + len(progress)
    if len(progress) >= request.sampling.max_tokens or (progress and total >= entry.max_model_len):
        return FinishReason.LENGTH
    return None


def check_request(entry: ModelEntry, request: EngineRequest, vocab_size: int | None) -> None:
    """
    Reject requests that would harm the engine or get a wrong answer.

    Args:
        vocab_size: Exclusive upper bound of token ids; None: token ids are not checked.

    Raises:
        EngineError: The request has an empty or too long prompt, or a token outside the vocabulary.
    """
    num_tokens = len(request.prompt) + len(request.progress)
    if num_tokens == 0:
        raise EngineError("the prompt is empty")
    if entry.pools != bool(request.input_lengths):
        raise EngineError(f"{entry.name} does not serve this request: its task is {entry.task}")
    if entry.pools:
        _check_lengths(entry, request)
    elif num_tokens >= entry.max_model_len:
        raise EngineError(
            f"{num_tokens} tokens of prompt and progress leave no room for output within the "
            f"model's limit of {entry.max_model_len}"
        )
    tokens = request.prompt + request.progress
    if min(tokens) < 0 or (vocab_size is not None and max(tokens) >= vocab_size):
        raise EngineError(f"a token id is outside the model's vocabulary of {vocab_size}")


def check_call(capabilities: frozenset[Capability]) -> None:
    """
    Reject a call that the backend cannot answer. vLLM checks its tokens after it was rendered.

    Raises:
        UnsupportedError: The backend answers no calls.
    """
    if Capability.CALLS not in capabilities:
        raise UnsupportedError("this engine answers no requests with an endpoint")


def _check_lengths(entry: ModelEntry, request: EngineRequest) -> None:
    lengths = request.input_lengths
    if min(lengths) < 1 or sum(lengths) != len(request.prompt) or request.progress:
        raise EngineError("the lengths of the inputs do not agree with the tokens of the prompt")
    if max(lengths) > entry.max_model_len:
        raise EngineError(
            f"an input has {max(lengths)} tokens; the model's limit is {entry.max_model_len}"
        )


def output_room(entry: ModelEntry, request: EngineRequest) -> int:
    """Tokens that this run may still generate."""
    progress = len(request.progress)
    return min(
        request.sampling.max_tokens - progress,
        entry.max_model_len - len(request.prompt) - progress,
    )
