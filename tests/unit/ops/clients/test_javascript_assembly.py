"""The assemblies of both clients make the same answers of the same replies."""

import json
import subprocess
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any, cast

import msgspec
import pytest

from ops.clients.npm import HERE
from shared.contracts.requests import (
    ChildAnswer,
    ErrorInfo,
    Reply,
    RequestCompleted,
    RequestFailed,
    RunStarted,
    TokensEmitted,
)
from shared.producer.assembly import RequestAssembly
from shared.producer.effects import Diverged, Effect, Finished, NewTokens, SendStop
from tests.requirements import program
from tests.unit.producer.builders import ANSWER, REQUEST, completed, failed, started, tokens

Step = tuple[str, float, Reply | None]


class Node:
    """A process that runs the JavaScript assembly."""

    def __init__(self) -> None:
        script = Path(__file__).with_name("assembly_effects.mjs")
        command = [program("node", "npm"), str(script), str(HERE / "assembly.js")]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def effects(self, steps: Sequence[Step], *, streaming: bool) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        case = {"requestId": REQUEST, "streaming": streaming, "steps": msgspec.to_builtins(steps)}
        self.process.stdin.write(json.dumps(case) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    running = Node()
    yield running
    running.process.communicate()


def plain(effect: Effect) -> dict[str, Any]:
    """An effect as the JavaScript assembly writes it."""
    match effect:
        case NewTokens():
            part = {
                "offset": effect.offset,
                "tokenIds": list(effect.token_ids),
                "text": effect.text,
                "child": effect.child,
            }
            return {"type": "part", "part": part}
        case Diverged():
            return {"type": "diverged"}
        case SendStop():
            return {
                "type": "stop",
                "runId": effect.run_id,
                "instanceId": effect.instance_id,
                "reason": effect.reason.value,
            }
        case Finished():
            final = json.loads(msgspec.json.encode(effect.final))
            return {"type": "finished", "final": final}


def python_effects(steps: Sequence[Step], *, streaming: bool) -> list[dict[str, Any]]:
    assembly = RequestAssembly(REQUEST, streaming=streaming)
    effects: list[Effect] = []
    for what, now, reply in steps:
        if what == "observe":
            effects += assembly.observe(cast("Reply", reply), now)
        else:
            effects += assembly.tick(now) if what == "tick" else assembly.cancel(now)
    return [plain(effect) for effect in effects]


def expired(param: str) -> RequestFailed:
    error = ErrorInfo(message="late", code="deadline_expired", param=param, status=504)
    return RequestFailed(request_id=REQUEST, error=error, at=0.0)


OTHER = tuple(token + (index == 3) for index, token in enumerate(ANSWER))
"""An answer that differs in one token."""
ENDINGS: tuple[Reply, ...] = (
    *(completed(run) for run in "aabbc"),
    completed("b", answer=OTHER),
    *(failed(run) for run in ("a", "b", None)),
    expired("slo.ttft_s"),
    expired("expires_at"),
)
NUM_HISTORIES = 2000


def run_of(random: Random, name: str) -> list[Reply]:
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


def as_call(reply: Reply) -> Reply:
    """*reply* about a request with two equal answers."""
    match reply:
        case RunStarted():
            return msgspec.structs.replace(reply, offset=0, offsets=(reply.offset, reply.offset))
        case TokensEmitted(chunks=(first, *_)):
            return msgspec.structs.replace(
                reply, chunks=(first, msgspec.structs.replace(first, child=1))
            )
        case RequestCompleted():
            child = ChildAnswer(
                token_ids=reply.token_ids, text=reply.text, finish_reason=reply.finish_reason
            )
            return msgspec.structs.replace(reply, token_ids=(), text="", children=(child, child))
        case _:
            return reply


def history(random: Random) -> list[Step]:
    """Replies of some runs, interleaved, lost and repeated, with endings, ticks and cancels."""
    every = [run_of(random, name) for name in "abc"[: random.randint(1, 3)]]
    replies: list[Reply] = []
    while left := [run for run in every if run]:
        replies.append(random.choice(left).pop(0))
    replies = [reply for reply in replies if random.random() > 0.08]
    for _ in range(random.randint(0, 3) if replies else 0):
        replies.insert(random.randint(0, len(replies)), random.choice(replies))
    for _ in range(random.randint(0, 2)):
        replies.insert(random.randint(len(replies) // 2, len(replies)), random.choice(ENDINGS))
    if random.random() < 0.2:
        replies = [as_call(reply) for reply in replies]
    steps: list[Step] = []
    now = 0.0
    for reply in replies:
        now += random.choice((0.0, 1.0, 12.0))
        steps.append(("observe", now, reply))
        if random.random() < 0.2:
            steps.append(("tick", now + random.choice((0.0, 11.0)), None))
        if random.random() < 0.03:
            steps.append(("cancel", now, None))
    return steps


LONELY_TEXT = TokensEmitted(
    chunks=(msgspec.structs.replace(tokens("a", 0, 1).chunks[0], token_ids=(), text="x"),),
)


def test_both_assemblies_have_the_same_effects(node: Node) -> None:
    cases = [history(Random(seed)) for seed in range(NUM_HISTORIES)]
    cases.append([("observe", 0.0, each) for each in (started("a"), LONELY_TEXT, completed("a"))])
    for number, steps in enumerate(cases):
        streaming = number % 4 != 0
        expected = python_effects(steps, streaming=streaming)

        assert node.effects(steps, streaming=streaming) == expected, number
