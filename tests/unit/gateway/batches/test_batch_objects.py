"""Objects and parameters of the Batch API."""

import json

import msgspec
import openai.types
import pytest

from services.gateway.batches.objects import (
    batch_list,
    batch_object,
    parse_page,
    parse_request,
    window_s,
)
from services.gateway.batches.openapi import batch_paths
from shared.contracts.errors import ContractError
from shared.contracts.qos import Slo
from shared.store.ids import new_batch_id, new_file_id
from shared.store.objects.batches import BatchStatus
from tests.stores import NOW, a_batch

FILE_ID = new_file_id(NOW)
ASKED = {"input_file_id": FILE_ID, "endpoint": "/v1/completions", "completion_window": "24h"}


@pytest.mark.parametrize(
    ("text", "length_s"),
    [("24h", 86400.0), ("90s", 90.0), ("1.5h", 5400.0), ("7d", 604800.0), ("2m", 120.0)],
)
def test_a_window_is_a_time(text: str, length_s: float):
    assert window_s(text) == length_s


@pytest.mark.parametrize("text", ["", "24", "h", "-1h", "0s", "8d", "1w", "24h ", "1e9s", "0.5s"])
def test_other_windows_are_refused(text: str):
    with pytest.raises(ContractError) as found:
        window_s(text)

    assert found.value.param == "completion_window"


def test_a_request_has_openais_fields_and_targets():
    asked = parse_request(
        json.dumps(
            ASKED
            | {
                "metadata": {"a": "b"},
                "output_expires_after": {"anchor": "created_at", "seconds": 3600},
                "slo": {"ttlt_s": 5.0},
                "unknown": 1,
            }
        ).encode()
    )

    assert asked.metadata == {"a": "b"}
    assert asked.output_expires_after is not None
    assert asked.output_expires_after.seconds == 3600
    assert asked.slo is not None
    assert asked.slo.ttlt_s == Slo(ttlt_s=5.0).ttlt_s


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"endpoint": "/v1/moderations"}, "endpoint"),
        ({"input_file_id": "file-1"}, "input_file_id"),
        ({"input_file_id": None}, "input_file_id"),
        ({"completion_window": 24}, "completion_window"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"metadata": {str(n): "" for n in range(17)}}, "metadata"),
        ({"output_expires_after": {"anchor": "x", "seconds": 9}}, "output_expires_after.anchor"),
        ({"slo": {"ttft": 1}}, "slo"),
    ],
)
def test_an_invalid_field_is_named(fields: dict[str, object], param: str):
    with pytest.raises(ContractError) as found:
        parse_request(json.dumps(ASKED | fields).encode())

    assert found.value.param == param


def test_a_missing_field_is_named():
    with pytest.raises(ContractError) as found:
        parse_request(b"{}")

    assert found.value.param == "input_file_id"


@pytest.mark.parametrize(
    ("query", "param"),
    [({"limit": "0"}, "limit"), ({"limit": "101"}, "limit"), ({"after": "batch_1"}, "after")],
)
def test_an_invalid_parameter_of_a_list_is_named(query: dict[str, str], param: str):
    with pytest.raises(ContractError) as found:
        parse_page(query)

    assert found.value.param == param


def test_a_list_begins_with_the_newest_by_default():
    batch_id = new_batch_id(NOW)
    page = parse_page({"limit": "5", "after": batch_id})

    assert (page.limit, page.after) == (5, batch_id)
    assert (parse_page({}).limit, parse_page({}).after) == (20, None)


@pytest.mark.parametrize(
    ("status", "field"),
    [
        (BatchStatus.COMPLETED, "completed_at"),
        (BatchStatus.FAILED, "failed_at"),
        (BatchStatus.EXPIRED, "expired_at"),
        (BatchStatus.CANCELLED, "cancelled_at"),
        (BatchStatus.IN_PROGRESS, None),
    ],
)
def test_openais_client_reads_the_object(status: BatchStatus, field: str | None):
    ended_at = None if field is None else NOW + 9.5
    batch = a_batch(
        status=status,
        ended_at=ended_at,
        in_progress_at=NOW + 1.0,
        num_lines=3,
        num_completed=2,
        num_failed=1,
        metadata='{"a":"b"}',
        errors='[{"code":"empty_file","message":"no","param":null,"line":null}]',
        expected_at=NOW + 20.0,
        lines_per_s=0.12345,
    )
    encoded = msgspec.json.encode(batch_object(batch))
    found = openai.types.Batch.model_validate_json(encoded, strict=True)
    ends = ("completed_at", "failed_at", "expired_at", "cancelled_at")

    assert (found.id, found.status, found.object) == (batch.id, status.value, "batch")
    assert {name for name in ends if getattr(found, name) is not None} == {field} - {None}
    assert field is None or getattr(found, field) == int(NOW + 9.5)
    assert found.request_counts is not None
    assert (found.request_counts.total, found.request_counts.completed) == (3, 2)
    assert found.metadata == {"a": "b"}
    assert found.errors is not None
    assert found.errors.data is not None
    assert found.errors.data[0].code == "empty_file"
    assert json.loads(encoded)["headway"] == {
        "expected_at": NOW + 20.0,
        "lines_per_s": 0.123,
        "submitted": 0,
    }


def test_a_page_names_its_first_and_last_batch():
    batches = [a_batch(), a_batch()]
    page = batch_list(batches, has_more=True)

    assert (page.first_id, page.last_id, page.has_more) == (batches[0].id, batches[1].id, True)
    assert batch_list([], has_more=False).first_id is None


def test_the_openapi_document_refers_to_schemas_that_it_has():
    paths, schemas = batch_paths()
    text = json.dumps(paths)

    assert set(paths) == {"/v1/batches", "/v1/batches/{batch_id}", "/v1/batches/{batch_id}/cancel"}
    for name in ("BatchRequest", "BatchObject", "BatchList"):
        assert f"#/components/schemas/{name}" in text
        assert name in schemas
