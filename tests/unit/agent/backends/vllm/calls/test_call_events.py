"""Events of a call are divided into the steps of its answers."""

from dataclasses import dataclass

import pytest

from services.agent.backends.vllm.host.calls.events import CallEvents, Step


@dataclass
class Output:
    token_ids: tuple[int, ...]
    index: int = 0
    finish_reason: str | None = None


def chunk(index: int, text: str) -> bytes:
    return f'data: {{"id":"x","choices":[{{"index":{index},"text":"{text}"}}]}}\n\n'.encode()


@pytest.fixture
def steps() -> list[Step]:
    return []


@pytest.fixture
def events(steps: list[Step]) -> CallEvents:
    return CallEvents(steps.append)


def test_step_has_the_events_that_are_written_before_the_next_output(
    events: CallEvents, steps: list[Step]
):
    events.begins("a", 0)
    events.has_read("a", [Output((5, 6))])
    events.wrote(chunk(0, "one "))
    events.wrote(chunk(0, "two"))
    events.reads("a")

    (step,) = steps
    assert (step.token_ids, step.events) == ((5, 6), chunk(0, "one ") + chunk(0, "two"))


def test_events_before_the_first_output_belong_to_the_first_step(
    events: CallEvents, steps: list[Step]
):
    events.wrote(b"event: response.created\n\n")
    events.begins("a", 0)
    events.reads("a")
    assert steps == []

    events.has_read("a", [Output((5,))])
    events.wrote(chunk(0, "x"))
    events.reads("a")
    assert steps[0].events == b"event: response.created\n\n" + chunk(0, "x")


def test_tokens_without_an_event_are_a_step_without_events(events: CallEvents, steps: list[Step]):
    events.begins("a", 0)
    for token in (5, 6):
        events.has_read("a", [Output((token,))])
        if token == 6:
            events.wrote(chunk(0, "é"))
        events.reads("a")

    assert [(step.token_ids, step.events) for step in steps] == [((5,), b""), ((6,), chunk(0, "é"))]


def test_events_of_the_last_step_come_after_all_steps(events: CallEvents, steps: list[Step]):
    events.begins("a", 0)
    events.has_read("a", [Output((5,), finish_reason="length")])
    events.wrote(chunk(0, "x"))
    events.wrote(b"data: [DONE]\n\n")
    events.end()

    assert [(step.token_ids, step.events, step.finish) for step in steps] == [((5,), b"", "length")]
    assert events.rest == chunk(0, "x") + b"data: [DONE]\n\n"


def test_events_of_several_answers_to_one_prompt_are_separate(
    events: CallEvents, steps: list[Step]
):
    events.begins("0_a", 0)
    events.begins("1_a", 1)
    events.has_read("a", [Output((5,), index=1)])
    events.wrote(chunk(1, "b"))
    events.reads("a")
    events.has_read("a", [Output((6,), index=0)])
    events.wrote(chunk(0, "a"))
    events.reads("a")

    assert [(step.index, step.token_ids, step.events) for step in steps] == [
        (1, (5,), chunk(1, "b")),
        (0, (6,), chunk(0, "a")),
    ]


def test_events_of_several_prompts_are_separate(events: CallEvents, steps: list[Step]):
    events.begins("a-0", 0)
    events.begins("a-1", 1)
    events.has_read("a-1", [Output((5,))])
    events.has_read("a-0", [Output((6,))])
    events.wrote(chunk(1, "b"))
    events.wrote(chunk(0, "a"))
    events.reads("a-0")
    events.reads("a-1")

    assert [(step.index, step.events) for step in steps] == [(0, chunk(0, "a")), (1, chunk(1, "b"))]


def test_brackets_in_a_text_hide_no_index(events: CallEvents, steps: list[Step]):
    events.begins("a-0", 0)
    events.begins("a-1", 1)
    event = b'data: {"choices":[{"text":"}], \\"index\\":0","index":1}]}\n\n'
    events.has_read("a-1", [Output((5,))])
    events.wrote(event)
    events.reads("a-1")

    assert [(step.index, step.events) for step in steps] == [(1, event)]


def test_counts_of_all_answers_come_after_all_steps(events: CallEvents):
    events.begins("a-0", 0)
    events.begins("a-1", 1)
    usage = b'data: {"choices":[],"usage":{"total_tokens":3}}\n\n'
    events.wrote(usage)
    events.end()

    assert events.rest == usage


@pytest.mark.parametrize(
    ("event", "status"),
    [
        (b'data: {"error":{"message":"too long","code":400}}\n\n', 400),
        (b'event: error\ndata: {"type":"error","error":{"message":"x"}}\n\n', 500),
    ],
)
def test_error_instead_of_an_answer_is_a_refusal(events: CallEvents, event: bytes, status: int):
    events.begins("a", 0)
    events.wrote(event)

    refusal = events.refusal
    assert refusal is not None
    assert refusal == (status, event.split(b"data: ")[1].strip())


def test_text_with_the_word_error_is_not_a_refusal(events: CallEvents, steps: list[Step]):
    events.begins("a", 0)
    events.has_read("a", [Output((5,))])
    event = b'data: {"choices":[{"index":0,"text":"\\"error\\""}]}\n\n'
    events.wrote(event)
    events.reads("a")

    assert (events.refusal, steps[0].events) == (None, event)
