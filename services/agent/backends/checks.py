"""Checks that every backend makes before a request reaches its engine."""

from pathlib import Path

import msgspec

from services.agent.backends.base import EngineRequest
from shared.contracts.errors import EngineError
from shared.contracts.models import ModelEntry
from shared.contracts.requests import FinishReason, Tokens


class _ModelConfig(msgspec.Struct, frozen=True):
    vocab_size: int


def vocab_size_of(entry: ModelEntry) -> int | None:
    """Vocabulary size of the model's embedding, from `config.json`; None if not stated there."""
    try:
        config = msgspec.json.decode(
            (Path(entry.path) / "config.json").read_bytes(), type=_ModelConfig
        )
    except (OSError, msgspec.DecodeError):
        return None
    return config.vocab_size


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

    The progress is complete if an earlier engine crashed after the last token and before the final
    reply.
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
        EngineError: The request has an adapter, an empty or too long prompt, or a token outside the
            vocabulary.
    """
    if request.adapter is not None:
        raise EngineError(f"adapter {request.adapter!r}: this backend serves base models only")
    num_tokens = len(request.prompt) + len(request.progress)
    if num_tokens == 0:
        raise EngineError("the prompt is empty")
    if num_tokens >= entry.max_model_len:
        raise EngineError(
            f"{num_tokens} tokens of prompt and progress leave no room for output within the "
            f"model's limit of {entry.max_model_len}"
        )
    tokens = request.prompt + request.progress
    if min(tokens) < 0 or (vocab_size is not None and max(tokens) >= vocab_size):
        raise EngineError(f"a token id is outside the model's vocabulary of {vocab_size}")


def output_room(entry: ModelEntry, request: EngineRequest) -> int:
    """Tokens that this run may still generate."""
    progress = len(request.progress)
    return min(
        request.sampling.max_tokens - progress,
        entry.max_model_len - len(request.prompt) - progress,
    )
