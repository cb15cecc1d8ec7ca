"""After any disturbance of the replies, a request has exactly one consistent result."""

from collections.abc import Sequence
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from ops.generate.replies import ANSWER, REQUEST, completed, failed, started, text_of, tokens
from shared.contracts.requests import Reply
from shared.producer.assembly import RequestAssembly
from shared.producer.effects import Diverged, Effect, Finished, NewTokens, SendStop

LENGTH = len(ANSWER)


@st.composite
def runs(draw: st.DrawFn, name: str) -> list[Reply]:
    """One run's replies in order; the run may resume, have any chunks, and end anywhere."""
    offset = draw(st.integers(0, LENGTH))
    borders = sorted(draw(st.sets(st.integers(offset, LENGTH))) | {offset})
    replies: list[Reply] = [started(name, hop=draw(st.integers(0, 2)), offset=offset)]
    replies += [tokens(name, start, end) for start, end in pairwise(borders)]
    return replies


@st.composite
def deliveries(draw: st.DrawFn) -> list[Reply]:
    """Replies of several runs, which may be interleaved, reordered, repeated and lost."""
    every = [draw(runs(name)) for name in "abc"[: draw(st.integers(1, 3))]]
    queue: list[Reply] = []
    while any(every):
        queue.append(draw(st.sampled_from([run for run in every if run])).pop(0))
    kept = [reply for reply in queue if draw(st.integers(0, 5))]
    for _ in range(draw(st.integers(0, 4))):
        if kept:
            again = draw(st.sampled_from(kept))
            kept.insert(draw(st.integers(0, len(kept))), again)
    return kept


def feed(assembly: RequestAssembly, replies: Sequence[Reply]) -> list[Effect]:
    return [effect for reply in replies for effect in assembly.observe(reply, 0.0)]


@given(deliveries(), deliveries(), st.sampled_from("abc"), st.booleans())
def test_each_token_comes_once_in_order_and_the_request_finishes_once(
    before: list[Reply],
    after: list[Reply],
    finisher: str,
    streaming: bool,  # noqa: FBT001  a drawn value
):
    assembly = RequestAssembly(REQUEST, streaming=streaming)
    final = completed(finisher)

    effects = feed(assembly, [*before, final, *after, final])

    parts = [effect for effect in effects if isinstance(effect, NewTokens)]
    assert tuple(token for part in parts for token in part.token_ids) == ANSWER
    assert "".join(part.text for part in parts) == text_of(ANSWER)
    assert [part.offset for part in parts] == [
        sum(len(earlier.token_ids) for earlier in parts[:index]) for index in range(len(parts))
    ]
    assert [effect for effect in effects if isinstance(effect, Finished)] == [Finished(final=final)]
    assert Diverged() not in effects


@given(deliveries())
def test_newest_run_of_the_highest_hop_is_never_stopped(replies: list[Reply]):
    """Stopping the newest run could lose the request, because it may be the only copy."""
    assembly = RequestAssembly(REQUEST, streaming=True)
    first_starts: dict[str, int] = {}
    for reply in replies:
        if isinstance(reply, type(started("x"))):
            first_starts.setdefault(reply.run_id, reply.hop)

    effects = feed(assembly, replies)

    stopped = {effect.run_id for effect in effects if isinstance(effect, SendStop)}
    highest = max(first_starts.values(), default=0)
    newest = [run for run, hop in first_starts.items() if hop == highest][-1:]
    assert stopped.isdisjoint(newest)


@given(deliveries(), st.lists(st.sampled_from(["a", "b", None]), max_size=3))
def test_every_ending_finishes_exactly_once(replies: list[Reply], failures: list[str | None]):
    assembly = RequestAssembly(REQUEST, streaming=True)

    effects = feed(assembly, [*replies, *(failed(run) for run in failures)])
    effects += assembly.tick(1e9)
    effects += feed(assembly, [completed("a"), failed("a")])
    effects += assembly.cancel(1e9)

    assert sum(isinstance(effect, Finished) for effect in effects) == 1
