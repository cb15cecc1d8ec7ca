"""Room of an instance: running sums of the work that it holds, in tokens and seconds."""

import math
from dataclasses import dataclass, replace
from statistics import NormalDist

from shared.contracts.base import Seconds
from shared.contracts.estimates import Profile
from shared.contracts.qos import QosClass
from solver.instance.events import EngineView
from solver.instance.request import Held as HeldRequest
from solver.instance.request import Phase
from solver.prediction.latency.full_batch import batch_size, full_batch
from solver.prediction.latency.prefill_pace import PrefillPace
from solver.prediction.latency.service_time import (
    predicted_answer,
    predicted_prefill_s,
    tokens_s,
)
from solver.scheduling.engine.entry import Rank
from solver.scheduling.pull_room import Held, PullBounds, counted_s, work_s


@dataclass(frozen=True, slots=True)
class _Amounts:
    """What one request adds to the sums while it has not begun."""

    regular: bool
    tokens: int
    """KV tokens that it is expected to need."""
    counted_s: Seconds
    prefill_s: Seconds
    prompt: int
    output: float
    output_variance: float
    most: int
    """Prompt and output tokens at the request's limit."""


@dataclass(slots=True)
class _Share:
    """What one request adds to the sums now."""

    amounts: _Amounts
    rank: Rank
    is_interactive: bool
    ahead: bool = False
    waiting: bool = False
    running: bool = False
    prefilling: bool = False
    reserved: int = 0


@dataclass(slots=True)
class _Sums:
    """Sums over the requests of one kind that have not begun; the last five over waiting ones."""

    num: int = 0
    tokens: int = 0
    counted_s: Seconds = 0.0
    counted_squares: float = 0.0
    prefill_s: Seconds = 0.0
    prefill_squares: float = 0.0
    num_waiting: int = 0
    prompt: int = 0
    output: float = 0.0
    output_variance: float = 0.0
    most: int = 0

    def ahead(self, each: _Amounts, sign: int) -> None:
        """Add or remove a request that has not begun."""
        self.num += sign
        self.tokens += sign * each.tokens
        self.counted_s += sign * each.counted_s
        self.counted_squares += sign * each.counted_s**2
        self.prefill_s += sign * each.prefill_s
        self.prefill_squares += sign * each.prefill_s**2
        if self.num == 0:  # sums of floating-point numbers drift
            self.counted_s = self.counted_squares = self.prefill_s = self.prefill_squares = 0.0

    def wait(self, each: _Amounts, sign: int) -> None:
        """Add or remove a request of the window."""
        self.num_waiting += sign
        self.prompt += sign * each.prompt
        self.output += sign * each.output
        self.output_variance += sign * each.output_variance
        self.most += sign * each.most
        if self.num_waiting == 0:
            self.output = self.output_variance = 0.0


class Room:
    """
    Work that an instance has pulled and not begun, and KV that its runs have reserved.

    Each request counts by its phase; `update` follows a change. A new profile changes all amounts.

    Args:
        bounds: Limits of pulled work.
    """

    def __init__(self, bounds: PullBounds) -> None:
        self.bounds = bounds
        self._normal_quantile = NormalDist().inv_cdf(bounds.backlog_level)
        self._profile: Profile | None = None
        self._bounds_now = bounds
        self._held: Held | None = None
        """Result of `held` until the next change."""
        self._held_engine: EngineView | None = None
        self._shares: dict[int, _Share] = {}
        self._regular, self._yielding = _Sums(), _Sums()
        self.reserved_tokens = 0
        """KV tokens that are reserved for runs."""
        self.prefilling_s: Seconds = 0.0
        """Predicted prefill of the runs without a first token."""
        self.prefill_pace = PrefillPace()
        """Measured prefills of regular requests."""
        self.num_running = 0
        self.running_by_rank = dict.fromkeys(Rank, 0)
        self.num_interactive = 0
        """Running requests with a target for their first tokens."""
        self.num_window = 0
        self._num_prefilling = 0

    def update(self, held: HeldRequest) -> None:
        """Count *held* by its present phase."""
        self._held = None
        share = self._shares.get(held.number)
        if share is None:
            share = self._shares[held.number] = _Share(
                self._amounts(held),
                held.rank,
                held.rank is Rank.REGULAR and held.request.slo.qos_class is QosClass.INTERACTIVE,
            )
        sums = self._regular if share.amounts.regular else self._yielding
        waiting, ahead = held.phase is Phase.WAITING, held.ahead
        if share.ahead != ahead:
            sums.ahead(share.amounts, 1 if ahead else -1)
            share.ahead = ahead
        if share.waiting != waiting:
            sums.wait(share.amounts, 1 if waiting else -1)
            self.num_window += 1 if waiting else -1
            share.waiting = waiting
        running = held.phase in (Phase.RUNNING, Phase.ENDING)
        if share.running != running:
            self.num_running += 1 if running else -1
            self.running_by_rank[share.rank] += 1 if running else -1
            self.num_interactive += share.is_interactive * (1 if running else -1)
            share.running = running
        prefilling = running and ahead
        if share.prefilling != prefilling:
            self._prefill(share.amounts, 1 if prefilling else -1)
            share.prefilling = prefilling
        reserved = held.run.room_tokens if running and held.run is not None else 0
        self.reserved_tokens += reserved - share.reserved
        share.reserved = reserved
        if held.phase in (Phase.LEAVING, Phase.GONE):
            del self._shares[held.number]

    def changed(self, held: HeldRequest) -> None:
        """Count *held* again, whose request or answer has other lengths now."""
        self.drop(held)
        self.update(held)

    def drop(self, held: HeldRequest) -> None:
        """Remove *held* from all sums."""
        self._held = None
        share = self._shares.pop(held.number, None)
        if share is None:
            return
        sums = self._regular if share.amounts.regular else self._yielding
        if share.ahead:
            sums.ahead(share.amounts, -1)
        if share.waiting:
            sums.wait(share.amounts, -1)
            self.num_window -= 1
        if share.running:
            self.num_running -= 1
            self.running_by_rank[share.rank] -= 1
            self.num_interactive -= share.is_interactive
        if share.prefilling:
            self._prefill(share.amounts, -1)
        self.reserved_tokens -= share.reserved

    def set_profile(self, profile: Profile | None, held: tuple[HeldRequest, ...]) -> None:
        """Predict with *profile* from now on; *held* are all requests of the instance."""
        self._profile, self._held = profile, None
        for each in held:
            self.changed(each)

    def bounds_now(self, engine: EngineView) -> PullBounds:
        """The bounds with the engine's KV capacity in tokens, if the engine has reported it."""
        max_tokens = engine.kv_capacity_tokens or math.inf
        if self._bounds_now.max_tokens != max_tokens:
            self._bounds_now = replace(self.bounds, max_tokens=max_tokens)
        return self._bounds_now

    def held(self, engine: EngineView, num_pulling: int) -> Held:
        """Pulled work that has not begun, and the delay that it causes for one more request."""
        known = self._held
        if known and self._held_engine is engine and known.num_pulling == num_pulling:
            return known
        free = engine.max_running - self.num_running - self.num_window - num_pulling
        self._held_engine = engine
        self._held = Held(
            num_regular=self._regular.num,
            num_best_effort=self._yielding.num,
            num_pulling=num_pulling,
            regular_s=self._work_s(self._regular, free, engine),
            best_effort_s=self._work_s(self._yielding, free, engine),
            regular_tokens=self._regular.tokens,
            best_effort_tokens=self._yielding.tokens,
        )
        return self._held

    def whole_s(self, engine: EngineView, num_pulling: int) -> Seconds:
        """`Held.regular_s` with each long prefill counted in full."""
        free = engine.max_running - self.num_running - self.num_window - num_pulling
        sums = replace(
            self._regular,
            counted_s=self._regular.prefill_s,
            counted_squares=self._regular.prefill_squares,
        )
        return self._work_s(sums, free, engine)

    def taken(self, engine: EngineView) -> float:
        """Share of the engine's running slots that runs and waiting requests take, at most 1."""
        return min(1.0, (self.num_running + self.num_window) / max(1, engine.max_running))

    def prefill_s(self) -> Seconds:
        """Predicted time until all pulled requests have their first tokens."""
        return self._regular.prefill_s + self._yielding.prefill_s

    def prefill_s_of(self, held: HeldRequest) -> Seconds:
        """Predicted prefill of one request."""
        return self._shares[held.number].amounts.prefill_s

    def _prefill(self, each: _Amounts, sign: int) -> None:
        """Add or remove a run without a first token."""
        self._num_prefilling += sign
        self.prefilling_s += sign * each.prefill_s
        if self._num_prefilling == 0:  # sums of floating-point numbers drift
            self.prefilling_s = 0.0

    def _amounts(self, held: HeldRequest) -> _Amounts:
        request, profile = held.request, self._profile
        prefill_s = predicted_prefill_s(request, profile)
        answer = predicted_answer(request, profile)
        return _Amounts(
            regular=held.rank is Rank.REGULAR,
            tokens=held.tokens_needed,
            counted_s=counted_s(prefill_s, self.bounds),
            prefill_s=prefill_s,
            prompt=request.prompt_tokens,
            output=answer.mean,
            output_variance=answer.sd**2,
            most=request.prompt_tokens + request.sampling.max_tokens,
        )

    def _work_s(self, sums: _Sums, num_free_slots: int, engine: EngineView) -> Seconds:
        return work_s(
            prefill_s=self._quantile(
                sums.counted_s, sums.counted_squares * self._latency_error() ** 2
            ),
            whole_s=0.0 if num_free_slots > 0 else self._answers_s(sums, engine),
            num_free_slots=num_free_slots,
        )

    def _answers_s(self, sums: _Sums, engine: EngineView) -> Seconds:
        """Predicted time of a full engine for all tokens of the waiting requests."""
        if not sums.num_waiting:
            return 0.0
        tokens = self._quantile(sums.prompt + sums.output, sums.output_variance)
        return min(tokens, sums.most) / self._full_rate_per_s(sums, engine)

    def _full_rate_per_s(self, sums: _Sums, engine: EngineView) -> float:
        """Predicted tokens per second of an engine that is full of the waiting requests."""
        profile = self._profile
        if profile is not None and profile.latency is not None:
            prompt, output = sums.prompt / sums.num_waiting, sums.output / sums.num_waiting
            tokens = max(1.0, prompt + output)
            batch = batch_size(engine.max_running, engine.kv_capacity_tokens or math.inf, tokens)
            full = full_batch(profile.latency, batch=batch, prompt=prompt, output=output)
            if full.token_rate_per_s:
                return full.token_rate_per_s
        return 1 / tokens_s(1.0, profile)

    def _quantile(self, mean: float, variance: float) -> float:
        """Quantile of a sum at the bounds' level (QLM §6, equations 2 and 3); at least 0."""
        return max(0.0, mean + self._normal_quantile * math.sqrt(max(0.0, variance)))

    def _latency_error(self) -> float:
        seen = None if self._profile is None else self._profile.latency_calibration
        return 0.0 if seen is None else seen.spread
