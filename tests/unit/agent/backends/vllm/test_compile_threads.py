"""Compilations of grammars have a limit on their time."""

import threading
from collections.abc import Callable

import pytest

from services.agent.backends.vllm.core.compile_threads import CompileThreads

FOREVER_S = 60.0


def refuse() -> None:
    raise ValueError("not a grammar")


def test_results_and_errors_reach_the_caller():
    threads = CompileThreads(limit_s=FOREVER_S, num_threads=1)

    assert threads.submit(max, 2, 3).result(FOREVER_S) == 3
    with pytest.raises(ValueError, match="not a grammar"):
        threads.submit(refuse).result(FOREVER_S)
    assert threads.submit(max, 4, 5).result(FOREVER_S) == 5


@pytest.mark.parametrize("late", [lambda: None, refuse], ids=["late result", "late error"])
def test_a_call_over_the_limit_fails_and_other_calls_run(late: Callable[[], None]):
    threads = CompileThreads(limit_s=0.01, num_threads=2)
    released, ended = threading.Event(), threading.Event()

    def slow() -> None:
        released.wait(FOREVER_S)
        ended.set()
        late()

    first = threads.submit(slow)
    with pytest.raises(TimeoutError, match=r"longer than 0.01 s to compile"):
        first.result(FOREVER_S)
    assert threads.submit(max, 2, 3).result(FOREVER_S) == 3
    released.set()
    assert ended.wait(FOREVER_S)
    assert isinstance(first.exception(), TimeoutError)
