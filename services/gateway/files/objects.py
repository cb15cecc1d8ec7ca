"""Objects and parameters of OpenAI's Files API."""

from collections.abc import Mapping
from typing import Literal

import msgspec

from services.gateway.parameters import whole_number
from shared.contracts.errors import ContractError
from shared.store.files import LOST, Order, StoredFile
from shared.store.ids import is_file_id

PURPOSES = ("assistants", "batch", "evals", "fine-tune", "user_data", "vision")
"""Purposes of uploads; the mesh itself reads files of `batch` only."""
MIN_EXPIRES_S, MAX_EXPIRES_S = 3600, 30 * 24 * 3600
"""Limits of `expires_after[seconds]` in OpenAI's API."""
MAX_LIMIT = 10_000
ORDERS: Mapping[str, Order] = {"asc": "asc", "desc": "desc"}
MAX_FILENAME_CHARS = 512


class FileObject(msgspec.Struct, frozen=True, kw_only=True):
    """A file in OpenAI's form; times are whole Unix seconds."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    expires_at: int | None = None
    filename: str
    purpose: str
    status: Literal["processed", "error"] = "processed"
    status_details: str | None = None


class FileList(msgspec.Struct, frozen=True, kw_only=True):
    """One page of files."""

    object: Literal["list"] = "list"
    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class FileDeleted(msgspec.Struct, frozen=True, kw_only=True):
    """Confirmation of a deletion."""

    id: str
    object: Literal["file"] = "file"
    deleted: Literal[True] = True


class Page(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters of a list."""

    limit: int = MAX_LIMIT
    order: Order = "desc"
    after: str | None = None
    purpose: str | None = None


class UploadFields(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of an upload, without the file."""

    purpose: str
    expires_after_s: float | None = None


def file_object(file: StoredFile) -> FileObject:
    """*file* in OpenAI's form."""
    is_lost = file.status == LOST
    return FileObject(
        id=file.id,
        bytes=file.num_bytes,
        created_at=int(file.created_at),
        expires_at=None if file.expires_at is None else int(file.expires_at),
        filename=file.filename,
        purpose=file.purpose,
        status="error" if is_lost else "processed",
        status_details="the content of the file is lost; upload it again" if is_lost else None,
    )


def file_list(files: list[StoredFile], *, has_more: bool) -> FileList:
    """A page in OpenAI's form."""
    return FileList(
        data=[file_object(file) for file in files],
        first_id=files[0].id if files else None,
        last_id=files[-1].id if files else None,
        has_more=has_more,
    )


def parse_page(query: Mapping[str, str]) -> Page:
    """
    Parameters of a list.

    Raises:
        ContractError: A parameter is invalid; `param` is its name.
    """
    order = ORDERS.get(query.get("order", "desc"))
    if order is None:
        raise ContractError("order must be asc or desc", param="order")
    after = query.get("after")
    if after is not None and not is_file_id(after):
        raise ContractError("after must be the id of a file", param="after")
    purpose = query.get("purpose")
    if purpose is not None and not purpose.isprintable():
        raise ContractError("purpose must be printable text", param="purpose")
    limit = whole_number("limit", query.get("limit", str(MAX_LIMIT)), low=1, high=MAX_LIMIT)
    return Page(limit=limit, order=order, after=after, purpose=purpose)


def parse_fields(fields: Mapping[str, str]) -> UploadFields:
    """
    Fields of an upload.

    Raises:
        ContractError: A field is missing or invalid; `param` is its name.
    """
    purpose = fields.get("purpose")
    if purpose not in PURPOSES:
        given = "is missing" if purpose is None else f"is {purpose!r}"
        raise ContractError(f"purpose {given}; it must be one of {PURPOSES}", param="purpose")
    anchor, seconds = fields.get("expires_after[anchor]"), fields.get("expires_after[seconds]")
    if anchor is None and seconds is None:
        return UploadFields(purpose=purpose)
    if anchor != "created_at":
        raise ContractError(
            "expires_after[anchor] must be created_at", param="expires_after[anchor]"
        )
    name = "expires_after[seconds]"
    life_s = whole_number(name, seconds or "", low=MIN_EXPIRES_S, high=MAX_EXPIRES_S)
    return UploadFields(purpose=purpose, expires_after_s=float(life_s))
