"""Names whose requests are divided among models."""

import subprocess
import sys
from collections import Counter
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.contracts.base import ModelName
from shared.contracts.errors import ModelNotReadyError, SettingsError
from shared.contracts.models import TrafficSplit
from shared.models.registry import ModelRegistry, RegistryFile, encode_registry
from shared.models.splits import target_of
from shared.models.tiny import make_tiny_models
from tests.queued import MODEL, OTHER

CHAT = ModelName("chat")
NUM_IDS = 2000
weights = st.dictionaries(
    st.sampled_from(["a", "b", "c", "d", "e"]), st.floats(0.5, 20.0), min_size=1
)


def split_of(found: dict[str, float], name: str = CHAT) -> TrafficSplit:
    return TrafficSplit(name=ModelName(name), weights=found)


def targets(split: TrafficSplit, count: int = NUM_IDS) -> list[str]:
    return [target_of(split, f"req-{number}") for number in range(count)]


@settings(max_examples=40)
@given(weights)
def test_shares_approach_the_weights(found: dict[str, float]):
    counts = Counter(targets(split_of(found)))
    total = sum(found.values())
    for name, weight in found.items():
        expected = weight / total
        deviation = (expected * (1 - expected) / NUM_IDS) ** 0.5

        assert abs(counts[name] / NUM_IDS - expected) <= 5 * deviation


@settings(max_examples=40)
@given(weights, st.text(max_size=20))
def test_equal_ids_have_equal_targets_whatever_the_order(found: dict[str, float], request_id: str):
    reverse = dict(reversed(found.items()))

    assert target_of(split_of(found), request_id) == target_of(split_of(reverse), request_id)
    assert target_of(split_of(found), request_id) in found


@settings(max_examples=20)
@given(weights, st.floats(0.5, 20.0))
def test_a_raised_weight_only_moves_requests_to_its_target(found: dict[str, float], more: float):
    name = min(found)
    raised = found | {name: found[name] + more}
    before, after = targets(split_of(found), 500), targets(split_of(raised), 500)

    assert all(new in (old, name) for old, new in zip(before, after, strict=True))


def test_targets_are_equal_in_another_process():
    code = (
        "from tests.unit.models.test_splits import *; "
        "print(*targets(split_of({'a': 1.0, 'b': 3.0}), 50))"
    )
    other = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout

    assert other.split() == targets(split_of({"a": 1.0, "b": 3.0}), 50)


def test_splits_with_equal_weights_divide_requests_independently():
    """Else all splits would try their new models with the same requests."""
    one = targets(split_of({"a": 1.0, "b": 1.0}, "one"))
    two = targets(split_of({"a": 1.0, "b": 1.0}, "two"))

    assert 0.4 < sum(x == y for x, y in zip(one, two, strict=True)) / NUM_IDS < 0.6


def load(path: Path, *splits: TrafficSplit) -> ModelRegistry:
    registry = ModelRegistry.load(path)
    models = tuple(registry.entry(base) for base in registry.bases)
    content = encode_registry(RegistryFile(models=models, splits=splits))
    return ModelRegistry.of_file(path, content)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return make_tiny_models(tmp_path, weights=False)


def test_a_split_resolves_to_a_target_by_the_id(path: Path):
    split = split_of({MODEL: 1.0, OTHER: 1.0})
    registry = load(path, split)
    found = {registry.resolve(CHAT, f"req-{number}").name for number in range(50)}

    assert found == {MODEL, OTHER}
    assert registry.resolve(CHAT, "r").name == target_of(split, "r")
    assert CHAT in registry.names
    assert CHAT not in registry.bases


@pytest.mark.parametrize(
    ("split", "message"),
    [
        (split_of({"missing": 1.0}), "unknown model 'missing'"),
        (split_of({}), "no targets"),
        (split_of({MODEL: 1.0}, OTHER), "a model and a split"),
        (msgspec.structs.replace(split_of({MODEL: 1.0}), fallback="no"), "unknown model 'no'"),
        (split_of({MODEL: 1.0}, MODEL), "a model and a split"),
    ],
)
def test_a_wrong_split_is_refused(path: Path, split: TrafficSplit, message: str):
    with pytest.raises(SettingsError, match=message):
        load(path, split)


def test_models_of_a_split_have_one_task(path: Path):
    registry = ModelRegistry.load(path)
    first, second = (registry.entry(name) for name in (MODEL, OTHER))
    pooling = msgspec.structs.replace(second, task="embed")
    with pytest.raises(SettingsError, match="different tasks: embed, generate"):
        ModelRegistry([first, pooling], splits=[split_of({MODEL: 1.0, OTHER: 1.0})])


def test_a_target_that_is_not_served_yet_is_not_ready(path: Path):
    registry = load(path)
    registry.set_splits([split_of({"new": 1.0})])
    registry.expected = frozenset({"new"})

    with pytest.raises(ModelNotReadyError, match="'new' is not ready"):
        registry.resolve(CHAT, "r")
