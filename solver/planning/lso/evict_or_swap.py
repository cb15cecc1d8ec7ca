"""Choice between eviction and swap-out of a run that must make room (QLM §3, insight 2)."""

from dataclasses import dataclass
from enum import Enum

from shared.contracts.base import Seconds
from shared.contracts.estimates import LatencyCoefficients

CHUNK_TOKENS = 512
"""Assumed maximum of prefill tokens in one iteration, if the engine's own is unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KvCosts:
    """Coefficients of the costs of dropping and of keeping KV, for one (model, engine)."""

    latency: LatencyCoefficients | None
    """
    Measured latency coefficients of the engine's iterations; none before the first measurement.
    """
    chunk_tokens: int = CHUNK_TOKENS
    """Maximum number of prefill tokens in one iteration."""
    bytes_per_token: int
    """KV size of one token in bytes, the same in host memory and on the device."""
    transfer_bytes_per_s: float
    """Bandwidth from host memory to the device: measured, or a prior before any measurement."""
    transfer_constant_s: Seconds = 0.0
    """Constant part of the duration of restoring KV from host memory."""
    host_checkpoints: bool
    """True if the engine keeps KV in host memory."""


class Choice(Enum):
    """The two ways in which a run makes room: eviction and swap-out."""

    EVICT = "evict"
    SWAP_OUT = "swap_out"


class VerdictReason(Enum):
    """Reason for evicting or swapping out a run, as a sentence with placeholders for figures."""

    NO_CHECKPOINTS = "the engine keeps no KV in host memory; recomputing costs {recompute_s:.3g} s"
    UNMEASURED = "the cost of recomputing is not measured; restoring costs {transfer_s:.3g} s"
    HOST_FULL = (
        "{host_bytes} bytes of KV do not fit into host memory; recomputing costs "
        "{recompute_s:.3g} s, restoring costs {transfer_s:.3g} s"
    )
    RECOMPUTE = "recomputing costs {recompute_s:.3g} s, restoring costs {transfer_s:.3g} s"
    TRANSFER = "restoring costs {transfer_s:.3g} s, recomputing costs {recompute_s:.3g} s"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Choice between eviction and swap-out of a run, with its figures."""

    choice: Choice
    why: VerdictReason
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
    Time of one prefill of the whole context, which delays other requests; 0 if nothing was
    measured.

    Decided: the number of chunks of a context is not rounded up. The iteration that generates the
    next token runs in either case, so a partial chunk adds no iteration. The cost is convex in the
    context, so there is one crossover between eviction and swap-out.
    """
    if costs.latency is None:
        return 0.0
    per_token_s, per_square_s = _recompute_terms(costs, costs.latency)
    return per_token_s * context_tokens + per_square_s * context_tokens**2


def transfer_s(costs: KvCosts, context_tokens: int) -> Seconds:
    """
    Time to restore the KV of a context from host memory.

    Copying to the host costs nothing here: checkpoints are written while the request runs (QLM §5
    hides the copy behind the computation, ConServe §4.4 makes it incremental).
    """
    num_bytes = costs.bytes_per_token * context_tokens
    return costs.transfer_constant_s + num_bytes / costs.transfer_bytes_per_s


def evict_or_swap(
    costs: KvCosts, *, context_tokens: int, host_free_bytes: int, min_saving: float = 0.1
) -> Verdict:
    """
    The cheaper way in which a run makes room: eviction or swap-out.

    Args:
        context_tokens: Tokens of the run that have KV.
        host_free_bytes: Host memory that is left for KV.
        min_saving: Share of the recomputation that a restore must save: host memory is not
            spent on a negligible gain (QLM fig. 4, Vicuna-13B).

    A faster transfer or more host memory never turns a swap-out into an eviction. A longer context
    turns a swap-out into an eviction only if the KV no longer fits into host memory.
    """
    again_s = recompute_s(costs, context_tokens)
    back_s = transfer_s(costs, context_tokens)
    host_bytes = costs.bytes_per_token * context_tokens

    def verdict(choice: Choice, why: VerdictReason) -> Verdict:
        return Verdict(
            choice=choice, why=why, recompute_s=again_s, transfer_s=back_s, host_bytes=host_bytes
        )

    if not costs.host_checkpoints:
        return verdict(Choice.EVICT, VerdictReason.NO_CHECKPOINTS)
    if costs.latency is None:
        return verdict(Choice.EVICT, VerdictReason.UNMEASURED)
    if host_bytes > host_free_bytes:
        return verdict(Choice.EVICT, VerdictReason.HOST_FULL)
    if back_s < (1 - min_saving) * again_s:
        return verdict(Choice.SWAP_OUT, VerdictReason.TRANSFER)
    return verdict(Choice.EVICT, VerdictReason.RECOMPUTE)


def _recompute_terms(costs: KvCosts, latency: LatencyCoefficients) -> tuple[float, float]:
    """
    Cost of recomputing a context: seconds per token and per token squared, in chunks of
    `costs.chunk_tokens`.
    """
    chunk = costs.chunk_tokens
    per_token_s = latency.constant_s / chunk + latency.linear_s + latency.attention_s * chunk
    per_square_s = (latency.cross_s + latency.context_s / chunk) / 2
    return per_token_s, per_square_s
