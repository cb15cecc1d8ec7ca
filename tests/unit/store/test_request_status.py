"""How far a request has come, by its row."""

from typing import Any

import pytest

from shared.contracts.base import RequestId, TenantId
from shared.contracts.stored import RequestState
from shared.store.requests.records import StoredRequest
from shared.store.requests.status import state_of, status_of


def a_row(**fields: Any) -> StoredRequest:
    values: dict[str, Any] = {
        "tenant": TenantId("acme"),
        "id": RequestId("r1"),
        "digest": "d",
        "is_asked": True,
        "endpoint": "/v1/completions",
        "model": "tiny",
        "created_at": 1000.5,
        "claimed_by": None,
        "claimed_until": None,
        "grouped_at": None,
        "lane": None,
        "expected_at": None,
        "instance_id": None,
        "started_at": None,
        "runs": 0,
        "ended_at": None,
        "outcome": None,
        "final": None,
        "kept_s": 60.0,
        "expires_at": 2000.5,
    }
    return StoredRequest(**(values | fields))


@pytest.mark.parametrize(
    ("fields", "state"),
    [
        ({}, RequestState.QUEUED),
        ({"claimed_by": "grouper", "claimed_until": 1010.5}, RequestState.QUEUED),
        ({"grouped_at": 1001.5}, RequestState.QUEUED),
        ({"grouped_at": 1001.5, "started_at": 1002.5, "runs": 1}, RequestState.RUNNING),
        ({"outcome": "completed", "final": b"{}", "started_at": 1002.5}, RequestState.COMPLETED),
        ({"outcome": "deadline_expired", "final": b"{}"}, RequestState.FAILED),
        ({"outcome": "cancelled", "final": b"{}", "started_at": 1002.5}, RequestState.CANCELLED),
    ],
)
def test_state_follows_from_the_row(fields: dict[str, Any], state: RequestState):
    assert state_of(a_row(**fields)) is state


def test_status_has_the_final_as_it_was_stored():
    row = a_row(outcome="completed", final=b'{"kind":"x"}', ended_at=1003.5, instance_id="i1")
    status = status_of(row)

    assert status.state is RequestState.COMPLETED
    assert bytes(status.final or b"") == b'{"kind":"x"}'
    assert (status.instance_id, status.ended_at, status.problem) == ("i1", 1003.5, None)
