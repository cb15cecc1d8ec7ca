"""Objects and events of stored responses."""

from typing import Any

import msgspec
import pytest

from services.gateway.responses.objects import (
    decoded,
    ending_of,
    first_events,
    input_page,
    parse_starting_after,
    queued_object,
    shown_event,
    sse,
    stored_event,
)
from shared.contracts.errors import ContractError
from shared.contracts.requests import ErrorInfo
from tests.renderings.responses import Event, Rendering, message
from tests.stores import a_response, an_event

RESPONSE = a_response(previous_response_id="resp_before")


def test_a_new_response_is_created_and_queued_with_what_was_asked():
    queued = queued_object(RESPONSE, {"model": "m", "input": "x", "metadata": {"a": "b"}})
    events = first_events(queued)

    assert [event["type"] for event in events] == ["response.created", "response.queued"]
    assert [event["sequence_number"] for event in events] == [0, 1]
    assert (queued["id"], queued["status"], queued["output"]) == (RESPONSE.id, "queued", [])
    assert (queued["background"], queued["store"]) == (True, True)
    assert queued["previous_response_id"] == "resp_before"
    assert queued["metadata"] == {"a": "b"}


def test_events_of_the_front_get_the_id_of_the_store():
    rendering = Rendering([message("a")], name="a")
    shown = [shown_event(RESPONSE, event) for event in rendering.events]

    assert {event["response"]["id"] for event in shown if "response" in event} == {RESPONSE.id}
    assert shown[3] == rendering.events[3]
    assert shown[-1]["response"]["usage"] == {"output_tokens": 7}


def test_an_incomplete_response_ends_with_the_event_of_that_name():
    rendering = Rendering([message("a")], name="a", status="incomplete")
    last = shown_event(RESPONSE, rendering.events[-1] | {"headway": {"hops": 0}})

    assert last["type"] == "response.incomplete"
    assert last["response"]["status"] == "incomplete"
    assert last["response"]["headway"] == {"hops": 0}


@pytest.mark.parametrize(
    ("error", "status"),
    [(None, "cancelled"), (ErrorInfo(message="no", code="deadline_expired", status=504), "failed")],
)
def test_a_response_that_does_not_end_by_itself_keeps_its_output(
    error: ErrorInfo | None, status: str
):
    events = Rendering([message("abc"), message("de")], name="a").events
    sent = [stored_event(event) for event in events[:-4]]
    end = ending_of(a_response(num_events=len(sent)), sent, error=error, notice=None)
    made = msgspec.json.decode(end.object)
    (event,) = decoded([end.event])

    assert (end.status, made["status"]) == (status, status)
    assert (event["type"], event["sequence_number"]) == (f"response.{status}", len(sent))
    assert event["response"] == made
    assert [item["status"] for item in made["output"]] == ["completed", "incomplete"]
    assert [part["text"] for part in made["output"][0]["content"]] == ["abc"]
    assert made["error"] == (error and {"code": "deadline_expired", "message": "no"})


def test_a_stream_has_names_and_data_of_events():
    assert sse([an_event(3, "a"), an_event(4, "b")]) == (
        b'event: a\ndata: {"number":3}\n\nevent: b\ndata: {"number":4}\n\n'
    )


def pages(**query: str) -> list[list[str]]:
    """The texts of all pages of the input."""
    items = [{"role": "user", "content": f"{number}"} for number in range(3)]
    response = a_response(asked=msgspec.json.encode({"model": "m", "input": items}))
    before = a_response(object=b'{"output":[]}')
    found: list[list[str]] = []
    after: dict[str, str] = {}
    while True:
        page = input_page(response, [before], query | after)
        found.append([item["content"][0]["text"] for item in page.data])
        if not page.has_more:
            return found
        after = {"after": page.last_id or ""}


def test_input_is_listed_in_pages_with_the_turns_before():
    assert pages() == [["2", "1", "0", "hello"]]
    assert pages(order="asc", limit="2") == [["hello", "0"], ["1", "2"]]


@pytest.mark.parametrize(
    "query", [{"order": "up"}, {"limit": "0"}, {"limit": "101"}, {"after": "msg_x"}]
)
def test_invalid_parameters_of_lists_are_refused_by_name(query: dict[str, str]):
    with pytest.raises(ContractError) as refused:
        pages(**query)

    assert refused.value.param == next(iter(query))


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ({}, -1),
        ({"stream": "true"}, -1),
        ({"stream": "true", "starting_after": "7"}, 7),
        ({"stream": "True", "starting_after": "0"}, 0),
    ],
)
def test_a_stream_begins_after_the_number_that_is_asked(query: dict[str, str], expected: int):
    assert parse_starting_after(query) == expected


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ({"starting_after": "7"}, "starting_after"),
        ({"stream": "true", "starting_after": "x"}, "starting_after"),
        ({"stream": "maybe", "starting_after": "1"}, "stream"),
    ],
)
def test_invalid_parameters_of_streams_are_refused_by_name(query: dict[str, Any], param: str):
    with pytest.raises(ContractError) as refused:
        parse_starting_after(query)

    assert refused.value.param == param


def test_rows_and_events_are_the_same() -> None:
    event: Event = {"type": "a", "sequence_number": 3, "text": "é"}

    assert decoded([stored_event(event)]) == [event]
