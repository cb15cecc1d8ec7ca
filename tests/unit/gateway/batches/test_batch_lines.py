"""Lines of the input of a batch: found in any blocks, and checked one by one."""

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.batches.lines import (
    InvalidInputError,
    LineState,
    Scanner,
    custom_id_of,
    parse_line,
)
from shared.api.calls import CallFields
from shared.contracts.errors import ContractError

CHAT = "/v1/chat/completions"
MAX_BODY_BYTES = 1000
FRAME_BYTES = 64 * 1024


def accept(_fields: CallFields) -> None:
    """Accept every body."""


def a_line(custom_id: str = "1", **fields: Any) -> bytes:
    line = {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": {"model": "m"}}
    return json.dumps(line | fields).encode()


def scanner(max_lines: int = 100) -> Scanner:
    return Scanner(endpoint=CHAT, check=accept, max_lines=max_lines, max_body_bytes=MAX_BODY_BYTES)


def scanned(content: bytes, *cuts: int) -> tuple[list[bytes], list[int]]:
    """The lines that are found in blocks that end at *cuts*, and their states."""
    scan = scanner()
    bounds = [0, *sorted(cut % (len(content) + 1) for cut in cuts), len(content)]
    for begin, end in pairwise(bounds):
        scan.feed(content[begin:end])
    table = scan.end()
    places = zip(table.starts, table.lengths, strict=True)
    return [content[start : start + length] for start, length in places], list(table.states)


@given(
    st.lists(st.sampled_from([a_line("1"), a_line("2"), b"", b"  ", b"{}", b"[", b'"x"'])),
    st.sampled_from([b"\n", b"\r\n"]),
    st.sampled_from([b"", b"\n"]),
    st.lists(st.integers(0, 10_000), max_size=6),
)
def test_blocks_do_not_matter(lines: list[bytes], end: bytes, last: bytes, cuts: list[int]):
    content = a_line("0") + end + end.join(lines) + last
    whole = scanned(content)
    found, states = scanned(content, *cuts)

    assert (found, states) == whole
    assert [line.strip() for line in found] == [
        line for line in content.splitlines() if line.strip()
    ]
    assert states[0] == LineState.TO_DO


def test_a_custom_id_counts_once():
    _, states = scanned(b"\n".join([a_line("1"), a_line("2"), a_line("1")]))

    assert states == [LineState.TO_DO, LineState.TO_DO, LineState.INVALID]


def test_a_line_that_is_not_utf_8_is_invalid():
    """The check of its fields would fail with another error, and the batch would never begin."""
    broken = a_line("2").replace(b'"m"', b'"\xff"')
    _, states = scanned(b"\n".join([a_line("1"), broken]))

    assert states == [LineState.TO_DO, LineState.INVALID]


def test_a_line_that_is_too_long_is_invalid_and_is_not_kept():
    long = a_line("long", body={"model": "x" * (MAX_BODY_BYTES + FRAME_BYTES)})
    found, states = scanned(b"\n".join([a_line("1"), long, a_line("2")]), 500, 70_000, 71_000)

    assert states == [LineState.TO_DO, LineState.INVALID, LineState.TO_DO]
    assert found[1] == long


@pytest.mark.parametrize(
    ("content", "code"),
    [(b"", "empty_file"), (b"\n \n", "empty_file"), (b"a,b\n1,2\n", "invalid_json_line")],
)
def test_a_file_without_requests_is_invalid_as_a_whole(content: bytes, code: str):
    with pytest.raises(InvalidInputError) as found:
        scanned(content)

    assert found.value.code == code


def test_a_file_with_too_many_lines_is_invalid_as_a_whole():
    scan = scanner(max_lines=2)
    with pytest.raises(InvalidInputError, match="more than 2 lines") as found:
        scan.feed(b"\n".join(a_line(str(number)) for number in range(4)))

    assert found.value.code == "too_many_lines"


@pytest.mark.parametrize(
    ("line", "param"),
    [
        (a_line(custom_id=None), "custom_id"),  # type: ignore[arg-type]  # invalid on purpose
        (a_line(custom_id=""), "custom_id"),
        (a_line(custom_id="x" * 513), "custom_id"),
        (a_line(method="GET"), "method"),
        (a_line(url="/v1/completions"), "url"),
        (a_line(body=[]), "body"),
        (a_line(body={"model": "m", "kv_transfer_params": {"a": 1}}), "kv_transfer_params"),
    ],
)
def test_an_invalid_line_names_its_field(line: bytes, param: str):
    with pytest.raises(ContractError) as found:
        parse_line(line, endpoint=CHAT, check=accept)

    assert found.value.param == param


def test_a_body_is_passed_on_as_it_is_written():
    raw = b'{"custom_id":"1","method":"POST","url":"/v1/chat/completions","body":{ "model" : "m" }}'

    assert parse_line(raw, endpoint=CHAT, check=accept).body == b'{ "model" : "m" }'


@pytest.mark.parametrize(
    ("line", "custom_id"),
    [(a_line("1", method="GET"), "1"), (b'{"custom_id": 1}', None), (b"{", None)],
)
def test_the_custom_id_of_an_invalid_line_is_found_if_it_can_be(line: bytes, custom_id: str | None):
    assert custom_id_of(line) == custom_id


def test_runs_of_lines_keep_their_limits():
    scan = scanner()
    scan.feed(b"\n".join(a_line(str(number)) for number in range(10)))
    table = scan.end()
    line_bytes = table.lengths[0]

    assert table.end_of(0, max_lines=4, max_bytes=10_000) == 4
    assert table.end_of(8, max_lines=4, max_bytes=10_000) == 10
    assert table.end_of(0, max_lines=9, max_bytes=2 * line_bytes + 1) == 2
    assert table.end_of(0, max_lines=9, max_bytes=1) == 1
    assert table.num_left == 10
