"""Dynamic chunking: duration and size of the next iteration (QoServe §3.3)."""

from math import inf

from shared.contracts.base import Seconds, UnixTime
from shared.contracts.qos import QosClass
from solver.scheduling.engine.admission import PlannedBatch, admissible_tokens
from solver.scheduling.engine.entry import Entry
from solver.scheduling.engine.latency import LatencyTable
from solver.scheduling.engine.options import SchedulingOptions

TILE_TOKENS = 128
"""
Number of tokens in a tile of the engine's kernels: iteration time rises in a step just above each
multiple of this number.
"""


def decode_slack_s(entry: Entry, output_tokens: int, now: UnixTime) -> Seconds:
    """
    Longest next iteration that one decode tolerates; infinite if it sets no limit.

    Source: QoServe §3.3: deadline of the next token (eq. 2) minus *now*.
    Decided: if the first token was in time, a late token gets one TBT: the request catches up
    without stopping all prefills. If the first token was late, the request has missed its SLO and
    sets no limit.
    Decided: a decode without a TBT target divides its time left by its expected remaining tokens.
    After its deadline it sets no limit; otherwise late batch work would make all chunks small. A
    relegated request sets no limit.
    """
    if entry.qos_class is QosClass.INTERACTIVE:
        if entry.tbt_s == inf:
            return inf
        if entry.first_token_late is None:
            entry.first_token_late = output_tokens <= 1 and now > entry.deadline_at
        if entry.first_token_late:
            return inf
        slack_s = entry.deadline_at + output_tokens * entry.tbt_s - now
        return slack_s if slack_s > 0 else entry.tbt_s
    left_s = entry.deadline_at - now
    if left_s <= 0 or left_s == inf or entry.rank:
        return inf
    return left_s / max(1.0, entry.decode_tokens - output_tokens)


def steady_limit_s(entry: Entry, output_tokens: int, now: UnixTime) -> Seconds:
    """
    Longest iteration that one decode tolerates permanently: as `decode_slack_s`, but always the TBT
    target for an interactive decode.

    Source: ConServe §4.2, algorithm 1: one TBT target for every iteration.
    Decided: the limit also applies after a late first token, because later gaps can still be met.
    """
    if entry.qos_class is QosClass.INTERACTIVE:
        return entry.tbt_s
    return decode_slack_s(entry, output_tokens, now)


def budget_tokens(
    options: SchedulingOptions,
    latency: LatencyTable,
    decodes: PlannedBatch,
    *,
    before_tokens: int,
    limit_s: Seconds,
    most_tokens: int,
) -> int:
    """
    Prefill tokens of the next iteration according to *options*; other parameters as in
    `chunk_tokens`.
    """
    if not options.dynamic_chunking:
        return max(0, min(options.fixed_chunk_tokens, most_tokens) - decodes.tokens)
    return chunk_tokens(
        latency,
        decodes,
        before_tokens=before_tokens,
        limit_s=limit_s,
        max_tokens=min(options.max_chunk_tokens, most_tokens),
        curve=options.curve_chunking,
    )


def chunk_tokens(
    latency: LatencyTable,
    decodes: PlannedBatch,
    *,
    before_tokens: int,
    limit_s: Seconds,
    max_tokens: int,
    curve: bool,
) -> int:
    """
    Prefill tokens of the next iteration.

    Args:
        decodes: Work of the iteration without prefills.
        before_tokens: Computed tokens of the request that is prefilled first.
        limit_s: Least slack of all decodes; infinite when no decode sets a limit.
        max_tokens: Maximum tokens of the iteration, decodes included.
        curve: Choose the multiple of `TILE_TOKENS` (decodes included) with the most prefill tokens
            per second, instead of the largest chunk.

    Returns:
        Prefill tokens, 0 if the slack allows none.

    Source: QoServe §3.3, algorithm 1 lines 5-7.
    Differs: a measured table is searched instead of a random forest.
    Decided: a chunk includes the decodes (Sarathi-Serve); without a limit it has the maximum size.
    """
    most = max_tokens - decodes.tokens
    if limit_s != inf:
        most = admissible_tokens(
            latency, decodes, before_tokens=before_tokens, wanted_tokens=most, limit_s=limit_s
        )
    if not curve or most + decodes.tokens <= TILE_TOKENS or most <= 0:
        return max(0, most)
    fixed_s = latency.pair_s * decodes.pairs
    fixed_s += latency.context_s * (decodes.context_tokens + before_tokens)
    tokens_s, pair_s, base = latency.tokens_s, latency.pair_s, decodes.tokens
    best, best_rate = most, 0.0
    first = (base // TILE_TOKENS + 1) * TILE_TOKENS
    for total in range(first, base + most + 1, TILE_TOKENS):
        count = total - base
        duration_s = fixed_s + tokens_s[total] + pair_s * count * (before_tokens + count / 2)
        rate = count / duration_s if duration_s > 0 else inf
        if rate > best_rate:
            best, best_rate = count, rate
    return best
