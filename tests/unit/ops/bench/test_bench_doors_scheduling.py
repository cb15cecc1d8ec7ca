"""Order of work inside the simulated servers of `ops.bench doors`."""

import pytest

from ops.bench.doors_scheduling import (
    BLOCK_TOKENS,
    ServerLimits,
    ServerRun,
    ServerScheduler,
    Speed,
    answer_text,
)


def a_server(*, max_running: int = 8, budget: int = 512, num_blocks: int = 3750) -> ServerScheduler:
    limits = ServerLimits(max_running=max_running, budget=budget, num_blocks=num_blocks)
    return ServerScheduler(limits, Speed())


def words(number: int, name: str = "w") -> list[str]:
    return [f"{name}{each}" for each in range(number)]


def iterate(server: ServerScheduler, number: int = 1) -> list[ServerRun]:
    """Compute iterations; return the requests with a token in the last one."""
    with_token: list[ServerRun] = []
    for _ in range(number):
        assert server.begin() is not None
        with_token = server.end()
    return with_token


def finish(server: ServerScheduler) -> None:
    while server.begin() is not None:
        server.end()


def test_a_prompt_is_computed_in_chunks_beside_running_answers():
    server = a_server(budget=100)
    short = server.submit(words(20, "s"), 10, 0)
    assert iterate(server) == [short]
    long = server.submit(words(180, "l"), 10, 0)

    assert server.begin() == pytest.approx(0.040 + 99 * 0.00025 + 0.001)
    assert server.end() == [short]
    assert server.begin() == pytest.approx(0.040 + 81 * 0.00025 + 0.001)
    assert server.end() == [short, long]
    assert (long.generated, short.generated) == (1, 3)


def test_slow_motion_multiplies_the_duration_of_an_iteration():
    assert Speed(scale=3.0).duration_s(100, 8) == pytest.approx(3 * Speed().duration_s(100, 8))


def test_a_request_waits_until_one_of_the_running_is_over():
    server = a_server(max_running=2)
    first, second, third = (server.submit(words(10, name), 2, 0) for name in "abc")

    assert iterate(server) == [first, second]
    assert (server.num_running, server.num_waiting) == (2, 1)
    iterate(server)
    assert iterate(server) == [third]


def test_waiting_requests_run_by_priority_then_by_arrival():
    server = a_server(max_running=1)
    running = server.submit(words(10, "r"), 1, 2)
    server.begin()
    low, early, late = (
        server.submit(words(10, name), 1, priority)
        for name, priority in (("a", 2), ("b", 0), ("c", 0))
    )
    assert server.end() == [running]

    assert [iterate(server) for _ in range(3)] == [[early], [late], [low]]


def test_a_request_does_not_leave_the_waiting_queue_without_budget():
    server = a_server(budget=100)
    server.submit(words(300, "a"), 1, 0)
    server.submit(words(10, "b"), 1, 0)

    iterate(server)
    assert (server.num_running, server.num_waiting) == (1, 1)
    iterate(server, 2)
    assert server.num_waiting == 1
    iterate(server)
    assert (server.num_running, server.num_waiting) == (0, 0)


def test_blocks_of_an_earlier_prompt_are_not_computed_again():
    server = a_server()
    server.submit(words(100), 1, 0)
    finish(server)

    again = server.submit([*words(100), *words(50, "v")], 1, 0)
    server.begin()

    assert again.cached_tokens == 96
    assert server.prompt_tokens == 250
    assert server.cached_tokens == 96


def test_a_whole_cached_prompt_leaves_its_last_block_to_compute():
    server = a_server()
    for _ in range(2):
        run = server.submit(words(2 * BLOCK_TOKENS), 1, 0)
        finish(server)

    assert run.cached_tokens == BLOCK_TOKENS


def test_a_later_turn_finds_the_answer_of_the_turn_before():
    server = a_server()
    server.submit(words(20), 50, 0)
    finish(server)

    turn = server.submit([*words(20), *answer_text(50).split(), *words(30, "v")], 1, 0)
    server.begin()

    assert turn.cached_tokens == 64  # full blocks of 69 tokens with KV


def test_the_oldest_free_blocks_are_evicted_first():
    server = a_server(num_blocks=8)
    for name in "abc":
        server.submit(words(64, name), 1, 0)
        finish(server)

    newest = server.submit(words(64, "c"), 1, 0)
    finish(server)
    oldest = server.submit(words(64, "a"), 1, 0)
    finish(server)

    assert (newest.cached_tokens, oldest.cached_tokens) == (48, 0)


def test_only_blocks_of_running_requests_count_as_used_memory():
    server = a_server(num_blocks=10)
    run = server.submit(words(64), 1, 0)
    server.begin()
    assert server.memory_used == pytest.approx(0.1)  # a block that is not full yet
    server.end()

    assert run.is_over
    assert server.memory_used == 0.0


def test_a_prompt_waits_for_memory():
    server = a_server(num_blocks=10)
    server.submit(words(100, "a"), 2, 0)
    server.submit(words(100, "b"), 2, 0)

    iterate(server)
    assert (server.num_running, server.num_waiting) == (1, 1)
    iterate(server, 2)
    assert server.num_waiting == 0


def test_a_client_that_leaves_ends_its_request():
    server = a_server(max_running=1)
    running = server.submit(words(10, "a"), 100, 0)
    waiting = server.submit(words(10, "b"), 1, 0)
    last = server.submit(words(10, "c"), 1, 0)
    iterate(server)
    server.begin()
    server.abort(running)
    server.abort(waiting)

    assert server.end() == []
    assert (server.num_running, server.num_waiting) == (0, 1)
    assert iterate(server) == [last]
    assert server.begin() is None
    assert server.answer_tokens == 2


def test_totals_are_those_of_the_metrics_of_vllm():
    server = a_server()
    server.submit(words(30), 3, 0)
    finish(server)

    assert (server.iterations, server.iteration_tokens) == (3, 32)
    assert server.answer_tokens == 3
