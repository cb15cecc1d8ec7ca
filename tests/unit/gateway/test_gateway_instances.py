"""Instances by model, as /health shows them."""

from pathlib import Path

import msgspec
import pytest

from services.gateway.instances import SILENCE_S, AwaitedModels, Instances
from services.gateway.models import model_object
from services.gateway.service import AwaitedReleases
from shared.contracts.base import InstanceId, ModelName
from shared.contracts.errors import SettingsError
from shared.contracts.telemetry import InstanceStatus, ModelState, Residency
from shared.models.registry import ModelRegistry
from shared.models.tiny import make_tiny_models
from tests.clocks import NOW, FakeClock
from tests.queued import MODEL, OTHER


@pytest.fixture
def registry(tmp_path: Path) -> ModelRegistry:
    return ModelRegistry.load(make_tiny_models(tmp_path, weights=False))


def status(name: str, model: ModelName | None, *able: ModelName) -> InstanceStatus:
    return InstanceStatus(
        instance_id=InstanceId(name),
        incarnation="i",
        seq=1,
        at=NOW,
        engine="e",
        device="d",
        model=model,
        models=tuple(ModelState(model=each, residency=Residency.COLD) for each in able),
    )


def test_models_have_the_instances_that_serve_or_can_activate_them(registry: ModelRegistry):
    instances = Instances(registry=registry, clock=FakeClock(NOW))
    instances.on_status(status("one", OTHER, MODEL, OTHER))
    instances.on_status(status("one", MODEL, MODEL, OTHER))
    instances.on_status(status("two", None, MODEL))

    assert instances.by_model()[MODEL] == {"serving": 1, "able": 2}
    assert instances.by_model()[OTHER] == {"serving": 0, "able": 1}


def test_models_of_simulated_engines_alone_are_owned_by_the_simulation(registry: ModelRegistry):
    instances = Instances(registry=registry, clock=FakeClock(NOW))
    before = model_object(instances, MODEL).owned_by
    simulated = msgspec.structs.replace(status("one", MODEL, MODEL, OTHER), engine="simulated")
    instances.on_status(simulated)
    instances.on_status(status("two", OTHER, OTHER))

    assert before == "headway"
    assert model_object(instances, MODEL).owned_by == "headway-simulated"
    assert model_object(instances, OTHER).owned_by == "headway"


def test_silent_instances_are_not_counted(registry: ModelRegistry):
    clock = FakeClock(NOW)
    instances = Instances(registry=registry, clock=clock)
    instances.on_status(status("one", MODEL, MODEL))
    clock.advance(SILENCE_S + 1)

    assert instances.by_model()[MODEL] == {"serving": 0, "able": 0}


def test_instances_that_reported_longest_ago_are_dropped_beyond_a_number(
    registry: ModelRegistry, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("services.gateway.instances.MAX_INSTANCES", 2)
    instances = Instances(registry=registry, clock=FakeClock(NOW))
    for name in ("one", "two", "one", "three"):
        instances.on_status(status(name, MODEL if name == "two" else OTHER, MODEL, OTHER))

    assert instances.by_model()[OTHER] == {"serving": 2, "able": 2}


async def test_a_name_waits_for_instances_that_release_its_former_model(registry: ModelRegistry):
    clock = FakeClock(NOW)
    instances = Instances(registry=registry, clock=clock)
    instances.on_status(msgspec.structs.replace(status("one", None), releasing=(MODEL,)))
    steps = AwaitedReleases(instances.releasing)
    entry = registry.entry(MODEL)

    with pytest.raises(SettingsError, match="still release the former model: one"):
        await steps.add(entry)
    instances.on_status(status("one", None))
    await steps.add(entry)


def test_a_model_of_an_instance_is_about_to_be_known_here(registry: ModelRegistry):
    instances = Instances(registry=registry, clock=FakeClock(NOW))
    instances.on_status(status("one", None, ModelName("new")))

    assert instances.serve("new")
    assert not instances.serve("other")


def test_a_gateway_awaits_models_until_an_instance_can_serve_each(registry: ModelRegistry):
    clock = FakeClock(NOW)
    instances = Instances(registry=registry, clock=clock)
    awaited = AwaitedModels(instances, (MODEL, OTHER))
    names = ", ".join(sorted((MODEL, OTHER)))
    assert awaited.reason() == f"no instance can serve {names} yet"
    instances.on_status(status("one", MODEL, MODEL))
    assert awaited.reason() == f"no instance can serve {OTHER} yet"
    loading = msgspec.structs.replace(status("two", None, MODEL, OTHER), activating=OTHER)
    instances.on_status(loading)
    assert awaited.reason() == f"no instance can serve {OTHER} yet"
    instances.on_status(status("two", MODEL, MODEL, OTHER))
    assert awaited.reason() is None
    clock.advance(SILENCE_S + 1)
    assert awaited.reason() is None  # requests wait in the queue


def test_a_gateway_awaits_no_model_that_it_was_not_asked_for_or_that_was_removed(
    registry: ModelRegistry,
):
    instances = Instances(registry=registry, clock=FakeClock(NOW))
    assert AwaitedModels(instances, ()).reason() is None
    assert AwaitedModels(instances, ("unknown",)).reason() is None
    awaited = AwaitedModels(instances, (MODEL,))
    registry.remove(MODEL)
    assert awaited.reason() is None
