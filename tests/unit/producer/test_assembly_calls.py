"""Assembly of the replies to a call with several answers."""

import msgspec

from ops.generate.replies import ANSWER, REQUEST, chunk, completed, started, text_of
from shared.contracts.control import StopReason
from shared.contracts.requests import ChildAnswer, FinishReason, RequestCompleted, RunStarted
from shared.producer.assembly import RequestAssembly
from shared.producer.effects import Effect, Finished, NewTokens
from tests.unit.producer.builders import stop

OTHER = tuple(range(200, 206))
ANSWERS = (ANSWER, OTHER)


def tokens(assembly: RequestAssembly, run: str, child: int, start: int, end: int) -> list[Effect]:
    part = chunk(run, start, end, answer=ANSWERS[child])
    return assembly.observe_chunk(msgspec.structs.replace(part, child=child), 0.0)


def part(child: int, start: int, end: int) -> NewTokens:
    token_ids = ANSWERS[child][start:end]
    return NewTokens(offset=start, token_ids=token_ids, text=text_of(token_ids), child=child)


def resumed(run: str, *offsets: int) -> RunStarted:
    return msgspec.structs.replace(started(run, hop=1, offset=offsets[0]), offsets=offsets)


def final(run: str) -> RequestCompleted:
    children = tuple(
        ChildAnswer(token_ids=answer, text=text_of(answer), finish_reason=FinishReason.STOP)
        for answer in ANSWERS
    )
    return msgspec.structs.replace(
        completed(run), token_ids=(), text="", children=children, response=msgspec.Raw(b"{}")
    )


def streaming() -> RequestAssembly:
    assembly = RequestAssembly(REQUEST, streaming=True)
    assembly.observe(started("a"), 0.0)
    return assembly


def test_answers_are_streamed_independently():
    assembly = streaming()

    assert tokens(assembly, "a", 1, 0, 2) == [part(1, 0, 2)]
    assert tokens(assembly, "a", 0, 0, 5) == [part(0, 0, 5)]
    assert tokens(assembly, "a", 1, 2, 4) == [part(1, 2, 4)]
    assert assembly.observe(final("a"), 0.0) == [
        part(0, 5, 12),
        part(1, 4, 6),
        Finished(final=final("a")),
    ]


def test_lost_batch_of_one_answer_does_not_affect_the_others():
    assembly = streaming()
    tokens(assembly, "a", 1, 2, 4)

    assert tokens(assembly, "a", 0, 0, 2) == [part(0, 0, 2)]


def test_each_answer_continues_at_its_own_offset():
    assembly = streaming()
    tokens(assembly, "a", 0, 0, 5)
    tokens(assembly, "a", 1, 0, 2)

    assert assembly.observe(resumed("b", 5, 2), 0.0) == [stop("a", StopReason.SUPERSEDED)]
    assert tokens(assembly, "b", 1, 2, 3) == [part(1, 2, 3)]
    assert tokens(assembly, "b", 0, 5, 6) == [part(0, 5, 6)]


def test_final_only_gives_one_part_for_each_answer():
    assembly = RequestAssembly(REQUEST, streaming=False)

    effects = assembly.observe(final("a"), 0.0)

    assert effects == [part(0, 0, 12), part(1, 0, 6), Finished(final=final("a"))]
