"""Ids of stored objects: their order is the order of creation, and they cannot be guessed."""

import re
import secrets

from shared.contracts.base import RequestId, UnixTime

FILE, BATCH, RESPONSE, WEBHOOK_EVENT = "file-", "batch_", "resp_", "evt_"
_TIME_DIGITS, _RANDOM_BYTES = 12, 10
_FOLDER_DIGITS = 6
"""Hex digits of the time that name the folder of a body: one folder for 4.7 hours."""
_DIGITS = rf"[0-9a-f]{{{_TIME_DIGITS + 2 * _RANDOM_BYTES}}}"
_FILE_ID = re.compile(FILE + _DIGITS)
_BATCH_ID = re.compile(BATCH + _DIGITS)
_RESPONSE_ID = re.compile(RESPONSE + _DIGITS)


def new_file_id(now: UnixTime) -> str:
    """A new id of a file that is made at *now*."""
    return FILE + _digits(now)


def new_response_id(now: UnixTime) -> str:
    """A new id of a response that is made at *now*."""
    return RESPONSE + _digits(now)


def is_response_id(text: str) -> bool:
    """True if *text* has the form of a response's id."""
    return _RESPONSE_ID.fullmatch(text) is not None


def new_webhook_event_id() -> str:
    """A new id of an event that webhooks deliver."""
    return f"{WEBHOOK_EVENT}{secrets.token_hex(16)}"


def is_file_id(text: str) -> bool:
    """True if *text* has the form of a file's id."""
    return _FILE_ID.fullmatch(text) is not None


def new_batch_id(now: UnixTime) -> str:
    """A new id of a batch that is made at *now*."""
    return BATCH + _digits(now)


def is_batch_id(text: str) -> bool:
    """True if *text* has the form of a batch's id."""
    return _BATCH_ID.fullmatch(text) is not None


def line_request_id(batch_id: str, line: int) -> RequestId:
    """Id of the request for a line of a batch, counted from 0."""
    return RequestId(f"{batch_id}-{line:06}")


def created_at_of(file_id: str) -> UnixTime:
    """Time at which *file_id* was made, to the millisecond."""
    milliseconds = int(file_id[len(FILE) : len(FILE) + _TIME_DIGITS], 16)
    return milliseconds / 1000


def folder_of(file_id: str) -> str:
    """Folder of the file's body; ids of one folder are a range of ids."""
    return file_id[len(FILE) : len(FILE) + _FOLDER_DIGITS]


def ids_in(folder: str) -> tuple[str, str]:
    """Bounds of the ids of *folder*: the first is included, the second is not."""
    return f"{FILE}{folder}", f"{FILE}{int(folder, 16) + 1:0{_FOLDER_DIGITS}x}"


def is_folder(text: str) -> bool:
    """True if *text* has the form of a folder's name."""
    return re.fullmatch(rf"[0-9a-f]{{{_FOLDER_DIGITS}}}", text) is not None


def folder_ends_at(folder: str) -> UnixTime:
    """Time after which no id of *folder* is made."""
    milliseconds = (int(folder, 16) + 1) << 4 * (_TIME_DIGITS - _FOLDER_DIGITS)
    return milliseconds / 1000


def _digits(now: UnixTime) -> str:
    """Milliseconds in hex, then 80 random bits."""
    return f"{round(now * 1000):0{_TIME_DIGITS}x}{secrets.token_hex(_RANDOM_BYTES)}"
