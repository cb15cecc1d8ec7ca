"""Objects and parameters of OpenAI's Batch API."""

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from services.gateway.batches.lines import ENDPOINTS
from services.gateway.parameters import whole_number
from shared.contracts.base import Seconds, UnixTime, hinted
from shared.contracts.errors import ContractError
from shared.contracts.ingress import RequestedSlo
from shared.store.ids import is_batch_id, is_file_id
from shared.store.objects.batches import BatchStatus, StoredBatch

MIN_WINDOW_S, MAX_WINDOW_S = 1.0, 7 * 24 * 3600.0
MIN_EXPIRES_S, MAX_EXPIRES_S = 3600, 30 * 24 * 3600
"""Limits of `output_expires_after.seconds` in OpenAI's API."""
MAX_LIMIT, DEFAULT_LIMIT = 100, 20
MAX_METADATA = 16
_UNITS: Mapping[str, Seconds] = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_WINDOW = re.compile(r"(\d{1,9}(?:\.\d{1,3})?)([smhd])")


class ExpiresAfter(msgspec.Struct, frozen=True, kw_only=True):
    """Life of the result files."""

    anchor: Literal["created_at"]
    seconds: Annotated[int, Meta(ge=MIN_EXPIRES_S, le=MAX_EXPIRES_S)]


class BatchRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Body of `POST /v1/batches`."""

    input_file_id: str
    endpoint: str
    completion_window: str
    """OpenAI's `24h`, or another time, e.g. `90s`, `30m`, `2h` or `7d`."""
    metadata: (
        Annotated[
            dict[
                Annotated[str, Meta(max_length=64)],
                Annotated[str, Meta(max_length=512)],
            ],
            Meta(max_length=MAX_METADATA),
        ]
        | None
    ) = None
    output_expires_after: ExpiresAfter | None = None
    slo: RequestedSlo | None = None
    """
    Targets of each line that sets none, from its publication; `{}` means best effort. The default
    is a deadline shortly before the end of the window.
    """


class RequestCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Lines of a batch."""

    total: int
    completed: int
    failed: int


class BatchError(msgspec.Struct, frozen=True, kw_only=True):
    """Why a batch failed."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


class BatchErrors(msgspec.Struct, frozen=True, kw_only=True):
    """Why a batch failed, in OpenAI's form."""

    object: Literal["list"] = "list"
    data: list[BatchError]


class BatchProgress(msgspec.Struct, frozen=True, kw_only=True):
    """What the mesh adds to a batch."""

    expected_at: float | None
    """Unix time of the expected end; null before the first lines have ended, and afterwards."""
    lines_per_s: float | None
    """Expected rate of ends, in lines in a second."""
    submitted: int
    """Lines that were published to the mesh or are invalid."""


class BatchObject(msgspec.Struct, frozen=True, kw_only=True):
    """A batch in OpenAI's form; times are whole Unix seconds."""

    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    errors: BatchErrors | None
    input_file_id: str
    completion_window: str
    status: BatchStatus
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    metadata: dict[str, str] | None
    headway: BatchProgress


class BatchList(msgspec.Struct, frozen=True, kw_only=True):
    """One page of batches."""

    object: Literal["list"] = "list"
    data: list[BatchObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class BatchPage(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters of a list."""

    limit: int = DEFAULT_LIMIT
    after: str | None = None


def batch_object(batch: StoredBatch) -> BatchObject:
    """*batch* in OpenAI's form."""
    progress = BatchProgress(
        expected_at=batch.expected_at,
        lines_per_s=None if batch.lines_per_s is None else round(batch.lines_per_s, 3),
        submitted=batch.submitted_lines,
    )
    errors = None
    if batch.errors is not None:
        errors = BatchErrors(data=msgspec.json.decode(batch.errors, type=list[BatchError]))
    metadata = None
    if batch.metadata is not None:
        metadata = msgspec.json.decode(batch.metadata, type=dict[str, str])
    return BatchObject(
        id=batch.id,
        endpoint=batch.endpoint,
        errors=errors,
        input_file_id=batch.input_file_id,
        completion_window=batch.completion_window,
        status=batch.status,
        output_file_id=batch.output_file_id,
        error_file_id=batch.error_file_id,
        created_at=int(batch.created_at),
        in_progress_at=_whole(batch.in_progress_at),
        expires_at=int(batch.expires_at),
        finalizing_at=_whole(batch.finalizing_at),
        completed_at=_ended(batch, BatchStatus.COMPLETED),
        failed_at=_ended(batch, BatchStatus.FAILED),
        expired_at=_ended(batch, BatchStatus.EXPIRED),
        cancelling_at=_whole(batch.cancelling_at),
        cancelled_at=_ended(batch, BatchStatus.CANCELLED),
        request_counts=RequestCounts(
            total=batch.num_lines, completed=batch.num_completed, failed=batch.num_failed
        ),
        metadata=metadata,
        headway=progress,
    )


def batch_list(batches: list[StoredBatch], *, has_more: bool) -> BatchList:
    """A page in OpenAI's form."""
    return BatchList(
        data=[batch_object(batch) for batch in batches],
        first_id=batches[0].id if batches else None,
        last_id=batches[-1].id if batches else None,
        has_more=has_more,
    )


def parse_request(body: bytes) -> BatchRequest:
    """
    The request for a new batch.

    Raises:
        ContractError: A field is missing or invalid; `param` is its name.
    """
    try:
        asked = msgspec.json.decode(body, type=BatchRequest)
    except msgspec.ValidationError as error:
        text = str(error)
        raise ContractError(hinted(text), param=_field_of(text)) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ContractError(f"the body is not valid JSON: {error}", code="invalid_json") from error
    if asked.endpoint not in ENDPOINTS:
        raise ContractError(
            f"endpoint {asked.endpoint[:80]!r} is not supported: must be one of "
            f"{', '.join(ENDPOINTS)}",
            param="endpoint",
        )
    if not is_file_id(asked.input_file_id):
        raise ContractError("input_file_id must be the id of a file", param="input_file_id")
    return asked


def window_s(text: str) -> Seconds:
    """
    Length of a completion window.

    Raises:
        ContractError: The text is not a time from 1 s to 7 days.
    """
    found = _WINDOW.fullmatch(text)
    length_s = float(found[1]) * _UNITS[found[2]] if found else 0.0
    if not MIN_WINDOW_S <= length_s <= MAX_WINDOW_S:
        raise ContractError(
            f"completion_window {text[:32]!r} must be a time from 1 s to 7 d, e.g. 24h, 30m or 90s",
            param="completion_window",
        )
    return length_s


def parse_page(query: Mapping[str, str]) -> BatchPage:
    """
    Parameters of a list.

    Raises:
        ContractError: A parameter is invalid; `param` is its name.
    """
    after = query.get("after")
    if after is not None and not is_batch_id(after):
        raise ContractError("after must be the id of a batch", param="after")
    limit = whole_number("limit", query.get("limit", str(DEFAULT_LIMIT)), low=1, high=MAX_LIMIT)
    return BatchPage(limit=limit, after=after)


_PATH = re.compile(r" - at `\$\.([\w.]+)")
_MISSING = re.compile(r"required field `(\w+)`")


def _field_of(text: str) -> str | None:
    """The invalid field in msgspec's error text."""
    found: Any = _MISSING.search(text) or _PATH.search(text)
    return found[1] if found else None


def _whole(at: UnixTime | None) -> int | None:
    return None if at is None else int(at)


def _ended(batch: StoredBatch, status: BatchStatus) -> int | None:
    return _whole(batch.ended_at) if batch.status is status else None
