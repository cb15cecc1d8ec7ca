"""KV checkpoints in the simulated engine core: restored blocks, and the time of copies."""

from shared.contracts.base import RequestId
from tests.unit.agent.backends.simulated_cores import core_of, drain, request


def test_preempted_request_gets_its_kv_from_host_memory() -> None:
    """Two requests grow to 13 blocks each in memory for 16 blocks, without prefix caching."""
    fields = {"kv_capacity_tokens": 256, "token_budget": 256}
    answers = {}
    computed = {}
    for checkpointed in (False, True):
        core = core_of(**fields)
        core.memory.pool.cached_prefix = lambda _hashes: []  # type: ignore[method-assign]  # off
        for name in ("a", "b"):
            core.add(request(name, length=100, max_tokens=100, checkpointed=checkpointed))
        answers[checkpointed], iterations = drain(core)
        computed[checkpointed] = sum(it.compute_tokens for it in iterations)
        assert core.totals.preempted > 0
    again = computed[True] - 2 * 199

    assert answers[True] == answers[False]
    assert core.memory.host.totals.restored_blocks > 0
    # Each preemption recomputes at most 15 tokens, an incomplete block.
    assert again <= core.totals.preempted * 15
    assert computed[False] > computed[True]


def test_copies_take_the_time_given_by_settings() -> None:
    """Copies of an iteration's six full blocks delay the next iteration."""
    copy_s = 16 * 0.001
    core = core_of(host_copy_s_per_token=0.001)
    plain = core_of(host_copy_s_per_token=0.0)
    durations: list[list[float]] = []
    for engine in (core, plain):
        engine.add(request("a", length=100, max_tokens=2, checkpointed=True))
        durations.append([engine.iterate(0.0).duration_s for _ in range(2)])
    totals = core.memory.host.totals

    first, second = (slow - fast for slow, fast in zip(*durations, strict=True))
    assert (first, round(second, 9)) == (0.0, round(6 * copy_s, 9))
    assert totals.saved_blocks == 6
    assert totals.save_s == 6 * copy_s


def test_restoring_an_aborted_request_delays_its_iteration() -> None:
    core = core_of(host_copy_s_per_token=0.001)
    plain = core_of(host_copy_s_per_token=0.0)
    results = []
    for engine in (core, plain):
        engine.add(request("a", length=100, max_tokens=9, checkpointed=True))
        engine.iterate(0.0)
        engine.abort(RequestId("a"))
        engine.memory.pool.forget_unused()
        engine.add(request("b", length=20, max_tokens=1))
        drain(engine)
        engine.add(request("a", length=100, max_tokens=4))
        results.append(engine.iterate(0.0))
    slow, fast = results

    assert slow.outputs[0].cached_tokens == 96
    assert round(slow.duration_s - fast.duration_s, 9) == round(6 * 16 * 0.001, 9)
    assert core.memory.host.totals.restored_blocks == 6


def test_finished_request_leaves_no_copies() -> None:
    core = core_of()
    core.add(request("a", length=100, max_tokens=9, checkpointed=True))
    core.iterate(0.0)
    assert core.memory.host.used_bytes > 0
    drain(core)

    assert core.memory.host.used_bytes == 0
