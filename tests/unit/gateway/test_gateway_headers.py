"""Headers: names, aliases, units and polarity."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.headers import (
    APPLICATION,
    DEADLINE,
    FAIRNESS_ID,
    IDEMPOTENCY_KEY,
    IMPORTANCE,
    OBJECTIVE,
    PREFER,
    PRIORITY,
    PRIORITY_LOWER_FIRST,
    REQUEST_ID,
    TBT,
    TIMEOUT,
    TTFT,
    TTLT,
    Hints,
    parse_hints,
)
from shared.contracts.errors import ContractError
from shared.contracts.qos import Importance
from tests.clients.coding_agents import CODING_AGENTS, SESSION
from tests.tracing.spans import TRACE


def test_without_headers_no_option_is_requested():
    assert parse_hints({}) == Hints()


@pytest.mark.parametrize(("names", "field"), [(TTFT, "ttft_s"), (TBT, "tbt_s"), (TTLT, "ttlt_s")])
def test_targets_are_milliseconds_under_every_alias(names: tuple[str, ...], field: str):
    assert [getattr(parse_hints({name: "250"}), field) for name in names] == [0.25] * len(names)


def test_first_alias_of_a_header_takes_precedence():
    assert parse_hints({TTFT[1]: "1000", TTFT[0]: "500"}).ttft_s == 0.5


def test_deadline_is_unix_milliseconds():
    assert parse_hints({DEADLINE: "1700000000500"}).deadline_at == 1_700_000_000.5


def test_deadline_in_seconds_is_refused():
    with pytest.raises(ContractError) as caught:
        parse_hints({DEADLINE: "1700000000"})

    assert caught.value.param == DEADLINE


@pytest.mark.parametrize(
    ("headers", "priority"),
    [
        ({PRIORITY: "5"}, 5),
        ({PRIORITY: "-5"}, -5),
        ({PRIORITY_LOWER_FIRST[0]: "5"}, -5),
        ({PRIORITY_LOWER_FIRST[1]: "-5"}, 5),
        ({PRIORITY: "1", PRIORITY_LOWER_FIRST[1]: "7"}, 1),
    ],
)
def test_header_priorities_are_converted_to_higher_first(headers: dict[str, str], priority: int):
    assert parse_hints(headers).priority == priority


def test_unknown_headers_are_passed_unchanged():
    headers = {
        OBJECTIVE[1]: "batch",
        FAIRNESS_ID[1]: "acme",
        IMPORTANCE: "Low",
        APPLICATION: "summaries",
        TIMEOUT: "2.5",
        REQUEST_ID: "abc",
        **TRACE.headers,
    }

    assert parse_hints(headers) == Hints(
        objective="batch",
        fairness_id="acme",
        importance=Importance.LOW,
        application="summaries",
        timeout_s=2.5,
        client_request_id="abc",
        trace=TRACE,
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (TTFT[0], "soon"),
        (TTFT[0], "0"),
        (TTFT[0], "-1"),
        (TTFT[0], "nan"),
        (TTFT[0], "1e300"),
        (TBT[1], ""),
        (TTLT[0], "inf"),
        (PRIORITY, "1.5"),
        (PRIORITY, "1001"),
        (PRIORITY_LOWER_FIRST[0], "-1001"),
        (PRIORITY_LOWER_FIRST[1], "high"),
        (IMPORTANCE, "medium"),
        (APPLICATION, "x" * 129),
        (TIMEOUT, "0"),
    ],
)
def test_invalid_value_is_refused_with_the_header_name(name: str, value: str):
    with pytest.raises(ContractError) as caught:
        parse_hints({name: value})

    assert (caught.value.status, caught.value.param) == (400, name)


@given(
    st.dictionaries(
        st.sampled_from([*TTFT, *TTLT, DEADLINE, PRIORITY, TIMEOUT, IMPORTANCE, *OBJECTIVE]),
        st.text(max_size=12) | st.floats().map(str) | st.integers().map(str),
    )
)
def test_any_headers_are_parsed_or_refused(headers: dict[str, str]):
    assert _status(headers) in (200, 400)


def _status(headers: dict[str, str]) -> int:
    try:
        parse_hints(headers)
    except ContractError as error:
        return error.status
    return 200


@pytest.mark.parametrize("key", ["a", "order 17", "\u00e9", "k" * 255])
def test_idempotency_key_is_printable_text(key: str):
    assert parse_hints({IDEMPOTENCY_KEY: key}).idempotency_key == key


@pytest.mark.parametrize("key", ["", "k" * 256, "a\tb"])
def test_idempotency_key_beyond_its_limits_is_refused(key: str):
    with pytest.raises(ContractError, match="1 to 255 printable characters") as caught:
        parse_hints({IDEMPOTENCY_KEY: key})

    assert caught.value.param == IDEMPOTENCY_KEY


@pytest.mark.parametrize(
    ("prefer", "expected"),
    [
        ("respond-async", True),
        ("Respond-Async; x=1, wait=10", True),
        ("wait=10,respond-async", True),
        ("return=minimal", False),
        ("respond-asynchronously", False),
        ("", False),
    ],
)
def test_preference_is_one_of_a_list(prefer: str, expected: bool):  # noqa: FBT001 - a table
    assert parse_hints({PREFER: prefer}).responds_async is expected


def test_store_is_needed_to_find_a_request_again():
    chat, embeddings = "/v1/chat/completions", "/v1/embeddings"
    deferred, keyed = Hints(responds_async=True), Hints(idempotency_key="k")

    assert [keyed.needs_store(path) for path in (chat, embeddings)] == [True, True]
    assert [deferred.needs_store(path) for path in (chat, embeddings)] == [True, False]
    assert not Hints().needs_store(chat)


@pytest.mark.parametrize("agent", CODING_AGENTS)
def test_session_is_the_one_that_a_coding_agent_names(agent: str):
    assert parse_hints(CODING_AGENTS[agent]).session == SESSION


@pytest.mark.parametrize("value", ["", "a" * 129])
def test_name_of_a_session_that_is_empty_or_too_long_is_ignored(value: str):
    assert parse_hints({"x-session-id": value}).session is None
    assert parse_hints({"x-session-id": value, "session-id": "s1"}).session == "s1"
