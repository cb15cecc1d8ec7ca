"""Answers of two servers in a form that can be compared."""

import asyncio
import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from tests.differential.cells import Asked
from tests.differential.known import known_differences

TOLERANCE = 1e-3
"""Absolute and relative difference of log probabilities that counts as equal."""
IN_FLIGHT = 8
"""Maximum number of bodies that one server answers at the same time."""
_VOLATILE = frozenset(
    {
        *("id", "created", "created_at", "completed_at", "request_id", "system_fingerprint"),
        *("item_id", "call_id", "response_id", "sequence_number", "message_id", "headway"),
        *("signature", "signature_delta"),
        # Cached tokens depend on the requests before.
        *("prompt_tokens_details", "input_tokens_details", "cache_read_input_tokens"),
        "cache_creation_input_tokens",
    }
)
_SAMPLED_LISTS = frozenset(
    {"content", "token_ids", "tokens", "token_logprobs", "top_logprobs", "text_offset"}
)
_ARGUMENTS = re.compile(r"[._]arguments(\.delta \d+)?$| input_json_delta$")
Json = Any


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer; streamed parts are merged, since their borders are not part of the comparison."""

    status: int
    value: Json


async def ask(client: httpx.AsyncClient, asked: Asked) -> Answer:
    """Post a body and read the answer to its end."""
    async with client.stream("POST", asked.cell.endpoint, json=asked.body) as response:
        raw = await response.aread()
    if response.headers.get("content-type", "").startswith("text/event-stream"):
        return Answer(response.status_code, _merged(list(_events(raw.decode()))))
    return Answer(response.status_code, json.loads(raw))


def succeeded(answer: Answer) -> bool:
    """Return whether the answer has no error, neither as its status nor inside its stream."""
    is_error = isinstance(answer.value, dict) and answer.value.get("error") is not None
    return answer.status < 400 and not is_error


def difference(asked: Asked, expected: Answer, found: Answer, *, draws: bool = False) -> str | None:
    """
    The first difference between two answers, or None.

    Args:
        asked: The body of both answers.
        expected: The reference.
        found: The compared answer.
        draws: True to also compare sampled tokens; only equal engines sample equal tokens.
    """
    if expected.status != found.status:
        return f"status {found.status} instead of {expected.status}: {found.value}"
    if not succeeded(expected):
        wanted, given = _param(expected.value), _param(found.value)
        return None if wanted == given else f"param {given!r} instead of {wanted!r}"
    wanted, given = _stable(expected.value), _stable(found.value)
    if asked.cell.sampled and not draws:
        wanted, given = _shape(wanted), _shape(given)
    return first_difference(wanted, given, "answer")


async def answers(client: httpx.AsyncClient, bodies: Sequence[Asked]) -> list[Answer]:
    """Answers of one server, in the order of *bodies*."""
    room = asyncio.Semaphore(IN_FLIGHT)

    async def one(body: Asked) -> Answer:
        async with room:
            return await ask(client, body)

    return list(await asyncio.gather(*(one(body) for body in bodies)))


def differences(
    bodies: Sequence[Asked], expected: Sequence[Answer], found: Sequence[Answer], *, draws: bool
) -> dict[str, str]:
    """
    Number and cell of each body with another answer -> the first difference; without the known
    ones.
    """
    known = known_differences()
    each = (
        (body, difference(body, one, other, draws=draws))
        for body, one, other in zip(bodies, expected, found, strict=True)
    )
    return {
        f"{body.number} {body.cell.name}": text
        for body, text in each
        if text is not None and not any(row.covers(body, text) for row in known)
    }


def _param(value: Json) -> str | None:
    error = value.get("error") if isinstance(value, dict) else None
    return error.get("param") if isinstance(error, dict) else None


def _events(text: str) -> Iterator[Json]:
    for line in text.splitlines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data: "))


def _merged(events: list[Json]) -> Json:
    """One object with the contents of all events of a stream."""
    errors = [event for event in events if event.get("error") is not None]
    if errors:
        return errors[0]
    if any("type" in event for event in events):
        return _merged_by_type(events)
    return _merged_chunks(events)


def _merged_chunks(events: list[Json]) -> Json:
    """Chunks of chats or completions: the parts of each choice joined."""
    merged: dict[str, Json] = {}
    choices: dict[int, Json] = {}
    for event in events:
        for choice in event.pop("choices", ()):
            _join(choices.setdefault(choice["index"], {}), choice)
        merged |= {key: value for key, value in event.items() if value is not None}
    return merged | {"choices": [choices[index] for index in sorted(choices)]}


def _join(whole: dict[str, Json], part: dict[str, Json]) -> None:
    for key, value in part.items():
        known = whole.get(key)
        if value is None or key in ("index", "role", "type"):
            whole.setdefault(key, value)
            if known is None:
                whole[key] = value
        elif key == "tool_calls":
            calls = whole.setdefault(key, {})
            for call in value:
                _join(calls.setdefault(str(call["index"]), {}), call)
        elif isinstance(value, dict):
            _join(whole.setdefault(key, {}) or whole.__setitem__(key, {}) or whole[key], value)
        elif isinstance(value, str | list) and known is not None and key != "finish_reason":
            whole[key] = known + value
        else:
            whole[key] = value


def _merged_by_type(events: list[Json]) -> Json:
    """Typed events of the Responses and Messages API: text by type and place, last objects."""
    merged: dict[str, Json] = {}
    for event in events:
        kind = event["type"]
        place = f"{kind} {event.get('output_index', event.get('index', ''))}"
        delta = event.get("delta")
        if isinstance(delta, str):
            merged[place] = merged.get(place, "") + delta
        elif isinstance(delta, dict) and delta.get("type") in _VOLATILE:
            continue
        elif isinstance(delta, dict) and isinstance(delta.get("type"), str):
            text = "".join(v for k, v in delta.items() if k != "type" and isinstance(v, str))
            place = f"{place} {delta['type']}"
            merged[place] = merged.get(place, "") + text
        else:
            merged[place] = event
    return merged


def _stable(value: Json) -> Json:
    """*value* without the fields that differ from request to request."""
    if isinstance(value, dict):
        return {key: _stable(each) for key, each in value.items() if key not in _VOLATILE}
    return [_stable(each) for each in value] if isinstance(value, list) else value


def _shape(value: Json, key: str = "") -> Json:
    """The types in *value*, for answers with tokens that are drawn at random."""
    if isinstance(value, dict):
        return {name: _shape(each, name) for name, each in value.items()}
    if key == "stop_reason":
        return "any"  # an answer ends at a stop token or at its limit, as its tokens are drawn
    if isinstance(value, list):
        return "list" if key in _SAMPLED_LISTS else [_shape(each) for each in value]
    return "number" if isinstance(value, int | float) else type(value).__name__


def first_difference(wanted: Json, given: Json, place: str) -> str | None:
    """The first place where two values differ, numbers by more than `TOLERANCE`."""
    if isinstance(wanted, dict) and isinstance(given, dict):
        for key in sorted(wanted.keys() | given.keys()):
            found = first_difference(wanted.get(key), given.get(key), f"{place}.{key}")
            if found is not None:
                return found
        return None
    if isinstance(wanted, list) and isinstance(given, list) and len(wanted) == len(given):
        pairs = zip(wanted, given, strict=True)
        found = (first_difference(a, b, f"{place}[{n}]") for n, (a, b) in enumerate(pairs))
        return next((each for each in found if each is not None), None)
    if isinstance(wanted, float) and isinstance(given, int | float):
        close = math.isclose(wanted, given, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
        return None if close else f"{place} is {given!r} instead of {wanted!r}"
    if _equal_arguments(wanted, given, place):
        return None
    return None if wanted == given else f"{place} is {given!r} instead of {wanted!r}"


def _equal_arguments(wanted: Json, given: Json, place: str) -> bool:
    """
    Return whether two streamed arguments of a tool are equal but for a final `{}`.

    vLLM appends it to arguments that end at the limit of tokens, if the last event of the stream
    has arguments; this depends on the number of tokens in that event.
    """
    pair = [wanted or "", given or ""]
    if _ARGUMENTS.search(place) is None or not all(isinstance(each, str) for each in pair):
        return False
    return len({each.removesuffix("{}") for each in pair}) == 1
