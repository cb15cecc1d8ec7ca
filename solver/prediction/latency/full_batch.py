"""Throughput of an instance with a full batch, by its latency model."""

from typing import NamedTuple

from shared.contracts.base import Seconds
from shared.contracts.estimates import LatencyCoefficients
from solver.prediction.latency.latency_model import predict_batch_s

LARGEST_ITERATION_TOKENS = 2048
"""Maximum tokens of the assumed iterations, prefills and decodes together."""


class FullBatch(NamedTuple):
    """Full-batch throughput of one instance and one mix of requests."""

    token_rate_per_s: float | None
    """
    Prompt and output tokens per second (QLM's Theta); None if the model's iterations take no time.
    """
    decode_s_per_token: Seconds
    """Time of a token of an answer, beside the prefills that keep the batch full."""


def batch_size(max_running: int, kv_capacity_tokens: float, tokens: float) -> float:
    """
    Number of requests of *tokens* each that an instance computes at once while other requests wait.
    """
    return min(float(max_running), max(1.0, kv_capacity_tokens / tokens))


def full_batch(
    latency: LatencyCoefficients, *, batch: float, prompt: float, output: float
) -> FullBatch:
    """
    Throughput and pace of *batch* concurrent requests; each finished request is replaced.

    Args:
        batch: See `batch_size`.
        prompt: Mean tokens of a prompt; a token attends to half of its prompt, on average.
        output: Mean tokens of an answer.

    Source: QLM §6: profiled with a full batch.
    Differs: the throughput is computed from the latency model. The recent rate of an instance with
    little work is lower, and a plan would treat the instance as slow.
    """
    context_tokens = batch * (prompt + output / 2)
    # Each decode gets its token, and prompts get enough tokens to keep the batch full.
    tokens = min(batch * (prompt + output) / max(1.0, output), LARGEST_ITERATION_TOKENS)
    prefilled = max(0.0, tokens - batch)
    duration_s = predict_batch_s(
        latency,
        compute_tokens=batch + prefilled,
        context_tokens=context_tokens,
        prefill_pairs=prefilled * prompt / 2,
    )
    return FullBatch(tokens / duration_s if duration_s > 0 else None, duration_s)
