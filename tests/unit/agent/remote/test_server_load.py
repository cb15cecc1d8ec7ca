"""Load of a server by its metrics, and iterations by the times of its tokens."""

import pytest

from services.agent.backends.remote.telemetry import ServerIterations, ServerLoad, Streams, load_of
from shared.contracts.telemetry import EngineIteration

METRICS = """
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 2.0
vllm:num_requests_waiting{engine="0",model_name="m"} 1.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.5
vllm:cache_config_info{block_size="16",cache_dtype="auto",engine="0",num_gpu_blocks="64"} 1.0
vllm:cache_config_info{block_size="16",cache_dtype="auto",engine="1",num_gpu_blocks="64"} 1.0
vllm:iteration_tokens_total_bucket{engine="0",le="1.0",model_name="m"} 90.0
vllm:iteration_tokens_total_count{engine="0",model_name="m"} 100.0
vllm:iteration_tokens_total_sum{engine="0",model_name="m"} 700.0
vllm:iteration_tokens_total_count{engine="1",model_name="m"} 50.0
vllm:iteration_tokens_total_sum{engine="1",model_name="m"} 300.0
vllm:request_success_total{engine="0",finished_reason="stop",model_name="m"} 7.0
"""


def test_load_of_all_engines_of_a_server() -> None:
    assert load_of(METRICS) == ServerLoad(
        running=5.0,
        waiting=1.0,
        kv_utilization=0.5,
        kv_capacity_tokens=2048,
        iterations=150.0,
        iteration_tokens=1000.0,
        num_engines=2,
    )


@pytest.mark.parametrize("text", ["", "process_cpu_seconds_total 3.0\n"])
def test_server_without_metrics_has_no_load(text: str) -> None:
    assert load_of(text) is None


def test_timestamps_of_samples_are_skipped() -> None:
    text = 'vllm:num_requests_running{engine="0"} 2.0 1712345678000\n'

    assert load_of(text) == ServerLoad(running=2.0)


@pytest.mark.parametrize("value", ["NaN", "+Inf", "", "many"])
def test_values_that_are_not_finite_numbers_are_skipped(value: str) -> None:
    text = (
        'vllm:num_requests_running{engine="0"} 2.0\n'
        f'vllm:num_requests_running{{engine="1"}} {value}\n'
    )

    assert load_of(text) == ServerLoad(running=2.0)


def test_unknown_capacity_is_zero() -> None:
    text = 'vllm:num_requests_running{engine="0"} 0.0\nvllm:cache_config_info{block_size="16"} 1\n'

    assert load_of(text) == ServerLoad()


class Times:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Times:
    return Times()


def test_first_token_times_the_prompt_and_later_ones_the_decodes(clock: Times) -> None:
    streams = Streams(clock)
    streams.submitted("a", 30)
    clock.now += 0.25
    streams.received("a", 1)
    for _ in range(2):
        clock.now += 0.02
        streams.received("a", 1)
    prefill, *decodes = streams.drain()

    assert (prefill.compute_tokens, prefill.num_decodes, prefill.prefill_pairs) == (30, 0, 450)
    assert prefill.duration_s == pytest.approx(0.25)
    assert [(each.compute_tokens, each.context_tokens) for each in decodes] == [(1, 31), (1, 32)]
    assert [each.duration_s for each in decodes] == pytest.approx([0.02, 0.02])
    assert streams.drain() == ()


def test_one_iteration_counts_once_for_all_its_answers(clock: Times) -> None:
    streams = Streams(clock)
    for name in "ab":
        streams.submitted(name, 10)
    for name in "ab":
        clock.now += 0.1
        streams.received(name, 1)
    streams.drain()
    for _ in range(3):
        clock.now += 0.05
        for name in "ab":
            streams.received(name, 1)

    # The first token of `b` came in another iteration than that of `a`.
    iterations = streams.drain()
    assert [each.num_decodes for each in iterations[-2:]] == [2, 2]
    assert len(iterations) <= 3


def seen_twice(
    before: ServerLoad, after: ServerLoad, *, prompt_tokens: float = 40.0
) -> tuple[EngineIteration, ...]:
    """Iterations between two looks that are half a second apart."""
    meter = ServerIterations()
    for now, load in ((10.0, before), (10.5, after)):
        meter.seen(load, now, context_tokens=100.0, prompt_tokens=prompt_tokens)
    return meter.drain()


def test_totals_of_a_busy_server_give_its_mean_iteration() -> None:
    before = ServerLoad(running=8, iterations=100, iteration_tokens=1000)
    after = ServerLoad(running=12, iterations=150, iteration_tokens=2500)
    (mean,) = seen_twice(before, after)

    assert mean.duration_s == pytest.approx(0.01)
    # 30 tokens in each iteration: 10 decodes, and 20 tokens of prompts.
    assert (mean.compute_tokens, mean.num_decodes, mean.context_tokens) == (30, 10, 1000)
    assert mean.prefill_pairs == pytest.approx(20 * 40 / 2)


def test_engines_side_by_side_have_longer_iterations() -> None:
    before = ServerLoad(running=8, num_engines=2)
    after = ServerLoad(running=8, iterations=100, iteration_tokens=400, num_engines=2)
    (mean,) = seen_twice(before, after)

    assert mean.duration_s == pytest.approx(0.01)
    assert mean.num_decodes == 4


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (ServerLoad(running=0), ServerLoad(running=4, iterations=50, iteration_tokens=200)),
        (ServerLoad(running=4), ServerLoad(running=0, iterations=50, iteration_tokens=200)),
        (ServerLoad(running=4), ServerLoad(running=4, iterations=2, iteration_tokens=8)),
        (ServerLoad(running=4, iterations=90), ServerLoad(running=4, iterations=5)),
    ],
    ids=["idle before", "idle after", "too few", "restarted"],
)
def test_pauses_do_not_count_as_iterations(before: ServerLoad, after: ServerLoad) -> None:
    assert seen_twice(before, after) == ()


def test_a_first_token_beside_other_requests_does_not_time_its_prompt(clock: Times) -> None:
    streams = Streams(clock)
    streams.submitted("a", 10)
    streams.submitted("b", 20)
    clock.now += 0.3
    streams.received("a", 1)
    clock.now += 0.3
    streams.received("b", 1)

    assert all(each.prefill_pairs == 0 for each in streams.drain())


def test_times_with_other_waiting_requests_do_not_count(clock: Times) -> None:
    streams = Streams(clock)
    for name in "abc":
        streams.submitted(name, 10)
    clock.now += 0.3
    streams.received("a", 1)
    clock.now += 0.3
    streams.received("a", 1)

    assert streams.drain() == ()
    assert streams.num_waiting == 2


def test_ended_answers_are_forgotten(clock: Times) -> None:
    streams = Streams(clock)
    streams.submitted("a", 10)
    streams.received("a", 1)
    tokens = streams.num_tokens
    streams.ended("a")

    streams.received("a", 1)
    assert (tokens, streams.num_tokens) == (11, 0)


def begun(clock: Times, *names: str) -> Streams:
    """Answers that began 0.1 s after they were sent, and have had a second token 0.05 s later."""
    streams = Streams(clock)
    for name in names:
        streams.submitted(name, 10)
    for wait_s in (0.1, 0.05):
        clock.now += wait_s
        for name in names:
            streams.received(name, 1)
    return streams


def test_request_has_waited_after_two_iterations(clock: Times) -> None:
    streams = begun(clock, "a")
    streams.submitted("b", 10)
    clock.now += 0.08
    too_early = streams.has_waited
    clock.now += 0.04

    assert (too_early, streams.has_waited) == (False, True)


def test_nothing_has_waited_before_the_time_of_an_iteration_is_known(clock: Times) -> None:
    streams = Streams(clock)
    streams.submitted("a", 10)
    clock.now += 60.0

    assert not streams.has_waited


def test_stream_is_stuck_when_it_begins_later_than_all_prompts_take(clock: Times) -> None:
    """Ten tokens took 0.1 s; three such prompts are expected to take 0.1 + 30 * 0.01 s."""
    streams = begun(clock, "a")
    for name in "bcd":
        streams.submitted(name, 10)
    clock.now += 0.55
    too_early = streams.is_stuck
    clock.now += 0.1

    assert (too_early, streams.is_stuck) == (False, True)


def test_answers_that_come_as_a_whole_are_not_stuck(clock: Times) -> None:
    streams = begun(clock, "a")
    streams.submitted("b", 10, streams=False)
    clock.now += 60.0

    assert not streams.is_stuck
    assert (streams.num_prefilling, streams.num_waiting) == (0, 1)


def test_most_answers_at_once_are_remembered(clock: Times) -> None:
    streams = begun(clock, "a", "b")
    streams.ended("a")

    assert (streams.num_begun, streams.most_begun) == (1, 2)


def test_time_of_an_iteration_is_not_forgotten_while_nothing_is_streamed(clock: Times) -> None:
    streams = begun(clock, "a")
    clock.now += 7200.0

    assert streams.longest_gap_s == pytest.approx(0.05)


def test_long_iteration_is_forgotten_while_shorter_ones_follow(clock: Times) -> None:
    streams = begun(clock, "a")
    clock.now += 2.0
    streams.received("a", 1)
    long_s = streams.longest_gap_s
    for _ in range(2000):
        clock.now += 0.05
        streams.received("a", 1)

    assert (long_s, streams.longest_gap_s) == (2.0, pytest.approx(0.05))


def test_whole_answers_count_as_running_until_they_take_much_longer(clock: Times) -> None:
    """One takes 0.1 s per token; the next ones wait before they begin."""
    streams = Streams(clock)
    streams.submitted("first", 10, streams=False)
    assert streams.num_whole == 1
    clock.now += 1.0
    streams.received("first", 10)
    streams.ended("first")
    for number in range(10):
        streams.submitted(f"{number}", 10, streams=False)
        clock.now += 9.0
        streams.received(f"{number}", 10)
        streams.ended(f"{number}")
    streams.submitted("last", 10, streams=False)

    assert streams.num_whole == 0
