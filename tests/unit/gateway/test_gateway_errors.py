"""Error bodies in the format of OpenAI's clients."""

import msgspec
import pytest
from starlette.exceptions import HTTPException

from services.gateway.errors import (
    anthropic_error_body,
    error_body,
    error_headers,
    error_info,
)
from services.gateway.outcomes import Outcome, outcome_of
from shared.contracts.errors import (
    BrokerConflictError,
    BrokerUnavailableError,
    CapacityError,
    ContractError,
    StoreFullError,
    StoreUnavailableError,
)
from shared.contracts.requests import ErrorInfo
from shared.producer.generation import RunDivergedError

CASES = [
    (ContractError("m", param="p"), 400, "invalid_request_error", Outcome.REFUSED),
    (ContractError("m", status=401), 401, "authentication_error", Outcome.REFUSED),
    (ContractError("m", status=404), 404, "invalid_request_error", Outcome.REFUSED),
    (ContractError("m", status=504), 504, "timeout_error", Outcome.TIMEOUT),
    (CapacityError("m", retry_after_s=0.2), 429, "rate_limit_error", Outcome.REFUSED),
    (BrokerUnavailableError("m"), 503, "server_error", Outcome.UNAVAILABLE),
    (BrokerConflictError("m"), 503, "server_error", Outcome.UNAVAILABLE),
    (StoreUnavailableError("m"), 503, "server_error", Outcome.UNAVAILABLE),
    (StoreFullError("m"), 507, "server_error", Outcome.FAILED),
    (RunDivergedError("m"), 502, "server_error", Outcome.DIVERGED),
    (HTTPException(404), 404, "invalid_request_error", Outcome.REFUSED),
    (HTTPException(405), 405, "invalid_request_error", Outcome.REFUSED),
    (KeyError("secret"), 500, "server_error", Outcome.FAILED),
]


@pytest.mark.parametrize(("error", "status", "kind", "outcome"), CASES)
def test_error_has_status_type_and_outcome(
    error: Exception, status: int, kind: str, outcome: Outcome
):
    info = error_info(error)
    body = msgspec.json.decode(error_body(info))

    assert info.status == status
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["type"] == kind
    assert outcome_of(info) is outcome


def test_unexpected_error_is_not_described_to_the_client():
    assert b"secret" not in error_body(error_info(KeyError("secret")))


def test_retry_after_is_whole_seconds_and_at_least_one():
    assert error_headers(ErrorInfo(message="m", code="c", retry_after_s=0.2)) == {
        "retry-after": "1"
    }
    assert error_headers(ErrorInfo(message="m", code="c", retry_after_s=2.1)) == {
        "retry-after": "3"
    }
    assert error_headers(ErrorInfo(message="m", code="c")) == {}


def test_every_status_has_an_outcome():
    outcomes = {outcome_of(ErrorInfo(message="m", code="c", status=n)) for n in range(400, 600)}

    assert outcomes == {Outcome.REFUSED, Outcome.UNAVAILABLE, Outcome.TIMEOUT, Outcome.FAILED}


def test_conflict_of_ids_names_the_header_that_they_are_made_of():
    """A client knows its key; only the mesh knows the id."""
    info = ErrorInfo(
        message="another request has the id", code="id_conflict", param="id", status=409
    )
    error = msgspec.json.decode(error_body(info))["error"]

    assert (error["code"], error["param"]) == ("id_conflict", "idempotency-key")
    assert "idempotency-key" in error["message"]
    assert b"idempotency-key" in anthropic_error_body(info)
