"""Models in host memory, and the path by which the next model becomes active."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.agent.backends.residency import Activation, Footprint, ResidencyTable
from services.agent.backends.weights import HostWeights, engine_shape
from shared.contracts.base import ModelName
from shared.contracts.errors import EngineError
from shared.contracts.models import ModelEntry
from shared.contracts.telemetry import ActivationPath, Residency
from shared.models.files.sizes import weight_bytes, weight_files
from shared.models.registry import ModelRegistry
from shared.models.tiny import make_tiny_models

A, B, C = ModelName("a"), ModelName("b"), ModelName("c")
PRIOR_S = {
    ActivationPath.PARKED: 0.1,
    ActivationPath.RELOAD: 1.0,
    ActivationPath.START: 4.0,
    ActivationPath.COLD: 5.0,
}


def table(*, warm_bytes: int, shapes: tuple[str, str, str] = ("", "", "")) -> ResidencyTable:
    """Three models with 10 bytes of weights each and engines of 100 bytes."""
    footprints = {
        name: Footprint(weight_bytes=10, engine_bytes=100, shape=shape)
        for name, shape in zip((A, B, C), shapes, strict=True)
    }
    return ResidencyTable(footprints, warm_bytes=warm_bytes, prior_s=PRIOR_S)


def activate(made: ResidencyTable, model: ModelName, duration_s: float = 2.0) -> Activation:
    activation = made.activation(model)
    assert activation is not None
    made.activated(activation, duration_s)
    return activation


def test_least_recently_active_model_is_dropped_first() -> None:
    made = table(warm_bytes=100)
    for model in (A, B):
        assert activate(made, model).drop == ()
    assert activate(made, C).drop == (A,)
    assert [state.residency for state in made.states()] == [
        Residency.COLD,
        Residency.WARM,
        Residency.ACTIVE,
    ]
    assert made.used_bytes == 100


def test_parked_engine_is_cheapest_and_drops_no_model() -> None:
    made = table(warm_bytes=200, shapes=("s", "s", "t"))
    activate(made, A)
    made.parked(B)
    assert activate(made, B) == Activation(model=B, path=ActivationPath.PARKED)
    assert made.residency(A) is Residency.WARM


def test_weights_are_loaded_into_an_engine_of_equal_shape() -> None:
    made = table(warm_bytes=200, shapes=("s", "s", "t"))
    activate(made, A)
    assert activate(made, C).path is ActivationPath.COLD
    reload = activate(made, B)
    assert (reload.path, reload.donor, reload.drop) == (ActivationPath.RELOAD, A, ())
    assert made.residency(A) is Residency.COLD
    assert made.residency(C) is Residency.WARM


def test_models_without_a_shape_never_share_an_engine() -> None:
    made = table(warm_bytes=0)
    activate(made, A)
    assert activate(made, B).path is ActivationPath.COLD


def test_without_warm_memory_the_former_model_is_dropped() -> None:
    made = table(warm_bytes=0)
    activate(made, A)
    assert activate(made, B).drop == (A,)
    assert made.residency(A) is Residency.COLD


def test_held_weights_shorten_the_start_and_count_until_loaded() -> None:
    made = table(warm_bytes=110)
    activate(made, A)
    made.held(B)
    assert (made.residency(B), made.used_bytes) == (Residency.WARM, 10)
    assert made.activate_s(B) == 4.0
    activate(made, B)
    assert (made.residency(A), made.used_bytes) == (Residency.WARM, 100)


def test_held_weights_of_the_active_model_are_not_counted() -> None:
    made = table(warm_bytes=105)
    activate(made, A)
    made.held(B)
    assert activate(made, B).drop == ()
    assert made.used_bytes == 100
    # B would not fit beside A when B leaves the device: the model active longest ago, A, is
    # dropped.
    assert activate(made, C).drop == (A,)


def test_dead_engine_has_no_activation_path() -> None:
    made = table(warm_bytes=200)
    activate(made, A)
    made.held(B)
    activate(made, B)
    made.lose(B)
    assert (made.active, made.path(B)) == (None, ActivationPath.START)


def test_path_with_the_higher_prior_is_taken_if_it_is_measured_as_faster() -> None:
    made = table(warm_bytes=1000, shapes=("s", "s", "s"))
    activate(made, A, duration_s=0.5)
    # The cold path was just measured at 0.5 s, below the other path's prior of 1 s.
    assert made.path(B) is ActivationPath.COLD


def test_one_slow_activation_does_not_exclude_a_path_permanently() -> None:
    made = table(warm_bytes=1000, shapes=("s", "s", "s"))
    activate(made, A, duration_s=5.0)
    assert activate(made, B, duration_s=60.0).path is ActivationPath.RELOAD
    taken = []
    for _ in range(40):
        made.drop((A, B))
        made.parked(C)
        taken.append(activate(made, B, duration_s=5.0).path)
    assert taken[:5] == [ActivationPath.COLD] * 5
    assert ActivationPath.RELOAD in taken


def test_path_that_stays_slow_is_tried_rarely() -> None:
    made = table(warm_bytes=1000, shapes=("s", "s", "s"))
    taken = []
    for _ in range(300):
        made.drop((A, B))
        made.parked(C)
        path = made.path(B)
        activate(made, B, duration_s=60.0 if path is ActivationPath.RELOAD else 5.0)
        taken.append(path)
    assert 1 <= taken.count(ActivationPath.RELOAD) <= 15


def test_measured_activation_times_replace_priors() -> None:
    made = table(warm_bytes=0)
    assert made.activate_s(A) == 5.0
    activate(made, A, duration_s=2.0)
    assert made.activate_s(A) == 0.0
    made.clear()
    assert (made.active, made.activate_s(A)) == (None, 2.0)
    # No activation of B was measured, but the path's last time is known.
    assert made.activate_s(B) == 2.0


@given(
    warm_bytes=st.integers(0, 350),
    steps=st.lists(
        st.tuples(st.sampled_from(("activate", "park", "hold", "drop")), st.sampled_from((A, B, C)))
    ),
    shapes=st.tuples(*[st.sampled_from(("", "s"))] * 3),
)
def test_warm_memory_never_exceeds_the_budget(warm_bytes, steps, shapes) -> None:
    made = table(warm_bytes=warm_bytes, shapes=shapes)
    for step, model in steps:
        cold = made.residency(model) is Residency.COLD
        if step == "activate" and model != made.active:
            activation = activate(made, model)
            assert model not in activation.drop
            assert made.active == model
        elif step == "park" and cold and made.room_for_engine(model):
            made.parked(model)
        elif step == "hold" and cold and made.room_for_weights(model):
            made.held(model)
        elif step == "drop" and model != made.active:
            made.drop((model,))
            assert made.residency(model) is Residency.COLD
        assert made.used_bytes <= warm_bytes
        assert sum(state.residency is Residency.ACTIVE for state in made.states()) <= 1


@pytest.fixture(scope="module")
def entries(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ModelEntry]:
    registry = ModelRegistry.load(make_tiny_models(tmp_path_factory.mktemp("models")))
    return {name: registry.entry(name) for name in registry.bases}


def test_engines_of_one_architecture_have_equal_shapes(entries: dict[str, ModelEntry]) -> None:
    shapes = {name: engine_shape(entry) for name, entry in entries.items()}
    assert shapes["tiny-llama"] == shapes["tiny-llama-b"] != ""
    assert shapes["tiny-qwen"] != shapes["tiny-llama"]


def test_model_without_a_configuration_has_no_shape(tmp_path: Path) -> None:
    entry = ModelEntry(name=A, path=str(tmp_path), architecture="x", max_model_len=16)
    assert engine_shape(entry) == ""


def is_mapped(path: Path) -> bool:
    """Return whether this process maps the file at *path*."""
    return str(path.resolve()) in Path("/proc/self/maps").read_text()


async def test_weights_are_held_and_released(entries: dict[str, ModelEntry]) -> None:
    entry = entries["tiny-llama"]
    (file,) = weight_files(entry)
    assert weight_bytes(entry) == entry.weight_bytes > 0
    assert file.name == "model.safetensors"
    held = HostWeights()
    for leave in (lambda: held.release(entry.name), held.close):
        await held.hold(entry)
        await held.hold(entry)
        assert is_mapped(file)
        leave()
        leave()
        assert not is_mapped(file)


async def test_error_for_unreadable_weights_names_the_model(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "nowhere")
    entry = ModelEntry(name=A, path=str(tmp_path), architecture="x", max_model_len=16)
    with pytest.raises(EngineError, match="cannot read the weights of a"):
        await HostWeights().hold(entry)
