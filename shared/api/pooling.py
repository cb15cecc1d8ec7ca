"""Requests to pooling models, which make vectors or scores of their inputs."""

from typing import Any

import msgspec

from shared.api.calls import EMBEDDINGS, ENDPOINTS
from shared.contracts.errors import ContractError
from shared.contracts.ingress import InferenceRequest
from shared.contracts.models import ModelEntry
from shared.contracts.requests import ApiCall, Sampling

MAX_INPUTS = 2048
"""Maximum number of inputs of one request."""
MAX_UNIT_VALUES = 1 << 21
"""Maximum count of numbers in the output of one request, whose final a broker must accept."""
NO_SAMPLING = Sampling(max_tokens=1, temperature=0.0, ignore_eos=True)
"""
Sampling of requests that generate nothing. One token is the smallest limit; `ignore_eos` keeps
these answers out of the lengths that the estimator learns.
"""

_BINARY = ("bytes", "bytes_only")
"""Values of `encoding_format` for which the response is not JSON."""


class _Encoded(msgspec.Struct, frozen=True):
    encoding_format: Any = None


_encoded = msgspec.json.Decoder(_Encoded)


def check_task(body: InferenceRequest, entry: ModelEntry) -> None:
    """
    Check that the model performs the task of the request.

    Raises:
        ContractError: The request has inputs for a model that generates, or none for a model that
            pools.
    """
    if entry.pools and not body.input_lengths:
        raise _generates_no_text(entry, "model")
    if body.input_lengths and not entry.pools:
        raise ContractError(
            f"{entry.name} generates text and pools no inputs",
            code="unsupported_task",
            param="model",
        )


def check_call_task(endpoint: str, entry: ModelEntry, *, param: str = "model") -> None:
    """
    Check that a model of the mesh's own engines performs the task of a call.

    Args:
        endpoint: Endpoint of the call.
        entry: The model.
        param: Field that names the model.

    Raises:
        ContractError: The call asks for embeddings of a model with another task than `embed`, or
            for text of a model that pools.
    """
    if endpoint in ENDPOINTS and entry.pools:
        raise _generates_no_text(entry, param)
    if endpoint == EMBEDDINGS and entry.task != "embed":
        raise ContractError(
            f"{entry.name} makes no embeddings, since its task is {entry.task}; {EMBEDDINGS} needs "
            "a model with the task embed",
            code="unsupported_task",
            param=param,
        )


def check_call_inputs(call: ApiCall, num_inputs: int) -> None:
    """
    Check a call to a pooling model, before vLLM's application reads it.

    Raises:
        ContractError: There are too many inputs, or the response would not be JSON.
    """
    if num_inputs > MAX_INPUTS:
        raise too_many_inputs(num_inputs)
    encoding = _encoded.decode(call.body).encoding_format
    if encoding in _BINARY:
        raise ContractError(
            f"encoding_format {encoding} is supported over HTTP only, since a message has a "
            "response in JSON: must be float or base64",
            code="unsupported_parameter",
            param="encoding_format",
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


def _generates_no_text(entry: ModelEntry, param: str) -> ContractError:
    return ContractError(
        f"{entry.name} generates no text, since its task is {entry.task}; it serves the "
        f"pooling routes of a gateway with vLLM, e.g. {EMBEDDINGS}",
        code="unsupported_task",
        param=param,
    )
