"""Evict or swap out: QLM's insight 2 as a crossover, and its monotonicity."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.contracts.estimates import LatencyCoefficients
from solver.planning.lso.evict_or_swap import (
    Choice,
    KvCosts,
    VerdictReason,
    evict_or_swap,
    recompute_s,
    transfer_s,
)

PLENTY = 1 << 60
SLOW = LatencyCoefficients(constant_s=0.01, linear_s=1e-4, cross_s=1e-8, context_s=1e-6)
COSTS = KvCosts(
    latency=SLOW,
    bytes_per_token=100_000,
    transfer_bytes_per_s=2e9,
    transfer_constant_s=0.01,
    host_checkpoints=True,
)

contexts = st.integers(0, 200_000)
seconds = st.floats(0, 1e-3)
latencies = st.builds(
    LatencyCoefficients,
    constant_s=st.floats(0, 0.1),
    linear_s=seconds,
    attention_s=st.floats(0, 1e-7),
    cross_s=st.floats(0, 1e-7),
    context_s=st.floats(0, 1e-5),
)
costs = st.builds(
    KvCosts,
    latency=latencies,
    bytes_per_token=st.integers(1, 10_000_000),
    transfer_bytes_per_s=st.floats(1e6, 1e12),
    transfer_constant_s=st.floats(0, 1),
    host_checkpoints=st.just(value=True),
)


def swaps(costs: KvCosts, context_tokens: int, host_free_bytes: int = PLENTY) -> bool:
    verdict = evict_or_swap(costs, context_tokens=context_tokens, host_free_bytes=host_free_bytes)
    return verdict.choice is Choice.SWAP_OUT


@pytest.mark.parametrize(
    ("changes", "host_free_bytes", "choice", "why"),
    [
        ({}, PLENTY, Choice.SWAP_OUT, VerdictReason.TRANSFER),
        ({"transfer_bytes_per_s": 1e8}, PLENTY, Choice.EVICT, VerdictReason.RECOMPUTE),
        ({}, 100_000 * 4096 - 1, Choice.EVICT, VerdictReason.HOST_FULL),
        ({"host_checkpoints": False}, PLENTY, Choice.EVICT, VerdictReason.NO_CHECKPOINTS),
        ({"latency": None}, PLENTY, Choice.EVICT, VerdictReason.UNMEASURED),
    ],
    ids=lambda value: getattr(value, "value", None),
)
def test_the_cheaper_action_is_chosen_and_explained(
    changes: dict[str, object], host_free_bytes: int, choice: Choice, why: VerdictReason
):
    verdict = evict_or_swap(
        replace(COSTS, **changes), context_tokens=4096, host_free_bytes=host_free_bytes
    )

    assert (verdict.choice, verdict.why) == (choice, why)
    assert verdict.text


def test_host_memory_is_not_spent_on_a_negligible_gain():
    """QLM fig. 4: Vicuna-13B gains almost nothing by swap-out and needs 8.4 times the memory."""
    again_s = recompute_s(COSTS, 4096)
    hardly = replace(
        COSTS, transfer_constant_s=0.0, transfer_bytes_per_s=4096 * 100_000 / (0.95 * again_s)
    )

    assert transfer_s(hardly, 4096) < again_s
    assert not swaps(hardly, 4096)


def test_a_prefill_costs_as_much_as_its_chunks():
    """Each chunk of 512 tokens costs a constant, its tokens, and its context."""
    per_chunk_s = SLOW.constant_s + 512 * SLOW.linear_s
    behind_s = sum(SLOW.context_s * 512 * n + SLOW.cross_s * 512 * 512 * n for n in range(32))

    assert recompute_s(COSTS, 32 * 512) == pytest.approx(32 * per_chunk_s + behind_s, rel=0.03)


@given(costs, contexts, contexts)
def test_a_longer_context_never_turns_a_swap_out_into_an_eviction(
    costs: KvCosts, context: int, more: int
):
    assert swaps(costs, context) <= swaps(costs, context + more)


@given(costs, contexts, st.floats(1, 100))
def test_a_faster_transfer_never_turns_a_swap_out_into_an_eviction(
    costs: KvCosts, context: int, factor: float
):
    faster = replace(costs, transfer_bytes_per_s=costs.transfer_bytes_per_s * factor)

    assert swaps(costs, context) <= swaps(faster, context)


@given(costs, contexts, st.integers(0, 1 << 40), st.integers(0, 1 << 40))
def test_more_host_memory_never_turns_a_swap_out_into_an_eviction(
    costs: KvCosts, context: int, free_bytes: int, more: int
):
    assert swaps(costs, context, free_bytes) <= swaps(costs, context, free_bytes + more)
