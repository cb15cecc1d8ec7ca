"""
The running iteration and the demand to preempt it, in memory that one engine's processes share.

The engine core publishes the iteration that it computes. The agent's front demands that the
best-effort part of one iteration be dropped. At each safepoint the worker checks whether the demand
names the current iteration; a late or repeated demand therefore affects no other iteration. No
process waits for another.

All times are times of `time.monotonic`, which is common to all processes of a host.
"""

import time
from collections.abc import Container
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

import numpy as np

from services.agent.backends.totals import SchedulingTotals
from services.agent.backends.vllm.shared.shared_file import SharedFile, named
from shared.contracts.base import Seconds
from shared.contracts.estimates import LatencyCoefficients
from solver.scheduling.engine.layer_preemption import RunningIteration, preempts

_LAYOUT = np.dtype(
    [
        ("shown", "u8"),
        ("begun", "u8"),
        (
            "iteration",
            [
                ("began_at", "f8"),
                ("predicted_s", "f8"),
                ("decodes_s", "f8"),
                ("online_tokens", "u8"),
                ("offline_tokens", "u8"),
            ],
        ),
        (
            "coefficients",
            [
                ("constant_s", "f8"),
                ("linear_s", "f8"),
                ("attention_s", "f8"),
                ("cross_s", "f8"),
                ("context_s", "f8"),
            ],
        ),
        ("target", "u8"),
        ("raised_at", "f8"),
        (
            "wish",
            [
                ("announced_at", "f8"),
                ("demand", "u8"),
                ("deadline_at", "f8"),
                ("online_s", "f8"),
                ("prefill_s", "f8"),
            ],
        ),
        ("cut", "u8"),
        ("cut_at", "f8"),
        ("totals", [("layer_preemptions", "u8"), ("dropped_tokens", "u8"), ("yield_s", "f8")]),
    ]
)
_TRANSIT_S = 0.1
"""Maximum time between the sending of a request by the front and its arrival in the engine core."""


class Wish(NamedTuple):
    """A request on its way to the engine that may preempt iterations."""

    announced_at: float
    demand: int
    """Digest of the request's id."""
    deadline_at: float
    """Deadline of the request's first token."""
    online_s: Seconds
    """Predicted prefill time of this request and of the requests with targets ahead of it."""
    prefill_s: Seconds
    """Predicted prefill time of this request alone, without the constant cost of an iteration."""


def safepoints_path(stats_path: Path) -> Path:
    """Path of the file for safepoints, next to the file of the engine's telemetry."""
    return stats_path.with_suffix(".safepoints")


def demand_of(request_id: str) -> int:
    """Digest of a request's id for `Wish`; never 0."""
    return int.from_bytes(blake2b(request_id.encode(), digest_size=8).digest(), "little") or 1


def is_awaited(
    wish: Wish, iteration: RunningIteration, *, arrived: Container[int], now: float
) -> bool:
    """
    Return whether *wish*, which is not in the engine core yet, would preempt the new *iteration*.

    Without this check, an iteration that begins just before the request arrives would delay it, in
    particular right after a preemption.

    Args:
        wish: The request that the front announced last.
        iteration: Iteration that begins in the engine core.
        arrived: Digests of requests that arrived in the engine core recently.
        now: Current time of `time.monotonic`.
    """
    if now - wish.announced_at > _TRANSIT_S or wish.demand in arrived:
        return False
    return preempts(
        iteration,
        now=now,
        online_s=wish.online_s,
        slack_s=wish.deadline_at - now,
        prefill_s=wish.prefill_s,
    )


class SafepointCore(SharedFile):
    """Access of the engine core and its worker to the shared memory."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, _LAYOUT)

    def show(self, number: int, iteration: RunningIteration) -> None:
        """Publish that the iteration with this *number*, counted from 1, has begun."""
        self.record["begun"] = number
        self.record["iteration"] = (
            iteration.began_at,
            iteration.predicted_s,
            iteration.decodes_s,
            iteration.online_tokens,
            iteration.offline_tokens,
        )
        # Last, so that a shown iteration is complete.
        self.record["shown"] = number

    def begin(self) -> None:
        """Reset the values that the front wrote into this file for an earlier engine."""
        for field in ("target", "shown", "begun"):
            self.record[field] = 0

    def hide(self) -> None:
        """Publish that the iteration is over."""
        self.record["shown"] = 0

    def learn(self, coefficients: LatencyCoefficients) -> None:
        """Publish the latency model to the front."""
        self.record["coefficients"] = (
            coefficients.constant_s,
            coefficients.linear_s,
            coefficients.attention_s,
            coefficients.cross_s,
            coefficients.context_s,
        )

    def is_wanted(self, number: int) -> bool:
        """Return whether the front demands a preemption of iteration *number*."""
        return bool(self.record["target"] == number)

    def wish(self) -> Wish:
        """The request that the front announced last, whether or not it caused a preemption."""
        return Wish(*self.record["wish"].item())

    def cut(self, number: int, dropped_tokens: int) -> None:
        """
        Record that iteration *number* was just preempted; counted only if the front demanded it.
        """
        now = time.monotonic()
        self.record["cut"] = number
        self.record["cut_at"] = now
        cuts, tokens, yield_s = self.record["totals"].item()
        if self.is_wanted(number):
            cuts, yield_s = cuts + 1, yield_s + now - float(self.record["raised_at"])
        self.record["totals"] = (cuts, tokens + dropped_tokens, yield_s)

    def cut_at(self, number: int) -> float | None:
        """Time at which iteration *number* was preempted; None if it was not preempted."""
        return float(self.record["cut_at"]) if self.record["cut"] == number else None


class SafepointFront(SharedFile):
    """Access of the front to the shared memory; creates the file."""

    def __init__(self, path: Path) -> None:
        path.write_bytes(bytes(_LAYOUT.itemsize))
        super().__init__(path, _LAYOUT)

    def running(self) -> tuple[int, RunningIteration] | None:
        """Number and data of the running iteration; None between iterations."""
        shown = int(self.record["shown"])
        iteration = RunningIteration(**named(self.record["iteration"]))
        # The next iteration may have begun during this read.
        return (shown, iteration) if shown and self.record["begun"] == shown else None

    def coefficients(self) -> LatencyCoefficients:
        """The engine's latency model as last published."""
        return LatencyCoefficients(**named(self.record["coefficients"]))

    def announce(self, wish: Wish) -> None:
        """Publish that a request is on its way to the engine."""
        self.record["wish"] = wish

    def want(self, number: int) -> None:
        """Demand that iteration *number* drop its best-effort part, if it still runs."""
        if self.record["target"] != number:
            self.record["raised_at"] = time.monotonic()
            self.record["target"] = number

    def totals(self) -> SchedulingTotals:
        """
        Totals since the engine began.

        They count iterations preempted on demand, the time from each demand to its safepoint, and
        the tokens that were dropped.
        """
        return SchedulingTotals(**named(self.record["totals"]))
