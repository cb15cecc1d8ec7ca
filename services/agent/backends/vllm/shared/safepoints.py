"""
The running iteration, and the demand to preempt it, in memory shared by one engine's processes.

The engine core publishes what it computes, the agent's front requests that the best-effort part of
one iteration be dropped, and the worker checks at its safepoints whether the demand names the
iteration that it computes. No process waits for another. A demand names its iteration, so a late or
repeated one does not affect any other. Times are of `time.monotonic`, which all processes of a host
share.
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
"""Maximum time that a request takes from the front to the engine core."""


class Wish(NamedTuple):
    """A request on its way to the engine, for which iterations may be preempted."""

    announced_at: float
    demand: int
    """Digest of the request."""
    deadline_at: float
    """Deadline of the first token of the request."""
    online_s: Seconds
    """Predicted prefill of this request and of the requests with targets before it."""
    prefill_s: Seconds
    """Predicted prefill of this request alone, without the constant cost of an iteration."""


def safepoints_path(stats_path: Path) -> Path:
    """Path of the file for safepoints, next to the file of the engine's telemetry."""
    return stats_path.with_suffix(".safepoints")


def demand_of(request_id: str) -> int:
    """Digest of the request in a wish; never 0."""
    return int.from_bytes(blake2b(request_id.encode(), digest_size=8).digest(), "little") or 1


def is_awaited(
    wish: Wish, iteration: RunningIteration, *, arrived: Container[int], now: float
) -> bool:
    """
    Return whether a request on its way to the engine core would preempt the beginning *iteration*.

    Without this check an iteration that begins just before the request arrives, e.g. right after a
    preemption, would delay the request.

    Args:
        wish: The latest wish.
        iteration: Iteration in the engine core.
        arrived: Digests of requests that arrived in the engine core recently.
        now: Time of `time.monotonic`.
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
    """The side of the engine core and its worker in the shared memory."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, _LAYOUT)

    def show(self, number: int, iteration: RunningIteration) -> None:
        """Publish that iteration *number*, counted from 1, has begun."""
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
        """Reset the values that an earlier engine received in this file."""
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
        """Return whether the front demands that iteration *number* be preempted."""
        return bool(self.record["target"] == number)

    def wish(self) -> Wish:
        """The latest wish, whether or not it led to a preemption."""
        return Wish(*self.record["wish"].item())

    def cut(self, number: int, dropped_tokens: int) -> None:
        """
        Record that iteration *number* was just preempted; counted if the preemption was demanded.
        """
        now = time.monotonic()
        self.record["cut"] = number
        self.record["cut_at"] = now
        cuts, tokens, yield_s = self.record["totals"].item()
        if self.is_wanted(number):
            cuts, yield_s = cuts + 1, yield_s + now - float(self.record["raised_at"])
        self.record["totals"] = (cuts, tokens + dropped_tokens, yield_s)

    def cut_at(self, number: int) -> float | None:
        """Time at which iteration *number* was preempted; None if it was not."""
        return float(self.record["cut_at"]) if self.record["cut"] == number else None


class SafepointFront(SharedFile):
    """The front's side of the shared memory; creates the file."""

    def __init__(self, path: Path) -> None:
        path.write_bytes(bytes(_LAYOUT.itemsize))
        super().__init__(path, _LAYOUT)

    def running(self) -> tuple[int, RunningIteration] | None:
        """The running iteration with its number; None between iterations."""
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
        """Demand that the best-effort part of iteration *number* be dropped, if it still runs."""
        if self.record["target"] != number:
            self.record["raised_at"] = time.monotonic()
            self.record["target"] = number

    def totals(self) -> SchedulingTotals:
        """
        Iterations that were preempted on demand since the engine began, the time from demand to
        safepoint, and the tokens that were scheduled and not computed, or whose results were
        discarded.
        """
        return SchedulingTotals(**named(self.record["totals"]))
