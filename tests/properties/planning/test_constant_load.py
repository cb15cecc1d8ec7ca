"""Under constant load, no instance returns to a model soon after it has left it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count, pairwise

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from services.planner.leader.snapshot_builder import cluster_snapshot
from services.planner.settings import LeaderSettings
from services.planner.state import LeaderState
from shared.contracts.base import ModelName
from shared.contracts.lanes import LaneKey, LaneLayout
from solver.planning.problem.snapshot import virtual_queues
from solver.planning.review import Basis, ReviewOptions, review
from tests.clocks import NOW
from tests.queued import BATCH, BEST_EFFORT, MODEL, OTHER, lane_of
from tests.unit.planner.leader_rig import status

SWAP_S, ROUNDS = 2, 40
SETTINGS = LeaderSettings()
OPTIONS = ReviewOptions(importance_weight=SETTINGS.importance_weight, budget_s=0.01)
MODELS = (MODEL, OTHER)


@dataclass
class Fleet:
    """Instances that follow plans, one round a second; each serves some requests a second."""

    active: dict[str, ModelName]
    busy_until: dict[str, float] = field(default_factory=dict)
    state: LeaderState = field(default_factory=LeaderState)
    basis: Basis | None = None
    swaps: list[tuple[str, float, ModelName, int]] = field(default_factory=list)
    """
    Instance, time, new model, and number of requests that wait for the model before; 0 if they have
    no deadlines, and requests for the new model have.
    """
    _seq: Callable[[], int] = field(default_factory=lambda: count(1).__next__)

    def round(self, now: float, arrivals: dict[str, int], served: int) -> None:
        waiting = self.state.waiting
        for lane, number in arrivals.items():
            waiting[lane] = waiting.get(lane, 0) + number
        for name, model in self.active.items():
            self._report(name, model, now)
            if self.busy_until.get(name, 0.0) <= now:
                self._serve(model, served)
        snapshot = cluster_snapshot(self.state, layout=LaneLayout(), settings=SETTINGS, now=now)
        ticks = count()
        made = review(
            snapshot, self.basis, options=OPTIONS, clock=lambda: 1e-3 * next(ticks), seed=1
        )
        self.basis, self.state.places = made.basis, made.places(snapshot)
        for queue in virtual_queues(snapshot, made.order):
            name = str(queue.instance_id)
            head = queue.segments[0].model if queue.segments else self.active[name]
            if head != self.active[name] and self.busy_until.get(name, 0.0) <= now:
                left = self._of(self.active[name])
                yields = any(map(_has_deadline, self._of(head))) and not any(
                    map(_has_deadline, left)
                )
                waiting_before = 0 if yields else sum(left.values())
                self.swaps.append((name, now, head, waiting_before))
                self.active[name], self.busy_until[name] = head, now + SWAP_S
                self._report(name, head, now)

    def _report(self, name: str, model: ModelName, now: float) -> None:
        reported = status(name, active=model, seq=self._seq())
        models = tuple(replace(each, activate_s=float(SWAP_S)) for each in reported.models)
        self.state.on_status(replace(reported, models=models), now)

    def _of(self, model: ModelName) -> dict[str, int]:
        waiting = self.state.waiting.items()
        return {lane: n for lane, n in waiting if n and f".{model}." in lane}

    def _serve(self, model: ModelName, served: int) -> None:
        for lane, number in sorted(self._of(model).items(), reverse=True):
            taken = min(number, served)
            self.state.waiting[lane] -= taken
            served -= taken


def _has_deadline(lane: str) -> bool:
    return LaneKey.parse(lane).band < LaneLayout().best_effort_band


rates = st.integers(0, 6)


@given(
    num_instances=st.integers(1, 3),
    arrivals=st.dictionaries(
        st.sampled_from(
            [
                lane_of(slo, model=model).queue_name
                for slo in (BATCH, BEST_EFFORT)
                for model in MODELS
            ]
        ),
        rates,
        min_size=2,
    ),
    served=st.integers(1, 8),
)
def test_no_instance_returns_to_a_model_within_three_swap_times_while_work_waits(
    num_instances: int, arrivals: dict[str, int], served: int
) -> None:
    fleet = Fleet({f"i{n}": MODELS[n % 2] for n in range(num_instances)})
    for number in range(ROUNDS):
        fleet.round(NOW + number, arrivals, served)

    for name in fleet.active:
        own = [swap for swap in fleet.swaps if swap[0] == name]
        for (_, left_at, _, _), (_, back_at, _, left) in pairwise(own):
            assert back_at - left_at >= 3 * SWAP_S or left == 0
