"""Forms of uploads, in any division into parts."""

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.body import RequestBody
from services.gateway.files.form import (
    FILE_FIELD,
    MAX_FIELD_BYTES,
    MAX_FORM_BYTES,
    MAX_HEADER_BYTES,
    MAX_HEADERS,
    MAX_PARTS,
    Field,
    FileBegin,
    form_boundary,
    form_events,
)
from shared.contracts.errors import ContractError

BOUNDARY = "a-boundary"


def part(name: str, value: bytes, filename: str | None = None) -> bytes:
    named = "" if filename is None else f'; filename="{filename}"'
    head = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"{named}\r\n\r\n'
    return head.encode() + value + b"\r\n"


def headed(*headers: bytes, content: bytes = b"x") -> bytes:
    """A form of one file whose part has *headers* beside its own."""
    lines = b"".join(each + b"\r\n" for each in headers)
    file = part(FILE_FIELD, content, "a")
    return form(file.replace(b"\r\n\r\n", b"\r\n" + lines + b"\r\n"))


def form(*parts: bytes) -> bytes:
    return b"".join(parts) + f"--{BOUNDARY}--\r\n".encode()


class Client:
    """The `receive` of a client that sends *parts*, and then disconnects or falls silent."""

    def __init__(self, parts: Sequence[bytes], *, then: str | None = "end") -> None:
        self._events: list[dict[str, Any]] = [
            {"type": "http.request", "body": each, "more_body": True} for each in parts
        ]
        if then == "end":
            self._events.append({"type": "http.request", "body": b"", "more_body": False})
        elif then == "disconnect":
            self._events.append({"type": "http.disconnect"})

    async def receive(self) -> dict[str, Any]:
        if not self._events:
            await asyncio.Event().wait()
        return self._events.pop(0)


async def events_of(client: Client, *, idle_s: float = 60.0) -> tuple[list[Any], bytes]:
    """Fields and begins, and the content of the file."""
    body = RequestBody(client.receive, idle_s=idle_s)
    found: list[Any] = []
    content = b""
    async with aclosing(form_events(body, BOUNDARY)) as events:
        async for event in events:
            if isinstance(event, bytes):
                content += event
            else:
                found.append(event)
    return found, content


@given(
    content=st.binary(max_size=300)
    | st.just(f"\r\n--{BOUNDARY}".encode()[:-1])
    | st.just(b"\r\n--\r\n-"),
    cuts=st.lists(st.integers(0, 600), max_size=8),
)
def test_a_form_is_read_in_any_division(content: bytes, cuts: list[int]):
    whole = form(part("purpose", b"batch"), part(FILE_FIELD, content, "a.jsonl"))
    ends = sorted({*cuts, len(whole)})
    parts = [whole[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]

    found, read = asyncio.run(events_of(Client(parts)))

    assert found == [Field("purpose", "batch"), FileBegin("a.jsonl")]
    assert read == content


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([form(part("purpose", b"batch"))], "the form has no file"),
        ([form(part(FILE_FIELD, b"1", "a"), part(FILE_FIELD, b"2", "b"))], "only one file"),
        ([form(part("x", b"x" * (MAX_FIELD_BYTES + 1)))], f"longer than {MAX_FIELD_BYTES} bytes"),
        ([form(part("x", b"\xff"))], "not UTF-8"),
        ([form(*[part(f"x{n}", b"") for n in range(MAX_PARTS + 1)])], f"than {MAX_PARTS} parts"),
        ([headed(*[b"a: b"] * MAX_HEADERS)], f"more than {MAX_HEADERS} headers"),
        ([headed(b"a: " + b"b" * MAX_HEADER_BYTES)], f"more than {MAX_HEADER_BYTES} bytes"),
        ([part(FILE_FIELD, b"cut", "a")], "form is malformed: Unexpected end"),
        ([b"no form at all" * 20], "form is malformed"),
    ],
)
async def test_a_wrong_form_is_refused(parts: list[bytes], message: str):
    with pytest.raises(ContractError, match=message) as error:
        await events_of(Client(parts))

    assert error.value.status == 400


async def test_parts_headers_and_a_large_file_within_the_limits_are_read():
    fields = [part(f"x{n}", b"v") for n in range(MAX_PARTS - 1)]
    content = b"x" * (2 * MAX_FORM_BYTES)
    headers = [b"a: b"] * (MAX_HEADERS - 1)

    found, read = await events_of(Client([b"".join(fields), headed(*headers, content=content)]))

    assert len(found) == MAX_PARTS
    assert read == content


BEFORE, AFTER = b"x" * MAX_FORM_BYTES + b"\r\n", b"x" * MAX_FORM_BYTES
FILE = form(part(FILE_FIELD, b"1", "a"))
LONG_FIELDS = [part(f"x{n}", b"x" * MAX_FIELD_BYTES) for n in range(MAX_PARTS - 1)]


@pytest.mark.parametrize(
    "parts",
    [
        [BEFORE + FILE],
        [FILE, AFTER],
        [FILE, *[AFTER[:1000]] * 66],
        [*LONG_FIELDS, part(FILE_FIELD, b"1", "a" * 4000), form()],
    ],
    ids=["preamble", "epilogue", "epilogue in parts", "fields and headers"],
)
async def test_the_form_without_its_file_has_a_largest_size(parts: list[bytes]):
    """Each field and header may be within its limit."""
    with pytest.raises(ContractError, match=f"limit is {MAX_FORM_BYTES} bytes beside") as error:
        await events_of(Client(parts))

    assert (error.value.status, error.value.code) == (413, "body_too_large")


async def test_a_client_that_disconnects_ends_the_form():
    with pytest.raises(ContractError) as error:
        await events_of(Client([part(FILE_FIELD, b"x", "a")], then="disconnect"))

    assert (error.value.status, error.value.code) == (499, "cancelled")


async def test_a_client_that_falls_silent_is_refused():
    with pytest.raises(ContractError, match=r"nothing was sent for 0\.01 s") as error:
        await events_of(Client([part(FILE_FIELD, b"x", "a")], then=None), idle_s=0.01)

    assert error.value.status == 408


async def test_the_rest_of_a_refused_body_is_read():
    client = Client([b"x"] * 5)
    body = RequestBody(client.receive, idle_s=60.0)
    await body.read()
    await body.discard()

    assert await body.read() is None


@pytest.mark.parametrize(
    "content_type",
    [None, "application/json", "multipart/form-data", "multipart/mixed; boundary=x"],
)
def test_another_content_type_is_refused(content_type: str | None):
    with pytest.raises(ContractError, match="multipart/form-data with a boundary") as error:
        form_boundary(content_type)

    assert error.value.param == "content-type"


def test_the_boundary_may_be_quoted():
    assert form_boundary('multipart/form-data; boundary="a b"') == "a b"
