"""
The running iteration, and the demand to cut it short, in memory that all of an engine share.

The engine core shows what it computes, the agent's front asks for the best-effort part of one
iteration to be dropped, and the worker looks at its safepoints whether that is the iteration it
computes. Nobody waits for anybody. A demand names its iteration, so one that comes late or twice
means nothing to any other. Times are of `time.monotonic`, which all processes of a host share.
"""

import struct
import time
from collections.abc import Container
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

from services.agent.backends.vllm.shared_file import SharedFile
from shared.contracts.base import Seconds
from shared.contracts.estimates import LatencyCoefficients
from solver.scheduling.layer_preemption import RunningIteration, preempts

_NUMBER = struct.Struct("<Q")
_TIME = struct.Struct("<d")
_ITERATION = struct.Struct("<dddQQ")
_COEFFICIENTS = struct.Struct("<ddddd")
_WISH = struct.Struct("<dQddd")
_YIELD = struct.Struct("<dd")
_TOTALS = struct.Struct("<QdQ")
_SHOWN_AT, _BEGUN_AT, _ITERATION_AT = 0, 8, 16
_COEFFICIENTS_AT = 64
_TARGET_AT, _RAISED_AT, _WISH_AT = 128, 136, 144
_CUT_AT, _CUT_TIME_AT, _TOTALS_AT = 192, 200, 208
_YIELDS_AT = 256
_NUM_YIELDS = 1024
_TRANSIT_S = 0.1
"""For so long a request may be on its way from the front to the engine core."""
_SIZE = _YIELDS_AT + _NUM_YIELDS * _YIELD.size


class Wish(NamedTuple):
    """A request that is on its way to the engine, for which iterations may be cut."""

    announced_at: float
    demand: int
    """Digest of the request."""
    deadline_at: float
    """Of its first token."""
    online_s: Seconds
    """Predicted prefill of it and of those before it."""
    prefill_s: Seconds
    """Of its tokens alone, without what every iteration costs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CutTotals:
    """What safepoints have done since the engine began."""

    cuts: int = 0
    """Iterations that were cut on demand."""
    yield_s: Seconds = 0.0
    """From the demand to the safepoint, all of them together."""
    dropped_tokens: int = 0
    """Scheduled and not computed, or computed for nothing."""


def safepoints_path(stats_path: Path) -> Path:
    """Beside the engine's other shared file."""
    return stats_path.with_suffix(".safepoints")


def demand_of(request_id: str) -> int:
    """What a wish calls the request; never 0."""
    return int.from_bytes(blake2b(request_id.encode(), digest_size=8).digest(), "little") or 1


def is_awaited(
    wish: Wish, iteration: RunningIteration, *, arrived: Container[int], now: float
) -> bool:
    """
    Whether an online request is on its way that would have *iteration* cut, which begins now.

    Without this an iteration that begins just before the request comes would delay it, as soon
    after a cut.

    Args:
        wish: The latest.
        iteration: In the engine core.
        arrived: Digests of those that have come to it lately.
        now: By `time.monotonic`.
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


class _Shared(SharedFile):
    def __init__(self, path: Path) -> None:
        super().__init__(path, _SIZE)

    def _number(self, at: int) -> int:
        (number,) = self.get(_NUMBER, at)
        return int(number)

    def _time(self, at: int) -> float:
        (time_s,) = self.get(_TIME, at)
        return float(time_s)


class SafepointCore(_Shared):
    """The engine core's side, and the worker's."""

    def show(self, number: int, iteration: RunningIteration) -> None:
        """Iteration *number*, counted from 1, has begun."""
        self.put(_NUMBER, _BEGUN_AT, number)
        self.put(
            _ITERATION,
            _ITERATION_AT,
            iteration.began_at,
            iteration.predicted_s,
            iteration.decodes_s,
            iteration.online_tokens,
            iteration.offline_tokens,
        )
        # Last: what is shown is complete.
        self.put(_NUMBER, _SHOWN_AT, number)

    def begin(self) -> None:
        """Forget what an earlier engine with this file was told."""
        for at in (_TARGET_AT, _SHOWN_AT, _BEGUN_AT):
            self.put(_NUMBER, at, 0)

    def hide(self) -> None:
        """The iteration is over."""
        self.put(_NUMBER, _SHOWN_AT, 0)

    def learn(self, coefficients: LatencyCoefficients) -> None:
        """Tell the front how long prefills take."""
        self.put(
            _COEFFICIENTS,
            _COEFFICIENTS_AT,
            coefficients.constant_s,
            coefficients.linear_s,
            coefficients.attention_s,
            coefficients.cross_s,
            coefficients.context_s,
        )

    def is_wanted(self, number: int) -> bool:
        """Whether iteration *number* is to be cut."""
        return self._number(_TARGET_AT) == number

    def wish(self) -> Wish:
        """The latest, whatever became of it."""
        return Wish(*self.get(_WISH, _WISH_AT))

    def cut(self, number: int, dropped_tokens: int) -> None:
        """Iteration *number* has just been cut; counted if it was wanted."""
        now = time.monotonic()
        self.put(_NUMBER, _CUT_AT, number)
        self.put(_TIME, _CUT_TIME_AT, now)
        cuts, yield_s, tokens = self.get(_TOTALS, _TOTALS_AT)
        if self.is_wanted(number):
            raised_at = self._time(_RAISED_AT)
            self.put(_YIELD, _YIELDS_AT + cuts % _NUM_YIELDS * _YIELD.size, raised_at, now)
            cuts, yield_s = cuts + 1, yield_s + now - raised_at
        self.put(_TOTALS, _TOTALS_AT, cuts, yield_s, tokens + dropped_tokens)

    def cut_at(self, number: int) -> float | None:
        """When iteration *number* was cut; none if it was not."""
        if self._number(_CUT_AT) != number:
            return None
        return self._time(_CUT_TIME_AT)


class SafepointFront(_Shared):
    """The front's side; makes the file."""

    def __init__(self, path: Path) -> None:
        path.write_bytes(bytes(_SIZE))
        super().__init__(path)

    def running(self) -> tuple[int, RunningIteration] | None:
        """The iteration that runs now, with its number; none between iterations."""
        shown = self._number(_SHOWN_AT)
        fields = self.get(_ITERATION, _ITERATION_AT)
        # The next may have begun while this read.
        if not shown or self._number(_BEGUN_AT) != shown:
            return None
        began_at, predicted_s, decodes_s, online_tokens, offline_tokens = fields
        return shown, RunningIteration(
            began_at=began_at,
            predicted_s=predicted_s,
            decodes_s=decodes_s,
            online_tokens=online_tokens,
            offline_tokens=offline_tokens,
        )

    def coefficients(self) -> LatencyCoefficients:
        """The engine's latency model, as it last said."""
        constant_s, linear_s, attention_s, cross_s, context_s = self.get(
            _COEFFICIENTS, _COEFFICIENTS_AT
        )
        return LatencyCoefficients(
            constant_s=constant_s,
            linear_s=linear_s,
            attention_s=attention_s,
            cross_s=cross_s,
            context_s=context_s,
        )

    def announce(self, wish: Wish) -> None:
        """A request is on its way to the engine."""
        self.put(_WISH, _WISH_AT, *wish)

    def want(self, number: int) -> None:
        """Drop the best-effort part of iteration *number*, if it still runs."""
        if self._number(_TARGET_AT) != number:
            self.put(_TIME, _RAISED_AT, time.monotonic())
            self.put(_NUMBER, _TARGET_AT, number)

    def totals(self) -> CutTotals:
        """What safepoints have done."""
        cuts, yield_s, dropped_tokens = self.get(_TOTALS, _TOTALS_AT)
        return CutTotals(cuts=cuts, yield_s=yield_s, dropped_tokens=dropped_tokens)

    def yields_s(self, since: int = 0) -> list[Seconds]:
        """From demand to safepoint, of the cuts from number *since* on that are still known."""
        cuts = self.totals().cuts
        pairs = [
            self.get(_YIELD, _YIELDS_AT + index % _NUM_YIELDS * _YIELD.size)
            for index in range(max(since, cuts - _NUM_YIELDS), cuts)
        ]
        return [yielded_at - raised_at for raised_at, yielded_at in pairs]
