"""Requests to pooling models, which make vectors or scores of their inputs."""

from typing import Any

import msgspec

from shared.api.calls import EMBEDDINGS, ENDPOINTS
from shared.contracts.errors import ContractError
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


def check_generates(entry: ModelEntry) -> None:
    """
    Check that the model answers prompts.

    Raises:
        ContractError: The model pools.
    """
    if entry.pools:
        raise _generates_no_text(entry, "model")


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
            status=404,
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
            f"encoding_format {encoding} is not supported, since responses are JSON: must be float "
            "or base64",
            code="unsupported_parameter",
            param="encoding_format",
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
        f"pooling endpoints, e.g. {EMBEDDINGS}",
        code="unsupported_task",
        param=param,
        status=404,
    )
