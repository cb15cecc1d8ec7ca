"""What to do with a run that has to make room: evict it, or swap it out (QLM §3, insight 2)."""

from dataclasses import dataclass
from enum import Enum

from shared.contracts.base import Seconds
from shared.contracts.estimates import LatencyCoefficients

CHUNK_TOKENS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class KvCosts:
    """What losing and keeping KV costs, of one (model, engine)."""

    latency: LatencyCoefficients | None
    """Of an iteration, as measured; none when nothing was."""
    chunk_tokens: int = CHUNK_TOKENS
    """Prefill tokens of one iteration."""
    bytes_per_token: int
    """KV of one token, in host memory as on the device."""
    transfer_bytes_per_s: float
    """Host memory to the device, as measured or the prior."""
    transfer_constant_s: Seconds = 0.0
    """Of one restore, however short."""
    host_checkpoints: bool
    """Whether the engine keeps KV in host memory at all."""


class Choice(Enum):
    """What becomes of the run."""

    EVICT = "evict"
    SWAP_OUT = "swap_out"


class Why(Enum):
    """What decided it: a sentence that the verdict's figures complete."""

    NO_CHECKPOINTS = "the engine keeps no KV in host memory; computing again {recompute_s:.3g} s"
    UNMEASURED = "nobody has measured what computing again costs; bringing back {transfer_s:.3g} s"
    HOST_FULL = (
        "{host_bytes} bytes of KV do not fit into host memory; "
        "computing again {recompute_s:.3g} s, bringing back {transfer_s:.3g} s"
    )
    RECOMPUTE = "computing again {recompute_s:.3g} s, bringing back {transfer_s:.3g} s"
    TRANSFER = "bringing back {transfer_s:.3g} s, computing again {recompute_s:.3g} s"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A choice with its figures."""

    choice: Choice
    why: Why
    recompute_s: Seconds
    transfer_s: Seconds
    host_bytes: int

    @property
    def text(self) -> str:
        return self.why.value.format(
            host_bytes=self.host_bytes, recompute_s=self.recompute_s, transfer_s=self.transfer_s
        )


def recompute_s(costs: KvCosts, context_tokens: int) -> Seconds:
    """
    What one prefill of the whole context takes from others; 0 when nothing was measured.

    Decided: as if in full chunks, and without rounding up to them. The iteration that gives the
    next token comes either way, so that a short context saves no constant; the sum is convex
    and there is one crossover.
    """
    if costs.latency is None:
        return 0.0
    per_token_s, per_square_s = _recompute_terms(costs, costs.latency)
    return per_token_s * context_tokens + per_square_s * context_tokens**2


def transfer_s(costs: KvCosts, context_tokens: int) -> Seconds:
    """
    Bringing the context's KV back from host memory.

    The way out costs nothing here: checkpoints are written while the request runs (QLM §5 hides
    the copy behind the computation, ConServe §4.4 makes it incremental).
    """
    num_bytes = costs.bytes_per_token * context_tokens
    return costs.transfer_constant_s + num_bytes / costs.transfer_bytes_per_s


def evict_or_swap(
    costs: KvCosts, *, context_tokens: int, host_free_bytes: int, min_saving: float = 0.1
) -> Verdict:
    """
    The cheaper way to make room.

    Args:
        costs: Of the run's model on this engine.
        context_tokens: Whose KV the run has.
        host_free_bytes: Host memory that is left for KV.
        min_saving: Part of the recomputation that bringing back must save: host memory is not
            spent on a negligible gain (QLM fig. 4, Vicuna-13B).

    Swapping out never becomes eviction as the transfer gets faster or host memory larger, nor,
    while there is host memory, as the context grows.
    """
    again_s = recompute_s(costs, context_tokens)
    back_s = transfer_s(costs, context_tokens)
    host_bytes = costs.bytes_per_token * context_tokens

    def verdict(choice: Choice, why: Why) -> Verdict:
        return Verdict(
            choice=choice, why=why, recompute_s=again_s, transfer_s=back_s, host_bytes=host_bytes
        )

    if not costs.host_checkpoints:
        return verdict(Choice.EVICT, Why.NO_CHECKPOINTS)
    if costs.latency is None:
        return verdict(Choice.EVICT, Why.UNMEASURED)
    if host_bytes > host_free_bytes:
        return verdict(Choice.EVICT, Why.HOST_FULL)
    if back_s < (1 - min_saving) * again_s:
        return verdict(Choice.SWAP_OUT, Why.TRANSFER)
    return verdict(Choice.EVICT, Why.RECOMPUTE)


def _recompute_terms(costs: KvCosts, latency: LatencyCoefficients) -> tuple[float, float]:
    """Seconds per token and per token squared, in chunks of the costs' size."""
    chunk = costs.chunk_tokens
    per_token_s = latency.constant_s / chunk + latency.linear_s + latency.attention_s * chunk
    per_square_s = (latency.cross_s + latency.context_s / chunk) / 2
    return per_token_s, per_square_s
