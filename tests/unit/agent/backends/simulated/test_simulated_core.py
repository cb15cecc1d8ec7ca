"""The simulated engine core: vLLM's scheduling and memory, without time."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.agent.backends.simulated.schedule import TokenOutput
from shared.contracts.base import RequestId
from shared.contracts.estimates import LatencyCoefficients
from shared.contracts.requests import FinishReason
from solver.prediction.latency.latency_model import OnlineLatencyFit, predict_s
from tests.unit.agent.backends.simulated_cores import ENTRY, alone, core_of, drain, request


def test_prompt_is_computed_in_chunks_of_the_budget() -> None:
    core = core_of(token_budget=32)
    core.add(request("a", length=100, max_tokens=3))
    _, iterations = drain(core)

    assert [it.compute_tokens for it in iterations] == [32, 32, 32, 4, 1, 1]
    assert [it.context_tokens for it in iterations] == [0, 32, 64, 96, 100, 101]
    assert [it.num_decodes for it in iterations] == [0, 0, 0, 0, 1, 1]
    assert [it.prefill_pairs for it in iterations] == [512, 1536, 2560, 392, 0, 0]


def test_a_pooled_request_ends_with_its_prefill_and_has_no_token() -> None:
    core = core_of(token_budget=32)
    core.add(request("a", length=70, max_tokens=1, input_lengths=(30, 40)))
    core.add(request("b", length=16, max_tokens=4))
    outputs = []
    while core.num_running + core.num_waiting:
        outputs += core.iterate(0.0).outputs

    assert outputs[0] == TokenOutput(RequestId("a"), (), FinishReason.STOP, 0)
    assert [output.request_id for output in outputs[1:]] == ["b"] * 4
    assert core.kv_utilization == 0


def test_decodes_come_before_prefill_chunks() -> None:
    core = core_of(token_budget=32)
    core.add(request("a", length=16, max_tokens=4))
    core.iterate(0.0)
    core.add(request("b", length=100))
    second = core.iterate(0.0)

    assert [output.request_id for output in second.outputs] == ["a"]
    assert second.iteration is not None
    assert (second.iteration.compute_tokens, second.iteration.num_decodes) == (32, 1)


def test_prefill_does_not_attend_to_the_context_of_decodes() -> None:
    latency = LatencyCoefficients(
        constant_s=0.005, linear_s=4e-5, attention_s=1e-8, cross_s=1e-8, context_s=2e-7
    )
    core = core_of(token_budget=256, latency=latency)
    core.add(request("a", length=100, max_tokens=4))
    core.iterate(0.0)
    core.add(request("b", length=50))
    both = core.iterate(0.0).iteration

    # The iteration has a decode with 100 tokens of context and 50 new prompt tokens.
    assert both is not None
    assert (both.compute_tokens, both.context_tokens, both.prefill_pairs) == (51, 100, 1250)
    exact_s = 0.005 + 4e-5 * 51 + (1e-8 - 1e-8 / 2) * 51**2 + 1e-8 * 1250 + 2e-7 * 100
    assert both.duration_s == pytest.approx(exact_s)


def test_reported_iterations_suffice_to_learn_prefill_times() -> None:
    """The load has prompts of all lengths in chunks of up to 128 tokens, and decodes."""
    true = LatencyCoefficients(
        constant_s=0.005, linear_s=4e-5, attention_s=2e-8, cross_s=4e-8, context_s=2e-7
    )
    core = core_of(token_budget=128, max_running=16, kv_capacity_tokens=16384, latency=true)
    for number in range(40):
        core.add(request(f"{number}", length=10 + 97 * number % 900, max_tokens=5 + number))
    _, iterations = drain(core)
    reported, silent = OnlineLatencyFit(), OnlineLatencyFit()
    for each in iterations:
        reported.observe(each.timed(), each.prefill_pairs)
        silent.observe(each.timed())
    exact_s = predict_s(true, compute_tokens=128, context_tokens=4000)
    found, less = reported.fit(), silent.fit()

    assert found is not None
    assert less is not None
    assert predict_s(found, compute_tokens=128, context_tokens=4000) == pytest.approx(
        exact_s, rel=1e-3
    )
    assert predict_s(less, compute_tokens=128, context_tokens=4000) < 0.9 * exact_s


def test_iteration_time_follows_the_latency_profile() -> None:
    core = core_of()
    core.add(request("a", length=100))
    first = core.iterate(0.0)

    assert first.duration_s == 0.005 + 4e-5 * 100 + 1e-8 * 100**2


def test_running_requests_stay_within_the_limit() -> None:
    core = core_of(max_running=2)
    for name in "abc":
        core.add(request(name))
    core.iterate(0.0)

    assert (core.num_running, core.num_waiting) == (2, 1)


def test_prompt_that_does_not_fit_blocks_later_prompts() -> None:
    core = core_of(kv_capacity_tokens=1024, token_budget=2048)
    for name, length in (("a", 600), ("b", 600), ("c", 16)):
        core.add(request(name, length=length))
    core.iterate(0.0)

    assert (core.num_running, core.num_waiting) == (1, 2)


def test_last_request_is_preempted_when_memory_runs_out() -> None:
    core = core_of(kv_capacity_tokens=1024)
    requests = [request(name, length=320, max_tokens=100) for name in "abc"]
    for each in requests:
        core.add(each)
    answers, iterations = drain(core)

    assert answers == {each.request_id: alone(each) for each in requests}
    assert sum(it.compute_tokens for it in iterations) > 3 * (320 + 99)
    assert core.kv_utilization == 0.0


def test_shared_prefix_is_computed_once() -> None:
    core = core_of()
    core.add(request("a", length=100))
    drain(core)
    core.add(request("a", length=100))
    first = core.iterate(0.0)

    assert [output.cached_tokens for output in first.outputs] == [96]
    assert first.iteration is not None
    assert first.iteration.compute_tokens == 4


def test_aborted_request_leaves_no_state() -> None:
    core = core_of()
    core.add(request("a"))
    core.iterate(0.0)
    core.add(request("b"))
    core.abort(RequestId("a"))
    core.abort(RequestId("b"))

    assert (core.num_running, core.num_waiting, core.kv_utilization) == (0, 0, 0.0)


@given(
    st.lists(
        st.tuples(st.integers(1, 500), st.integers(1, 60), st.integers(0, 30)),
        min_size=1,
        max_size=12,
    ),
    st.sampled_from([16, 64, 512]),
    st.integers(1, 5),
)
def test_answers_do_not_depend_on_the_batch(
    shapes: list[tuple[int, int, int]], token_budget: int, max_running: int
) -> None:
    requests = [
        request(f"r{n}", length, max_tokens, sampling={"min_tokens": least, "ignore_eos": False})
        for n, (length, max_tokens, least) in enumerate(shapes)
    ]
    core = core_of(
        kv_capacity_tokens=1024,
        token_budget=token_budget,
        max_running=max_running,
        mean_output_tokens=20,
    )
    for each in requests:
        core.add(each)
    answers, iterations = drain(core)

    lone = core_of(mean_output_tokens=20)
    for each in requests:
        lone.add(each)
        assert answers[each.request_id] == drain(lone)[0][each.request_id]
    assert all(it.compute_tokens <= token_budget for it in iterations)
    assert core.kv_utilization == 0.0


def test_answers_end_with_an_end_token() -> None:
    core = core_of(mean_output_tokens=10)
    core.add(request("a", max_tokens=500, sampling={"ignore_eos": False}))
    outputs: list[TokenOutput] = []
    while core.num_running + core.num_waiting:
        outputs += core.iterate(0.0).outputs

    assert outputs[-1].finish_reason is FinishReason.STOP
    assert outputs[-1].token_ids[0] in ENTRY.eos_token_ids
    assert not {each.token_ids[0] for each in outputs[:-1]} & set(ENTRY.eos_token_ids)


def test_no_token_is_computed_from_the_end_of_a_run_on():
    core = core_of()
    core.add(request("ends", expires_at=10.0))
    core.add(request("stays"))
    core.add(request("late", first_token_by=10.0))
    core.add(request("begun", first_token_by=10.0))
    core.abort(request("late").request_id)
    first = core.iterate(9.0)
    assert {output.request_id for output in first.outputs} == {"ends", "stays", "begun"}

    core.add(request("late", first_token_by=10.0))
    second = core.iterate(10.0)
    assert {output.request_id for output in second.outputs} == {"stays", "begun"}
    assert (core.num_running, core.num_waiting) == (2, 0)


def test_run_that_has_begun_before_its_end_gets_no_output_of_a_later_iteration():
    """An iteration that began before the end may finish after it."""
    core = core_of()
    core.add(request("ends", expires_at=10.0))
    begun = core.begin(9.9)
    assert len(core.finish(begun).outputs) == 1
    assert core.iterate(10.0).outputs == ()
    assert core.memory.pool.utilization == 0.0
