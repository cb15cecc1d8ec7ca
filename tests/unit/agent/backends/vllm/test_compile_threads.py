"""Compilations of grammars have a limit on their time."""

import threading
from collections.abc import Callable
from concurrent.futures import Future

import pytest

from services.agent.backends.vllm.core.compile_threads import CompileThreads

FOREVER_S = 60.0
SHORT_S = 0.01


def some_threads(*, limit_s: float, num_threads: int = 1, max_late: int = 0) -> CompileThreads:
    """Threads in which the first argument of a call is the key of what it compiles."""
    return CompileThreads(
        limit_s=limit_s, num_threads=num_threads, max_late=max_late, key_of=lambda key, *_: key
    )


def answer(key: str) -> str:
    return f"grammar of {key}"


def refuse(key: str) -> str:
    raise ValueError(f"{key} is not a grammar")


class Gate:
    """A call that lasts until it is released."""

    def __init__(self, then: Callable[[str], str] = answer) -> None:
        self.released = threading.Event()
        self.ended = threading.Event()
        self._then = then

    def __call__(self, key: str) -> str:
        self.released.wait(FOREVER_S)
        self.ended.set()
        return self._then(key)


def assert_too_late(result: Future[str]) -> None:
    with pytest.raises(TimeoutError, match=r"longer than 0.01 s to compile"):
        result.result(FOREVER_S)


def test_results_and_errors_reach_the_caller():
    threads = some_threads(limit_s=FOREVER_S)

    assert threads.submit(answer, "a").result(FOREVER_S) == "grammar of a"
    with pytest.raises(ValueError, match="b is not a grammar"):
        threads.submit(refuse, "b").result(FOREVER_S)
    assert threads.submit(answer, "c").result(FOREVER_S) == "grammar of c"


@pytest.mark.parametrize("late", [answer, refuse], ids=["late result", "late error"])
def test_a_call_over_the_limit_fails_and_other_calls_run(late: Callable[[str], str]):
    threads, gate = some_threads(limit_s=SHORT_S, max_late=1), Gate(late)

    slow = threads.submit(gate, "slow")
    assert_too_late(slow)
    assert threads.submit(answer, "other").result(FOREVER_S) == "grammar of other"
    gate.released.set()
    assert gate.ended.wait(FOREVER_S)
    assert isinstance(slow.exception(), TimeoutError)


def test_a_late_call_fails_at_once_if_it_is_repeated_before_its_end():
    threads, gate = some_threads(limit_s=SHORT_S, max_late=1), Gate()
    assert_too_late(threads.submit(gate, "slow"))

    repeats = [threads.submit(answer, "slow") for _ in range(3)]
    for repeat in repeats:
        assert_too_late(repeat)


def test_calls_beyond_the_late_ones_wait_for_a_thread():
    threads, gates = some_threads(limit_s=SHORT_S, max_late=2), [Gate() for _ in range(3)]
    for number, gate in enumerate(gates):
        assert_too_late(threads.submit(gate, f"slow {number}"))

    waiting = threads.submit(answer, "other")
    gates[0].released.set()  # its thread was replaced, so it takes no other call
    assert gates[0].ended.wait(FOREVER_S)
    assert not waiting.done()
    gates[2].released.set()
    assert waiting.result(FOREVER_S) == "grammar of other"
