"""Assembly of the replies to one request: one test for each rule."""

from ops.generate.replies import ANSWER, REQUEST, chunk, completed, failed, started, text_of, tokens
from shared.contracts.base import InstanceId, RunId
from shared.contracts.control import StopReason
from shared.contracts.requests import ErrorInfo, Reply, RequestFailed
from shared.producer.assembly import RequestAssembly
from shared.producer.effects import Diverged, Effect, Finished, NewTokens, SendStop
from tests.unit.producer.builders import stop

OTHER = (100, 101, 102, 7, 8, 9)


def feed(assembly: RequestAssembly, *replies: Reply, now: float = 0.0) -> list[Effect]:
    return [effect for reply in replies for effect in assembly.observe(reply, now)]


def part(start: int, end: int) -> NewTokens:
    return NewTokens(
        offset=start, token_ids=tuple(ANSWER[start:end]), text=text_of(ANSWER[start:end])
    )


def streaming() -> RequestAssembly:
    return RequestAssembly(REQUEST, streaming=True, silence_s=10.0)


def test_one_run_streams_its_tokens_and_finishes():
    effects = feed(streaming(), started("a"), tokens("a", 0, 1), tokens("a", 1, 12), completed("a"))

    assert effects == [part(0, 1), part(1, 12), Finished(final=completed("a"))]


def test_final_only_gives_the_answer_in_one_part():
    assembly = RequestAssembly(REQUEST, streaming=False)

    effects = feed(assembly, started("a"), tokens("a", 0, 4), completed("a"))

    assert effects == [part(0, 12), Finished(final=completed("a"))]


def test_a_final_without_streamed_tokens_completes_the_answer():
    assert feed(streaming(), completed("a")) == [part(0, 12), Finished(final=completed("a"))]


def test_second_final_is_ignored():
    assembly = streaming()
    feed(assembly, completed("a"))

    assert feed(assembly, completed("b"), failed("b"), tokens("a", 0, 2)) == []


def test_repeated_batch_is_dropped():
    assembly = streaming()
    feed(assembly, started("a"), tokens("a", 0, 3))

    assert feed(assembly, tokens("a", 0, 3), tokens("a", 3, 4)) == [part(3, 4)]


def test_final_delivers_the_remaining_tokens_after_a_lost_batch():
    effects = feed(
        streaming(), started("a"), tokens("a", 0, 2), tokens("a", 5, 8), tokens("a", 8, 9)
    )

    assert effects == [part(0, 2)]


def test_tail_of_the_final_starts_where_the_stream_stopped():
    assembly = streaming()
    feed(assembly, started("a"), tokens("a", 0, 2), tokens("a", 5, 8))

    assert feed(assembly, completed("a")) == [part(2, 12), Finished(final=completed("a"))]


def test_newer_run_at_the_same_hop_replaces_and_stops_the_older():
    """The newer run may come from the same message, redelivered after the first agent died."""
    assembly = streaming()
    feed(assembly, started("a"), tokens("a", 0, 3))

    effects = feed(assembly, started("b"), tokens("a", 3, 4), tokens("b", 0, 2), tokens("b", 2, 6))

    assert effects == [stop("a", StopReason.SUPERSEDED), part(3, 6)]


def test_start_that_one_instance_sent_earlier_does_not_stop_its_later_run():
    """An instance swaps a request out and resumes it; the two starts arrive in the wrong order."""
    assembly = streaming()
    feed(assembly, started("b", instance="i", at=2.0))

    effects = feed(assembly, started("a", instance="i", at=1.0), tokens("b", 0, 2))

    old = SendStop(run_id=RunId("a"), instance_id=InstanceId("i"), reason=StopReason.SUPERSEDED)
    assert effects == [old, part(0, 2)]


def test_run_of_a_lower_hop_is_stopped():
    assembly = streaming()
    feed(assembly, started("a", hop=2))

    effects = feed(assembly, started("b", hop=1), tokens("b", 0, 2), tokens("a", 0, 2))

    assert effects == [stop("b", StopReason.SUPERSEDED), part(0, 2)]


def test_repeated_start_of_an_older_run_does_not_replace_the_newer():
    assembly = streaming()
    feed(assembly, started("a"), started("b"))

    effects = feed(assembly, started("a"), tokens("b", 0, 1))

    assert effects == [stop("a", StopReason.SUPERSEDED), part(0, 1)]


def test_duplicate_start_changes_nothing():
    assembly = streaming()
    feed(assembly, started("a"), tokens("a", 0, 2))

    assert feed(assembly, started("a"), tokens("a", 2, 3)) == [part(2, 3)]


def test_resumed_run_continues_at_its_offset():
    assembly = streaming()
    feed(assembly, started("a"), tokens("a", 0, 4))

    effects = feed(assembly, started("b", hop=1, offset=4), tokens("b", 4, 7))

    assert effects == [stop("a", StopReason.SUPERSEDED), part(4, 7)]


def test_resumed_run_beyond_the_received_tokens_waits_for_the_final():
    assembly = streaming()
    feed(assembly, started("a"), tokens("a", 0, 2))

    effects = feed(assembly, started("b", hop=1, offset=4), tokens("b", 4, 7), completed("b"))

    assert effects == [
        stop("a", StopReason.SUPERSEDED),
        part(2, 12),
        Finished(final=completed("b")),
    ]


def test_run_resumed_inside_a_chunk_gives_its_text_with_the_final():
    """The position of the resumption in the tokens is known, but not in the text."""
    assembly = streaming()
    feed(assembly, started("a"), tokens("a", 0, 4))

    effects = feed(assembly, started("b", hop=1, offset=3), tokens("b", 3, 7), completed("b"))

    assert effects[1:] == [
        NewTokens(offset=4, token_ids=tuple(ANSWER[4:7]), text=""),
        NewTokens(offset=7, token_ids=tuple(ANSWER[7:]), text=text_of(ANSWER[4:])),
        Finished(final=completed("b")),
    ]


def test_replay_with_other_tokens_ends_the_stream_once():
    assembly = streaming()
    feed(assembly, started("a"), tokens("a", 0, 5))
    final = completed("b", answer=OTHER)

    effects = feed(
        assembly,
        started("b"),
        tokens("b", 0, 4, answer=OTHER),
        tokens("b", 4, 6, answer=OTHER),
        final,
    )

    assert effects == [stop("a", StopReason.SUPERSEDED), Diverged(), Finished(final=final)]


def test_final_that_contradicts_the_stream_ends_it_with_an_error():
    assembly = streaming()
    feed(assembly, started("a"), tokens("a", 0, 5))
    final = completed("b", answer=OTHER)

    assert feed(assembly, final) == [Diverged(), Finished(final=final)]


def test_final_only_mode_ignores_other_tokens():
    assembly = RequestAssembly(REQUEST, streaming=False)
    final = completed("b", answer=OTHER)

    effects = feed(assembly, started("a"), tokens("a", 0, 5), final)

    assert effects == [
        NewTokens(offset=0, token_ids=OTHER, text=text_of(OTHER)),
        Finished(final=final),
    ]


def test_late_run_is_stopped_as_complete():
    assembly = streaming()
    feed(assembly, completed("a"))

    assert feed(assembly, started("b")) == [stop("b", StopReason.COMPLETED)]


def test_cancelled_request_finishes_and_stops_later_runs():
    assembly = streaming()
    (finished,) = assembly.cancel(3.0)

    effects = feed(assembly, started("a"), completed("a"))

    assert isinstance(finished, Finished)
    assert isinstance(finished.final, RequestFailed)
    assert finished.final.error.code == "cancelled"
    assert effects == [stop("a", StopReason.CANCELLED)]
    assert assembly.cancel(4.0) == []


def test_failure_of_the_current_run_finishes():
    assembly = streaming()
    feed(assembly, started("a"))

    assert feed(assembly, failed("a")) == [Finished(final=failed("a"))]


def test_failure_of_another_run_is_ignored():
    assembly = streaming()
    feed(assembly, started("a"))

    assert feed(assembly, failed("b"), tokens("a", 0, 1)) == [part(0, 1)]


def test_failure_of_a_run_with_a_lost_start_waits_for_silence():
    """A dead agent's request moved to a run whose start was lost."""
    assembly = streaming()
    feed(assembly, started("a"), failed("b"), now=100.0)

    early, late = assembly.tick(109.9), assembly.tick(110.0)

    assert early == []
    assert late == [Finished(final=failed("b"))]


def test_failure_of_a_replaced_run_never_ends_the_request():
    assembly = streaming()
    feed(assembly, started("a"), started("b"), failed("a"), now=100.0)

    assert not assembly.holds_failure
    assert assembly.tick(1e9) == []


def test_failure_without_any_live_run_finishes():
    assert feed(streaming(), failed()) == [Finished(final=failed())]
    assert feed(streaming(), failed("a")) == [Finished(final=failed("a"))]


def test_failure_without_a_run_waits_for_silence_of_the_live_run():
    assembly = streaming()
    feed(assembly, started("a"), failed(), now=100.0)

    early, late = assembly.tick(109.9), assembly.tick(110.0)

    assert early == []
    assert late == [Finished(final=failed())]


def test_activity_of_the_live_run_delays_a_held_failure():
    assembly = streaming()
    feed(assembly, started("a"), failed(), now=100.0)
    feed(assembly, tokens("a", 0, 1), now=109.0)

    assert assembly.holds_failure
    assert assembly.tick(118.9) == []
    assert assembly.tick(119.0) == [Finished(final=failed())]


def test_final_overrides_a_held_failure():
    assembly = streaming()
    feed(assembly, started("a"), failed(), now=100.0)

    assert feed(assembly, completed("a"))[-1] == Finished(final=completed("a"))
    assert not assembly.holds_failure
    assert assembly.tick(1000.0) == []


def test_tokens_of_unknown_runs_are_dropped():
    assert feed(streaming(), tokens("ghost", 0, 3)) == []


def test_chunks_of_other_requests_in_a_batch_are_dropped():
    assembly = streaming()
    feed(assembly, started("a"))

    assert assembly.observe_chunk(chunk("a", 0, 2), 0.0) == [part(0, 2)]
    assert feed(assembly, tokens("a", 2, 3)) == [part(2, 3)]


def ended(param: str) -> RequestFailed:
    """The final of a request that reached its end while it waited."""
    error = ErrorInfo(message="late", code="deadline_expired", param=param, status=504)
    return RequestFailed(request_id=REQUEST, error=error, at=0.0)


def test_end_of_a_request_that_waits_again_is_final_at_once():
    """Its run was evicted, and no later run has begun."""
    effects = feed(streaming(), started("a"), tokens("a", 0, 2), ended("expires_at"))

    assert effects == [part(0, 2), Finished(final=ended("expires_at"))]


def test_deadline_of_the_first_token_does_not_end_a_request_with_tokens():
    assembly = streaming()

    assert feed(assembly, started("a"), tokens("a", 0, 2), ended("slo.ttft_s")) == [part(0, 2)]
    assert not assembly.holds_failure
    assert feed(assembly, tokens("a", 2, 12), completed("a")) == [
        part(2, 12),
        Finished(final=completed("a")),
    ]


def test_deadline_of_the_first_token_ends_a_run_without_tokens():
    late = ended("slo.ttft_s")

    assert feed(streaming(), started("a"), late) == [Finished(final=late)]
