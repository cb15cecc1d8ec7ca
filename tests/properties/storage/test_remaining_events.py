"""Events that continue a response with another rendering of the same answer."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from solver.storage.remaining_events import Continuation, StreamDivergedError, events_of
from solver.storage.response_events import folded
from tests.renderings.responses import Event, Rendering, function_call, message, reasoning, text_of

TEXTS = st.text("abc é\n", max_size=12)
ITEMS = st.lists(
    st.one_of(
        st.builds(message, TEXTS),
        st.builds(message, TEXTS, TEXTS),
        st.builds(reasoning, TEXTS),
        st.builds(function_call, st.sampled_from(["f", "g"]), TEXTS),
    ),
    max_size=4,
)


def in_pieces_of(size: int) -> Callable[[str], list[str]]:
    return lambda text: [text[at : at + size] for at in range(0, len(text), size)]


CUTS = st.integers(1, 5).map(in_pieces_of)


def without_ids(value: Any) -> Any:
    """*value* without what differs in every rendering."""
    if isinstance(value, dict):
        left_out = ("id", "item_id", "call_id", "sequence_number")
        return {name: without_ids(each) for name, each in value.items() if name not in left_out}
    return [without_ids(each) for each in value] if isinstance(value, list) else value


def texts_by_place(events: list[Event]) -> dict[tuple[Any, ...], str]:
    found: dict[tuple[Any, ...], str] = {}
    for event in events:
        if "delta" in event:
            place = (event["type"], event["output_index"], event.get("content_index"))
            found[place] = found.get(place, "") + event["delta"]
    return found


def structure(events: list[Event]) -> list[Any]:
    """All events but pieces of text."""
    return [without_ids(event) for event in events if "delta" not in event]


def ids_of_items(events: list[Event]) -> dict[int, set[str]]:
    found: dict[int, set[str]] = {}
    for event in events:
        if "output_index" in event:
            item_id = event.get("item_id") or event["item"]["id"]
            found.setdefault(event["output_index"], set()).add(item_id)
    return found


def remaining_events(sent: list[Event], other: list[Event]) -> list[Event]:
    """The events that continue *sent* to the end of the answer, of another stream of it."""
    continuation = Continuation(sent)
    found = (continuation.next(event) for event in other)
    return [event for event in found if event is not None]


@given(items=ITEMS, first_cut=CUTS, second_cut=CUTS, data=st.data())
def test_any_prefix_and_the_remaining_events_are_one_stream(
    items: list[Event],
    first_cut: Callable[[str], list[str]],
    second_cut: Callable[[str], list[str]],
    data: st.DataObject,
):
    """Every event is there once and in order, whatever was sent before, however texts are cut."""
    first = Rendering(items, name="a", cut=first_cut)
    second = Rendering(items, name="b", cut=second_cut)
    sent = first.events[: data.draw(st.integers(1, len(first.events)), label="sent")]

    remaining = remaining_events(sent, second.events)
    whole = [*sent, *remaining]

    assert [event["sequence_number"] for event in whole] == list(range(len(whole)))
    assert structure(whole) == structure(first.events)
    assert texts_by_place(whole) == texts_by_place(first.events)
    assert all(len(ids) == 1 for ids in ids_of_items(whole).values())
    assert without_ids(folded(whole)) == without_ids(first.response)
    final_ids = [item["id"] for item in whole[-1]["response"]["output"]]
    assert [{each} for each in final_ids] == [ids for _, ids in sorted(ids_of_items(whole).items())]


@given(items=ITEMS, cut=CUTS)
def test_events_before_the_last_one_make_the_output_of_the_response(
    items: list[Event], cut: Callable[[str], list[str]]
):
    rendering = Rendering(items, name="a", cut=cut)

    assert folded(rendering.events[:-1])["output"] == rendering.response["output"]


@given(items=ITEMS, cut=CUTS, data=st.data())
def test_a_response_that_comes_as_a_whole_continues_a_stream(
    items: list[Event], cut: Callable[[str], list[str]], data: st.DataObject
):
    first, second = Rendering(items, name="a", cut=cut), Rendering(items, name="b")
    sent = first.events[: data.draw(st.integers(1, len(first.events)), label="sent")]

    whole = [*sent, *remaining_events(sent, events_of(second.response))]

    assert texts_by_place(whole) == texts_by_place(first.events)
    assert without_ids(folded(whole)) == without_ids(first.response)


@given(items=ITEMS, cut=CUTS)
def test_the_first_stream_passes_unchanged(items: list[Event], cut: Callable[[str], list[str]]):
    rendering = Rendering(items, name="a", cut=cut)

    assert remaining_events([], rendering.events) == rendering.events


@given(items=ITEMS, data=st.data())
def test_two_takeovers_in_a_row_are_one_stream(items: list[Event], data: st.DataObject):
    first = Rendering(items, name="a", cut=in_pieces_of(2))
    second = Rendering(items, name="b", cut=in_pieces_of(3))
    third = Rendering(items, name="c", cut=in_pieces_of(5))
    sent = first.events[: data.draw(st.integers(1, len(first.events)), label="first")]
    rest = remaining_events(sent, second.events)
    sent = [*sent, *rest[: data.draw(st.integers(0, len(rest)), label="second")]]

    whole = [*sent, *remaining_events(sent, third.events)]

    assert structure(whole) == structure(first.events)
    assert texts_by_place(whole) == texts_by_place(first.events)


def test_items_and_calls_keep_the_ids_that_were_sent():
    items = [function_call("f", "{}"), message("done")]
    first, second = Rendering(items, name="a"), Rendering(items, name="b")
    added = next(
        number
        for number, event in enumerate(first.events)
        if event["type"] == "response.output_item.added"
    )

    remaining = remaining_events(first.events[: added + 1], second.events)
    call, text = remaining[-1]["response"]["output"]

    assert (call["id"], call["call_id"]) == ("item_a_0", "call_a_0")
    assert text["id"] == "item_b_1"


def test_a_piece_that_was_sent_in_part_keeps_the_log_probabilities_of_the_rest():
    first = Rendering([message("abcd")], name="a", cut=lambda _: ["ab"])
    second = Rendering([message("abcd")], name="b", cut=lambda _: ["abcd"])
    tokens = [{"token": token, "logprob": -1.0} for token in ("a", "b", "c", "d")]
    events = [
        event | {"logprobs": tokens} if "delta" in event else event for event in second.events
    ]
    sent = [event for event in first.events if text_of([event]) or "item" in event["type"]][:2]

    remaining = remaining_events([first.events[0], *sent], events)
    (delta,) = [event for event in remaining if "delta" in event]

    assert delta["delta"] == "cd"
    assert [each["token"] for each in delta["logprobs"]] == ["c", "d"]


@pytest.mark.parametrize(
    ("sent_text", "text"), [("abx", "abcd"), ("abcd", "ab")], ids=["another text", "less text"]
)
def test_an_answer_that_contradicts_what_was_sent_is_refused(sent_text: str, text: str):
    first = Rendering([message(sent_text)], name="a")
    second = Rendering([message(text)], name="b", cut=in_pieces_of(3))
    sent = [event for event in first.events if not event["type"].endswith((".done", "completed"))]

    with pytest.raises(StreamDivergedError):
        remaining_events(sent, second.events)


def test_an_answer_with_another_item_is_refused():
    first = Rendering([function_call("f", "{}")], name="a")
    second = Rendering([function_call("g", "{}")], name="b")

    with pytest.raises(StreamDivergedError, match="output_index 0"):
        remaining_events(first.events[:4], second.events)


def test_nothing_follows_the_end():
    rendering = Rendering([message("a")], name="a")
    continuation = Continuation(rendering.events)

    assert continuation.next(rendering.events[3]) is None
