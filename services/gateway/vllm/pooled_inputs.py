"""Inputs of one HTTP request to a pooling model: the units that they make, and their outputs."""

from collections.abc import Iterable, Sequence

from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest

from services.engine_core.pooling import num_values, pooled_output
from shared.api.pooling import MAX_INPUTS, MAX_UNIT_VALUES, too_many_inputs
from shared.contracts.errors import ContractError
from shared.contracts.requests import RequestCompleted
from shared.producer.effects import NewTokens

MAX_UNIT_TOKENS = 1 << 18
"""Limit of the tokens in one unit, whose message a broker must accept."""


class PooledInputs:
    """Outputs of the inputs of one unit, as steps of an answer."""

    def __init__(self, requests: Sequence[EngineCoreRequest]) -> None:
        self.request_ids = tuple(request.request_id for request in requests)

    def of(self, _part: NewTokens) -> list[EngineCoreOutput]:
        """No output: the final has the vectors."""
        return []

    def last(
        self,
        final: RequestCompleted,
        *,
        cached_tokens: int = 0,  # noqa: ARG002 - called like `AnswerSteps.last`
    ) -> list[EngineCoreOutput]:
        """
        Outputs of all inputs.

        Raises:
            ContractError: The engine has made no vectors.
        """
        if len(final.details) != len(self.request_ids):
            raise ContractError(
                f"the engine {final.engine} makes no vectors", code="no_vectors", status=501
            )
        return [
            pooled_output(step, request_id)
            for step, request_id in zip(final.details, self.request_ids, strict=True)
        ]


def units_of(
    requests: Iterable[EngineCoreRequest], *, width: int
) -> list[tuple[EngineCoreRequest, ...]]:
    """
    The units in which the inputs of one HTTP request are published; a single one if its messages
    are not too large.

    Args:
        requests: The inputs.
        width: Length of the vectors that the model makes.

    Raises:
        ContractError: There are too many inputs, or the output of an input is too large.
    """
    requests = tuple(requests)
    if len(requests) > MAX_INPUTS:
        raise too_many_inputs(len(requests))
    units: list[list[EngineCoreRequest]] = [[]]
    tokens = values = 0
    for request in requests:
        own_tokens = len(request.prompt_token_ids or ())
        own_values = num_values(request, width=width)
        if own_values > MAX_UNIT_VALUES:
            raise ContractError(
                f"the output of an input of {own_tokens} tokens has {own_values} numbers; at most "
                f"{MAX_UNIT_VALUES} are returned",
                code="output_too_large",
                param="input",
                status=413,
            )
        tokens, values = tokens + own_tokens, values + own_values
        if units[-1] and (tokens > MAX_UNIT_TOKENS or values > MAX_UNIT_VALUES):
            units.append([])
            tokens, values = own_tokens, own_values
        units[-1].append(request)
    return [tuple(unit) for unit in units]
