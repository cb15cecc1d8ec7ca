"""The number of instances of each kind of device that the leader advises."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from services.planner.leader.rates import device_of, rates_of
from services.planner.leader.snapshot_builder import lane_arrivals
from services.planner.state import LeaderState
from shared.contracts.base import ModelName, Seconds, UnixTime
from shared.contracts.lanes import LaneLayout
from shared.contracts.plans import AdvisedInstances
from shared.contracts.telemetry import InstanceStatus
from solver.planning.capacity.advice import AdviceOptions, DeviceAdvice
from solver.planning.capacity.demand import ModelDemand, instances_for, left_for, may_be_zero
from solver.planning.capacity.steady import Need, SteadyNumber
from solver.planning.problem.arrival_curve import arrived_since

UNKNOWN = "unknown"
"""Device of a mesh that has had no instance yet."""
MIN_WINDOW_S: Seconds = 60.0
"""Time over which arrivals are averaged at least."""


@dataclass(slots=True)
class _Device:
    """What is known of a kind of device, also while it has no instance."""

    steady: SteadyNumber
    rates: Mapping[ModelName, float] = field(default_factory=dict)
    """Model -> measured throughput of an instance, tokens per second."""
    activate_s: Mapping[ModelName, Seconds] = field(default_factory=dict)

    @property
    def activation_s(self) -> Seconds:
        """Longest time until an instance that has started serves a model."""
        return max(self.activate_s.values(), default=0.0)


@dataclass(slots=True, kw_only=True)
class Scaling:
    """
    Follows the needs of the leader's view; a new leader begins with the present numbers.

    Args:
        options: Target, and times.
        layout: Deadlines of lanes.
    """

    options: AdviceOptions
    layout: LaneLayout
    _devices: dict[str, _Device] = field(default_factory=dict)

    def floors(self, state: LeaderState, now: UnixTime) -> dict[str, int]:
        """
        Devices that may have too many instances -> least number that the arriving work needs; only
        for these is it worth computing whether fewer instances serve the waiting work.
        """
        self._look(state, now)
        present = present_of(state)
        return {
            name: kept
            for name in self._devices
            if max(1, kept := self._kept(state, name, now)) < present.get(name, 0)
        }

    def advised(
        self, state: LeaderState, advice: Iterable[DeviceAdvice], now: UnixTime
    ) -> tuple[AdvisedInstances, ...]:
        """
        The numbers to publish.

        Args:
            state: The leader's view.
            advice: Numbers for the waiting work, where they were computed; a device without one
                that may have too many instances keeps them.
            now: Unix time.
        """
        floors, present = self.floors(state, now), present_of(state)
        computed = {each.device: each for each in advice}
        found = []
        for name, device in sorted(self._devices.items()):
            count = present.get(name, 0)
            least, kept = self._least(state, name), self._kept(state, name, now)
            waiting = computed.get(name)
            if waiting is not None and waiting.instances != count:
                least = max(least, waiting.instances)
            elif name in floors:
                kept = max(kept, count)
            number = device.steady.observe(Need(least=least, kept=max(least, kept)), now)
            found.append(
                AdvisedInstances(
                    device=name,
                    present=count,
                    advised=number,
                    bound=None if waiting is None else waiting.bound,
                    attainment=None if waiting is None else waiting.attainment,
                )
            )
        return tuple(found)

    def _look(self, state: LeaderState, now: UnixTime) -> None:
        """Learn of devices from instances, and from profiles of instances that are gone."""
        present, statuses = present_of(state), tuple(state.instances.values())
        names = {f"{engine} {device}" for _, engine, device in state.profiles} | present.keys()
        if names:
            self._devices.pop(UNKNOWN, None)
        elif not self._devices:
            names = {UNKNOWN}
        for name in names - self._devices.keys():
            steady = SteadyNumber(present.get(name, 0), now, down_after_s=self.options.down_after_s)
            self._devices[name] = _Device(steady)
        rates = rates_of(state, statuses)
        for name, device in self._devices.items():
            measured = {
                model: each.token_rate_per_s
                for (of, model), each in rates.items()
                if of == name and each.is_measured
            }
            if name in present:
                device.rates = measured
                device.activate_s = _activations(
                    each for each in statuses if device_of(each) == name
                )

    def _least(self, state: LeaderState, name: str) -> int:
        """
        1 if the device has to have an instance because no other one serves what waits, or because
        what may come could not wait for a cold start; else 0.
        """
        if any(count for other, count in present_of(state).items() if other != name):
            return 0
        if any(state.waiting.values()) or any(each.running for each in state.instances.values()):
            return 1
        deadlines_s = [lane.least_left_s for lane in lane_arrivals(state, self.layout)]
        start_s = self.options.period_s + self.options.start_s
        cold_start_s = start_s + self._devices[name].activation_s
        return 0 if may_be_zero(deadlines_s, cold_start_s=cold_start_s) else 1

    def _kept(self, state: LeaderState, name: str, now: UnixTime) -> int:
        """Number up to which instances are kept for the work that arrives and runs."""
        present = present_of(state)
        demands, share = self._demands(state, now), self.options.busy_share
        others = [
            (self._devices[other].rates, count) for other, count in present.items() if other != name
        ]
        device = self._devices[name]
        left = left_for(demands, others, busy_share=share)
        if left is None:
            return present.get(name, 0)
        number = instances_for(
            left, rates=device.rates, activate_s=device.activate_s, busy_share=share
        )
        if number is None:
            return present.get(name, 0)
        return max(number, _occupied(state, name), self._least(state, name))

    def _demands(self, state: LeaderState, now: UnixTime) -> list[ModelDemand]:
        """
        Arriving work, averaged over the time that it can wait, between `MIN_WINDOW_S` and the time
        after which numbers fall.
        """
        longest_s = max(MIN_WINDOW_S, self.options.down_after_s)
        found = []
        for lane in lane_arrivals(state, self.layout):
            window_s = min(longest_s, max(MIN_WINDOW_S, lane.least_left_s))
            requests = arrived_since(lane.arrivals, now - window_s)
            found.append(
                ModelDemand(
                    model=lane.model,
                    tokens_per_s=requests * lane.tokens / window_s,
                    least_left_s=lane.least_left_s,
                )
            )
        return found


def present_of(state: LeaderState) -> dict[str, int]:
    """Kind of device -> number of its instances that do not drain; devices with none are absent."""
    found: dict[str, int] = {}
    for each in state.instances.values():
        if not each.draining:
            found[device_of(each)] = found.get(device_of(each), 0) + 1
    return found


def _occupied(state: LeaderState, name: str) -> int:
    """Least number of instances that have room for the requests that run now."""
    mine = [each for each in state.instances.values() if device_of(each) == name]
    running = sum(each.running for each in mine)
    return math.ceil(running / max((each.max_running for each in mine), default=1))


def _activations(statuses: Iterable[InstanceStatus]) -> dict[ModelName, Seconds]:
    """Longest time to activate each model on any of some instances."""
    found: dict[ModelName, Seconds] = {}
    for status in statuses:
        for entry in status.models:
            model = ModelName(entry.model)
            found[model] = max(found.get(model, 0.0), entry.activate_s)
    return found
