"""Prefill times on instances of several engines and devices."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from shared.contracts.base import InstanceId, Seconds
from shared.contracts.routing import CalibrationSnapshot
from solver.prediction.calibration.coverage import CoverageMonitor, CoverageOptions
from solver.prediction.calibration.prefill_calibration import BucketedCalibration
from solver.prediction.prefill.latency_prefills import PRIOR, LatencyPrefills
from solver.routing.admission_queue import Assignment
from solver.routing.options import Prediction, RoutingOptions
from solver.routing.prefills import CalibratedPrefills, PrefillModel
from solver.routing.request import Candidate, PrefillEstimate, RoutedRequest

LEVELS = (0.5, 0.9, 0.95)
"""Levels of prefill models that are made from a latency model instead of fitted trees."""
DeviceKey = tuple[str, str]
"""Key of a prefill model: engine and device."""


@dataclass(slots=True)
class _Device:
    version: str
    calibration: BucketedCalibration | None
    prefills: CalibratedPrefills


@dataclass(slots=True, kw_only=True)
class DevicePrefills:
    """
    A model of prefill times for each (engine, device), with separate corrections and trust.

    A device without a model uses the model of an unknown engine.
    """

    options: RoutingOptions
    origin: str
    """Unique name of this run of the router."""
    device_of: dict[InstanceId, DeviceKey] = field(default_factory=dict)
    """
    Engine and device of each instance for which prefills are predicted; the owner of this object
    writes them.
    """
    _devices: dict[DeviceKey, _Device] = field(default_factory=dict)

    @property
    def is_trusted(self) -> bool:
        """True if coverage of all present devices is within its limit (QUARTZ §3.5)."""
        present = set(self.device_of.values())
        return all(
            each.prefills.is_trusted for key, each in self._devices.items() if key in present
        )

    @property
    def monitors(self) -> dict[DeviceKey, CoverageMonitor]:
        """Coverage monitors of the devices whose predictions are monitored."""
        watched = {key: each.prefills.monitor for key, each in self._devices.items()}
        return {key: monitor for key, monitor in watched.items() if monitor is not None}

    def version(self, key: DeviceKey) -> str:
        """Version of the prefill model that is in use for *key*."""
        return self._device(key).version

    def use(self, key: DeviceKey, model: PrefillModel, version: str) -> None:
        """
        Use another prefill model from now on; corrections of the previous model are dropped.

        Raises:
            ValueError: *model* lacks the level that the policy routes by or the level that it
                watches.
        """
        known = self._devices.get(key)
        if known is None or known.version != version:
            self._devices[key] = self._made(model, version)

    def predict(
        self, request: RoutedRequest, candidates: Sequence[Candidate]
    ) -> list[PrefillEstimate]:
        """Estimate the prefill time on each candidate, in the order of the candidates."""
        by_key: dict[DeviceKey, list[int]] = {}
        for index, each in enumerate(candidates):
            by_key.setdefault(self.device_of[each.instance_id], []).append(index)
        found: dict[int, PrefillEstimate] = {}
        for key, indices in by_key.items():
            alike = [candidates[index] for index in indices]
            estimates = self._device(key).prefills.predict(request, alike)
            found.update(zip(indices, estimates, strict=True))
        return [found[index] for index in range(len(candidates))]

    def observe(self, assignment: Assignment, prefill_s: Seconds) -> None:
        """Learn that a predicted prefill took *prefill_s*; ignored for instances that have left."""
        key = self.device_of.get(assignment.instance_id)
        if key is not None:
            self._device(key).prefills.observe(assignment, prefill_s)

    def snapshots(self) -> tuple[CalibrationSnapshot, ...]:
        """Prediction errors that this router observed, for other routers to adopt."""
        known = (each.calibration for each in self._devices.values())
        return tuple(each.snapshot() for each in known if each is not None)

    def adopt(self, snapshot: CalibrationSnapshot) -> None:
        """
        Adopt prediction errors of another router if they are of a model in use; ignore all others.

        Raises:
            ContractError: A residual is invalid; nothing is adopted.
        """
        for each in self._devices.values():
            if each.calibration is not None and each.version == snapshot.model_version:
                each.calibration.adopt(snapshot)

    def _device(self, key: DeviceKey) -> _Device:
        if key not in self._devices:
            self._devices[key] = self._made(LatencyPrefills(PRIOR, LEVELS), f"prior {key}")
        return self._devices[key]

    def _made(self, model: PrefillModel, version: str) -> _Device:
        options, calibration, monitor = self.options, None, None
        if options.prediction is Prediction.CALIBRATED:
            calibration = BucketedCalibration(
                model.levels, model_version=version, origin=self.origin
            )
        if options.falls_back:
            monitor = CoverageMonitor(CoverageOptions(under_coverage=options.fallback_delta))
        prefills = CalibratedPrefills(
            model, level=options.quantile_level, calibration=calibration, monitor=monitor
        )
        return _Device(version, calibration, prefills)
