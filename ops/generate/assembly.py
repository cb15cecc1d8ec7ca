"""
Cases of the assembly of answers, for clients in any language: `python -m ops.generate.assembly`.

Each case is replies to one request, and what the Python client does at each of them. Most cases
show one rule of `ops/docs/assembly.md`; the others are random replies of several runs.
"""

import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence
from itertools import pairwise
from random import Random
from typing import Any, NamedTuple

import msgspec

from ops.generate.replies import ANSWER, REQUEST, chunk, completed, failed, started, tokens
from shared.contracts.requests import (
    ChildAnswer,
    ErrorInfo,
    FinishReason,
    Reply,
    ReplyMode,
    RequestCompleted,
    RequestFailed,
    RunStarted,
    StepDetails,
    TokenChunk,
    TokensEmitted,
)
from shared.producer.assembly import RequestAssembly
from shared.producer.effects import Diverged, Effect, Finished, NewTokens, SendStop

NAMES: dict[type[Effect], str] = {
    NewTokens: "part",
    Diverged: "diverged",
    SendStop: "stop",
    Finished: "finished",
}
"""Effect -> its name in the cases."""
SILENCE_S = 10.0
NUM_MIXED = 20
OTHER = tuple(token + (index == 3) for index, token in enumerate(ANSWER))
"""An answer that differs in one token."""
SHORT = ANSWER[:5]


class Step(NamedTuple):
    """What happens to a request at a producer."""

    at: float
    do: str
    """`observe` a reply, `tick` or `cancel`."""
    reply: Reply | None = None


class Case(NamedTuple):
    """One case; equal names are equal cases."""

    name: str
    mode: ReplyMode
    steps: Sequence[Step]


def play(mode: ReplyMode, steps: Sequence[Step]) -> Iterator[list[Effect]]:
    """Effects of each step at the Python client."""
    assembly = RequestAssembly(REQUEST, streaming=mode is ReplyMode.STREAM, silence_s=SILENCE_S)
    for step in steps:
        if step.reply is not None:
            yield assembly.observe(step.reply, step.at)
        else:
            yield assembly.tick(step.at) if step.do == "tick" else assembly.cancel(step.at)


def plain(effect: Effect) -> dict[str, Any]:
    """An effect as the cases have it."""
    named = {each.name: getattr(effect, each.name) for each in dataclasses.fields(effect)}
    return {"effect": NAMES[type(effect)], **json.loads(msgspec.json.encode(named))}


def cases() -> list[Case]:
    """All cases, in the order of the file."""
    final, stream = ReplyMode.FINAL, ReplyMode.STREAM
    return [
        *(Case(name, stream, steps) for name, steps in _streamed().items()),
        *(Case(f"only the final: {name}", final, steps) for name, steps in _final_only().items()),
        *(
            Case(f"mixed {seed}", stream if seed % 4 else final, _mixed(Random(seed)))
            for seed in range(NUM_MIXED)
        ),
    ]


def render() -> str:
    """The file of cases, with one line for each step."""
    written = []
    for case in cases():
        steps = [
            json.dumps(
                {"at": step.at, "do": step.do}
                | ({} if step.reply is None else {"reply": msgspec.to_builtins(step.reply)})
                | {"effects": [plain(effect) for effect in effects]}
            )
            for step, effects in zip(case.steps, play(case.mode, case.steps), strict=True)
        ]
        head = f'{{"case": {json.dumps(case.name)}, "reply": "{case.mode.value}", "steps": [\n'
        written.append(head + ",\n".join(steps) + "\n]}")
    head = f'{{"request_id": "{REQUEST}", "silence_s": {SILENCE_S}, "cases": [\n'
    return head + ",\n".join(written) + "\n]}\n"


def _steps(*steps: Reply | Step, at: float = 0.0) -> list[Step]:
    """*steps*, of which replies arrive at the time *at*."""
    return [each if isinstance(each, Step) else Step(at, "observe", each) for each in steps]


def _tick(at: float) -> Step:
    return Step(at, "tick")


def _ended(param: str, run: str | None = None) -> RequestFailed:
    """The final of a request that reached its end while it waited, or in a run."""
    error = ErrorInfo(message="late", code="deadline_expired", param=param, status=504)
    return msgspec.structs.replace(failed(run), error=error)


def _batch(*chunks: TokenChunk) -> TokensEmitted:
    return TokensEmitted(chunks=chunks)


def _said(part: TokenChunk, text: str) -> TokenChunk:
    """*part* with another text."""
    return msgspec.structs.replace(part, text=text)


def _with_events(part: TokenChunk, *steps: tuple[int, bytes]) -> TokenChunk:
    """*part* without text, and with the events of its steps of so many tokens."""
    details = tuple(StepDetails(num_tokens, events=events) for num_tokens, events in steps)
    return msgspec.structs.replace(part, text="", details=details)


def _without_text(final: RequestCompleted) -> RequestCompleted:
    """*final* of a stream of events."""
    child = ChildAnswer(token_ids=final.token_ids, finish_reason=final.finish_reason)
    return msgspec.structs.replace(final, token_ids=(), text="", children=(child,))


def _of(child: int, part: TokenChunk) -> TokenChunk:
    """*part* as one of an answer of a call."""
    return msgspec.structs.replace(part, child=child)


def _call(run: str) -> RequestCompleted:
    """A final with two answers."""
    answers = [completed(run), completed(run, answer=SHORT)]
    children = tuple(
        ChildAnswer(token_ids=each.token_ids, text=each.text, finish_reason=FinishReason.LENGTH)
        for each in answers
    )
    return msgspec.structs.replace(answers[0], token_ids=(), text="", children=children)


def _resumed(run: str, *offsets: int) -> RunStarted:
    return msgspec.structs.replace(started(run, hop=1, offset=offsets[0]), offsets=offsets)


def _streamed() -> dict[str, list[Step]]:
    """Name -> case of a request with `reply` `stream`."""
    start, first, second = started("a"), tokens("a", 0, 3), tokens("a", 3, 6)
    done, newer = completed("a"), started("b")
    lonely = _said(chunk("a", 3, 3), "x")
    late = started("b", instance="i", at=1.0)
    return {
        "one run streams its tokens": _steps(start, first, second, done),
        "a final without streamed tokens is the whole answer": _steps(done),
        "later finals and tokens are dropped": _steps(
            start, done, completed("b"), failed("b"), first
        ),
        "a failure after the success is dropped": _steps(start, done, failed("a")),
        "a repeated chunk is dropped": _steps(start, first, first, second, done),
        "an old chunk is dropped": _steps(start, first, second, first, tokens("a", 6, 8), done),
        "after a lost chunk the final has the rest": _steps(
            start, first, tokens("a", 5, 8), tokens("a", 8, 9), tokens("a", 3, 5), done
        ),
        "a chunk that is partly repeated breaks its run": _steps(
            start, first, tokens("a", 2, 6), second, done
        ),
        "text without tokens breaks its run": _steps(start, first, _batch(lonely), second, done),
        "chunks of other requests are dropped": _steps(
            start, _batch(chunk("a", 0, 2, request="r2"), chunk("a", 0, 3)), done
        ),
        "tokens of a run whose start was lost are dropped": _steps(tokens("z", 0, 3), done),
        "a newer run at the same hop replaces the older, and its repetitions are dropped": _steps(
            start, first, newer, second, tokens("b", 0, 2), tokens("b", 2, 6), completed("b")
        ),
        "a run of a lower hop is stopped": [
            *_steps(started("a", hop=2), started("b", hop=1), tokens("b", 0, 2), tokens("a", 0, 2)),
            *_steps(failed("b"), _tick(100.0), done),
        ],
        "a run of a higher hop replaces the current, although its time is earlier": _steps(
            started("a", instance="i", at=2.0),
            started("b", instance="i", at=1.0, hop=1),
            tokens("b", 0, 2),
            completed("b"),
        ),
        "of two starts with the same time, the one that arrives last is newer": _steps(
            started("a", instance="i", at=1.0), late, tokens("b", 0, 2), completed("b")
        ),
        "a start that arrives late, of the same instance, is stopped": _steps(
            started("a", instance="i", at=2.0), late, tokens("b", 0, 2), tokens("a", 0, 2), done
        ),
        "times of two instances are not compared": _steps(
            started("a", at=2.0), late, tokens("a", 0, 2), tokens("b", 0, 2), completed("b")
        ),
        "a repeated start changes nothing": _steps(start, first, start, second, done),
        "a repeated start of a replaced run is stopped": _steps(
            start, newer, start, tokens("b", 0, 1), completed("b")
        ),
        "a continued answer continues at its offset": _steps(
            start,
            tokens("a", 0, 4),
            started("b", hop=1, offset=4),
            tokens("b", 4, 7),
            completed("b"),
        ),
        "a run that continues beyond the received tokens waits for its final": _steps(
            start,
            tokens("a", 0, 2),
            started("b", hop=1, offset=4),
            tokens("b", 4, 7),
            completed("b"),
        ),
        "the text of a run that begins inside a chunk comes with the final": _steps(
            start,
            tokens("a", 0, 4),
            started("b", hop=1, offset=3),
            tokens("b", 3, 7),
            tokens("b", 7, 12),
            completed("b"),
        ),
        "a run with other tokens ends the stream": _steps(
            start,
            tokens("a", 0, 5),
            newer,
            tokens("b", 0, 4, answer=OTHER),
            tokens("b", 4, 6, answer=OTHER),
            completed("b", answer=OTHER),
        ),
        "after a divergence no run is streamed": _steps(
            start,
            tokens("a", 0, 5),
            newer,
            tokens("b", 0, 4, answer=OTHER),
            started("c"),
            tokens("c", 0, 8),
            completed("c"),
        ),
        "a run with other tokens and equal text ends the stream": _steps(
            start,
            tokens("a", 0, 5),
            newer,
            _batch(_said(chunk("b", 0, 5, answer=OTHER), chunk("a", 0, 5).text)),
            completed("b", answer=OTHER),
        ),
        "a run with other text ends the stream": _steps(
            start,
            tokens("a", 0, 5),
            newer,
            _batch(_said(chunk("b", 0, 5), "other")),
            completed("b"),
        ),
        "a final with other text ends the stream": _steps(
            start, first, msgspec.structs.replace(done, text="other" * 20)
        ),
        "a final with less text than the stream ends it": _steps(
            start, first, msgspec.structs.replace(done, text="")
        ),
        "a final with other tokens ends the stream": _steps(
            start, tokens("a", 0, 5), completed("b", answer=OTHER)
        ),
        "a final that is shorter than the stream ends it": _steps(
            start, tokens("a", 0, 6), completed("a", answer=SHORT)
        ),
        "a run that starts after the final is stopped": _steps(start, done, newer),
        "a cancelled request stops later runs, and drops their replies": [
            *_steps(start, first),
            Step(3.0, "cancel"),
            *_steps(second, newer, done, at=4.0),
            Step(5.0, "cancel"),
        ],
        "a failure of the current run is final": _steps(start, first, failed("a"), done),
        "a failure without any run is final": _steps(failed()),
        "a failure of a run whose start was lost is final, if no run is live": _steps(failed("a")),
        "a failure of another run waits for the silence of the live run": [
            *_steps(start, failed("b"), at=100.0),
            _tick(109.9),
            _tick(110.0),
        ],
        "a failure without a run waits for the silence of the live run": [
            *_steps(start, at=90.0),
            *_steps(failed(), at=100.0),
            _tick(109.9),
            _tick(110.0),
        ],
        "a sign of the live run delays a held failure": [
            *_steps(start, failed(), at=100.0),
            *_steps(first, at=104.0),
            *_steps(start, at=109.0),
            _tick(118.9),
            _tick(119.0),
        ],
        "a new run delays a held failure": [
            *_steps(start, failed("b"), at=100.0),
            *_steps(started("c"), at=109.0),
            _tick(118.9),
            _tick(119.0),
        ],
        "the first held failure counts": [
            *_steps(start, failed("b"), failed("c"), at=100.0),
            _tick(110.0),
        ],
        "a success overrides a held failure": [
            *_steps(start, failed(), done, at=100.0),
            _tick(1000.0),
        ],
        "a failure of a replaced run never ends the request": [
            *_steps(start, newer, failed("a"), at=100.0),
            _tick(1000.0),
        ],
        "a request that reached its end while it waited again is over at once": _steps(
            start, first, _ended("expires_at")
        ),
        "the end of a run that is not the current waits as its failure": [
            *_steps(start, first, _ended("expires_at", run="b"), at=100.0),
            _tick(109.9),
            _tick(110.0),
        ],
        "the deadline of the first token ends no request with tokens": [
            *_steps(start, first, _ended("slo.ttft_s")),
            _tick(100.0),
            *_steps(second, done, at=101.0),
        ],
        "the deadline of the first token ends a request without tokens": _steps(
            start, _ended("slo.ttft_s")
        ),
        "server-sent events come with the tokens that complete them": _steps(
            start,
            _batch(_with_events(chunk("a", 0, 3), (1, b"data: 1\n\n"), (2, b"data: 2\n\n"))),
            newer,
            _batch(_with_events(chunk("b", 0, 4), (3, b"data: 1\n\n"), (1, b"data: 3\n\n"))),
            _batch(_with_events(chunk("b", 4, 6), (2, b"data: 4\n\n"))),
            _without_text(completed("b", answer=ANSWER[:6])),
        ),
        "events of a step that is partly known do not come with its tokens": _steps(
            start,
            _batch(_with_events(chunk("a", 0, 3), (3, b"data: 1\n\n"))),
            newer,
            _batch(
                _with_events(chunk("b", 0, 5), (2, b"data: 0\n\n"), (2, b"data: 1\n\n"), (1, b""))
            ),
            _without_text(completed("b", answer=ANSWER[:5])),
        ),
        "answers of a call are streamed independently": _steps(
            start,
            _batch(_of(1, chunk("a", 0, 2)), chunk("a", 0, 5)),
            _batch(_of(1, chunk("a", 3, 4)), chunk("a", 5, 6)),
            _call("a"),
        ),
        "each answer of a call continues at its offset": _steps(
            start,
            _batch(chunk("a", 0, 4), _of(1, chunk("a", 0, 2))),
            _resumed("b", 4, 2),
            _batch(_of(1, chunk("b", 2, 3)), chunk("b", 4, 6)),
            _call("b"),
        ),
    }


def _final_only() -> dict[str, list[Step]]:
    """Name -> case of a request with `reply` `final`."""
    start, done = started("a"), completed("a")
    return {
        "the answer is one part": _steps(start, tokens("a", 0, 4), done),
        "other tokens before it do not matter": _steps(
            start, tokens("a", 0, 5), completed("b", answer=OTHER)
        ),
        "each answer of a call is one part": _steps(_call("a")),
        "tokens that are not streamed are signs of the live run": [
            *_steps(start, failed("b"), at=100.0),
            *_steps(tokens("a", 0, 4), at=109.0),
            _tick(118.9),
            _tick(119.0),
        ],
    }


ENDINGS: tuple[Reply, ...] = (
    *(completed(run) for run in "aabbc"),
    completed("b", answer=OTHER),
    *(failed(run) for run in ("a", "b", None)),
    _ended("slo.ttft_s"),
    _ended("expires_at"),
)


def _run(random: Random, name: str) -> list[Reply]:
    """One run's replies in order, on one of two instances, whose clocks differ."""
    begin = random.choice((0, 0, random.randint(0, len(ANSWER))))
    start = started(
        name,
        hop=random.choice((0, 0, 1)),
        offset=begin,
        instance=random.choice(("i1", "i2")),
        at=random.choice((0.0, 1.0)),
    )
    answer = OTHER if random.random() < 0.1 else ANSWER
    ends = range(begin, len(ANSWER) + 1)
    borders = sorted({begin, *random.sample(ends, min(4, len(ends)))})
    return [start, *(tokens(name, *pair, answer=answer) for pair in pairwise(borders))]


def _as_call(reply: Reply) -> Reply:
    """*reply* about a request with two equal answers."""
    match reply:
        case RunStarted():
            return msgspec.structs.replace(reply, offset=0, offsets=(reply.offset, reply.offset))
        case TokensEmitted(chunks=(first, *_)):
            return _batch(first, _of(1, first))
        case RequestCompleted():
            child = ChildAnswer(
                token_ids=reply.token_ids, text=reply.text, finish_reason=reply.finish_reason
            )
            return msgspec.structs.replace(reply, token_ids=(), text="", children=(child, child))
        case _:
            return reply


def _mixed(random: Random) -> list[Step]:
    """Replies of some runs, interleaved, lost and repeated, with endings, ticks and cancels."""
    every = [_run(random, name) for name in "abc"[: random.randint(1, 3)]]
    replies: list[Reply] = []
    while left := [run for run in every if run]:
        replies.append(random.choice(left).pop(0))
    replies = [reply for reply in replies if random.random() > 0.08]
    for _ in range(random.randint(0, 3) if replies else 0):
        replies.insert(random.randint(0, len(replies)), random.choice(replies))
    for _ in range(random.randint(0, 2)):
        replies.insert(random.randint(len(replies) // 2, len(replies)), random.choice(ENDINGS))
    if random.random() < 0.2:
        replies = [_as_call(reply) for reply in replies]
    steps: list[Step] = []
    now = 0.0
    for reply in replies:
        now += random.choice((0.0, 1.0, 12.0))
        steps.append(Step(now, "observe", reply))
        if random.random() < 0.2:
            steps.append(_tick(now + random.choice((0.0, 11.0))))
        if random.random() < 0.03:
            steps.append(Step(now, "cancel"))
    return steps


def main() -> int:
    sys.stdout.write(render())
    return 0


if __name__ == "__main__":
    sys.exit(main())
