"""Which models an engine keeps at hand, what that takes, and what activating each of them costs."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from shared.contracts.base import ModelName, Seconds
from shared.contracts.telemetry import ActivationPath, ModelState, Residency

_FORGIVEN = 0.1
"""Part of what a path took longer than expected that is forgotten when another one is taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """What a model takes of host memory, and which engines could take it in."""

    weight_bytes: int
    engine_bytes: int
    """Of its engine while that is parked."""
    shape: str = ""
    """Engines of one shape differ in nothing but their weights; empty is like no other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Activation:
    """How a model is about to become the active one."""

    model: ModelName
    path: ActivationPath
    donor: ModelName | None = None
    """Whose engine takes the weights in, on the way `RELOAD`."""
    drop: tuple[ModelName, ...] = ()
    """Models that must leave host memory for it."""


class ResidencyTable:
    """
    The active model, the warm ones (QLM §5) within a budget of host memory, and all others, cold.

    A warm model has an engine of its own that is parked, or only its weights in host memory.

    Differs: QLM keeps weights in host memory and no engines; a parked engine takes more of it,
    and nothing has to be moved when its model is activated.

    Args:
        footprints: Of all models that there are.
        warm_bytes: Host memory for parked engines and held weights.
        prior_s: Activation time by path, until one was measured.
    """

    def __init__(
        self,
        footprints: Mapping[ModelName, Footprint],
        *,
        warm_bytes: int,
        prior_s: Mapping[ActivationPath, Seconds],
    ) -> None:
        self._footprints = dict(footprints)
        self._engine_bytes = {name: each.engine_bytes for name, each in footprints.items()}
        self._warm_bytes = warm_bytes
        self._prior_s = dict(prior_s)
        self._measured_s: dict[tuple[ModelName, ActivationPath], Seconds] = {}
        self._by_path_s: dict[ActivationPath, Seconds] = {}
        self._engines: dict[ModelName, None] = {}
        self._held: dict[ModelName, None] = {}
        self._active: ModelName | None = None

    @property
    def active(self) -> ModelName | None:
        return self._active

    @property
    def used_bytes(self) -> int:
        """Host memory of all that is warm."""
        return self._bytes(self._parked(), self._held_warm())

    @property
    def warm_bytes(self) -> int:
        """The budget."""
        return self._warm_bytes

    def residency(self, model: ModelName) -> Residency:
        """Where *model* is now."""
        if model == self._active:
            return Residency.ACTIVE
        warm = model in self._engines or model in self._held
        return Residency.WARM if warm else Residency.COLD

    def path(self, model: ModelName) -> ActivationPath | None:
        """The cheapest way to make *model* active from where it is; None when it is."""
        if model == self._active:
            return None
        if model in self._engines:
            return ActivationPath.PARKED
        ways = [ActivationPath.START if model in self._held else ActivationPath.COLD]
        if self.donor(model) is not None:
            ways.append(ActivationPath.RELOAD)
        return min(ways, key=lambda way: self._expected_s(model, way))

    def donor(self, model: ModelName) -> ModelName | None:
        """Whose engine could take *model*'s weights in: of its shape, least recently active."""
        shape = self._footprints[model].shape
        if not shape:
            return None
        return next((name for name in self._engines if self._footprints[name].shape == shape), None)

    def activation(self, model: ModelName) -> Activation | None:
        """How to make *model* active, and what has to go for it; None when it is active."""
        path = self.path(model)
        if path is None:
            return None
        donor = self.donor(model) if path is ActivationPath.RELOAD else None
        parked = [name for name in self._engines if name not in (model, donor)]
        held = [name for name in self._held if name != model]
        drop: list[ModelName] = []
        while (parked or held) and self._bytes(parked, held) > self._warm_bytes:
            drop.append((parked or held).pop(0))
        return Activation(model=model, path=path, donor=donor, drop=tuple(drop))

    def room_for_engine(self, model: ModelName) -> bool:
        """Whether a parked engine of *model* fits beside all that is warm."""
        return self._bytes([*self._parked(), model], self._held_warm()) <= self._warm_bytes

    def room_for_weights(self, model: ModelName) -> bool:
        """Whether the weights of *model* fit beside all that is warm."""
        return self._bytes(self._parked(), [*self._held_warm(), model]) <= self._warm_bytes

    def parked(self, model: ModelName) -> None:
        """*model* has got an engine, which is parked."""
        self._engines = {model: None, **self._engines}

    def held(self, model: ModelName) -> None:
        """The weights of *model* are in host memory."""
        self._held[model] = None

    def measured(self, model: ModelName, engine_bytes: int) -> None:
        """What *model*'s engine takes of host memory."""
        self._engine_bytes[model] = engine_bytes

    def drop(self, models: Iterable[ModelName]) -> None:
        """*models* are cold now."""
        for model in models:
            self._engines.pop(model, None)
            self._held.pop(model, None)
            if model == self._active:
                self._active = None

    def lose(self, model: ModelName) -> None:
        """The engine of *model* is gone."""
        self._engines.pop(model, None)
        if model == self._active:
            self._active = None

    def clear(self) -> None:
        """The engine died: no model has an engine. Held weights and measured times stay."""
        self._engines.clear()
        self._active = None

    def activated(self, activation: Activation, duration_s: Seconds) -> None:
        """*activation* took place."""
        model = activation.model
        self.drop(activation.drop)
        for name in (model, activation.donor):
            if name is not None:
                self._engines.pop(name, None)
        self._engines[model] = None
        self._active = model
        self._measured_s[model, activation.path] = duration_s
        self._by_path_s[activation.path] = duration_s
        for path in self._prior_s:
            if path is not activation.path:
                self._forgive(model, path)

    def activate_s(self, model: ModelName) -> Seconds:
        """Expected time to make *model* active from where it is."""
        path = self.path(model)
        return 0.0 if path is None else self._expected_s(model, path)

    def states(self) -> tuple[ModelState, ...]:
        """All models, for status messages."""
        return tuple(
            ModelState(
                model=model,
                residency=self.residency(model),
                activate_s=self.activate_s(model),
                path=self.path(model),
                warm_bytes=self._warm_bytes_of(model),
            )
            for model in self._footprints
        )

    def _warm_bytes_of(self, model: ModelName) -> int:
        if model in self._held or (model not in self._engines and self.donor(model) is not None):
            return self._footprints[model].weight_bytes
        return self._engine_bytes[model]

    def _parked(self) -> list[ModelName]:
        return [name for name in self._engines if name != self._active]

    def _held_warm(self) -> list[ModelName]:
        """Whose weights are held, but for the active model's, which count for nothing."""
        return [name for name in self._held if name != self._active]

    def _bytes(self, parked: Iterable[ModelName], held: Iterable[ModelName]) -> int:
        parked = set(parked)
        engines = sum(self._engine_bytes[name] for name in parked)
        return engines + sum(self._footprints[name].weight_bytes for name in {*held} - parked)

    def _forgive(self, model: ModelName, path: ActivationPath) -> None:
        """What was measured of a path that was not taken may have been one bad moment's."""
        prior_s = self._prior_s[path]
        if (measured_s := self._measured_s.get((model, path), 0.0)) > prior_s:
            self._measured_s[model, path] = measured_s + _FORGIVEN * (prior_s - measured_s)
        if (measured_s := self._by_path_s.get(path, 0.0)) > prior_s:
            self._by_path_s[path] = measured_s + _FORGIVEN * (prior_s - measured_s)

    def _expected_s(self, model: ModelName, path: ActivationPath) -> Seconds:
        if (model, path) in self._measured_s:
            return self._measured_s[model, path]
        return self._by_path_s.get(path, self._prior_s[path])
