"""Requests to pooling models, which make vectors or scores of their inputs."""

from shared.contracts.errors import ContractError
from shared.contracts.ingress import InferenceRequest
from shared.contracts.models import ModelEntry
from shared.contracts.requests import Sampling

MAX_INPUTS = 2048
"""Maximum number of inputs of one request."""
NO_SAMPLING = Sampling(max_tokens=1, temperature=0.0, ignore_eos=True)
"""
Sampling of requests that generate nothing. One token is the smallest limit; `ignore_eos` keeps
these answers out of the lengths that the estimator learns.
"""


def check_task(body: InferenceRequest, entry: ModelEntry) -> None:
    """
    Check that the model performs the task of the request.

    Raises:
        ContractError: The request has inputs for a model that generates, or none for a model that
            pools.
    """
    if entry.pools and not body.input_lengths:
        raise ContractError(
            f"{entry.name} generates no text, since its task is {entry.task}; it serves the "
            "pooling routes of a gateway with vLLM, e.g. /v1/embeddings",
            code="unsupported_task",
            param="model",
        )
    if body.input_lengths and not entry.pools:
        raise ContractError(
            f"{entry.name} generates text and pools no inputs",
            code="unsupported_task",
            param="model",
        )


def check_inputs(body: InferenceRequest, entry: ModelEntry) -> None:
    """
    Check the inputs of a request to a pooling model.

    Raises:
        ContractError: There are too many inputs, an input is empty or too long, or the lengths do
            not agree with the prompt.
    """
    lengths = body.input_lengths
    if len(lengths) > MAX_INPUTS:
        raise too_many_inputs(len(lengths))
    if not isinstance(body.prompt, tuple) or sum(lengths) != len(body.prompt) or min(lengths) < 1:
        raise ContractError(
            "input_lengths do not agree with the tokens of the prompt", param="input_lengths"
        )
    if max(lengths) > entry.max_model_len:
        raise ContractError(
            f"an input has {max(lengths)} tokens; {entry.name} allows {entry.max_model_len}",
            code="context_length_exceeded",
            param="input",
        )


def too_many_inputs(number: int) -> ContractError:
    """The error for a request with *number* inputs."""
    return ContractError(
        f"the request has {number} inputs; at most {MAX_INPUTS} are allowed",
        code="too_many_inputs",
        param="input",
    )
